// Emulated src/ptx/copy_async.cuh. A copy is made at once or, as often, not before the thread waits for it.
#pragma once

#include <unordered_map>

#include "../../emulation/device.h"

namespace flashsdpa::ptx {

struct CopyAsync {
  uint32_t shared;
  const void* global;
  int bytes;
  void make() const {
    uint8_t* target = emulation::shared_bytes(*emulation::current().block, shared, 4, false);
    std::memset(target, 0, 4);
    std::memcpy(target, global, static_cast<size_t>(bytes));
    emulation::wrote_shared(shared, 4);
  }
};
inline std::unordered_map<const emulation::Thread*, std::vector<CopyAsync>> copies_under_way;

inline void copy_async_4(uint32_t shared, const void* global, int bytes) {
  if (shared % 4 || reinterpret_cast<uintptr_t>(global) % 4) emulation::fail("an asynchronous copy at a misaligned address");
  const CopyAsync copy{shared, global, bytes};
  if (emulation::random_number() % 2) {
    copy.make();
  } else {
    copies_under_way[&emulation::current()].push_back(copy);
  }
}
inline void copy_async_wait() {
  auto& copies = copies_under_way[&emulation::current()];
  for (const CopyAsync& copy : copies) copy.make();
  copies.clear();
}

}  // namespace flashsdpa::ptx
