// Emulated src/ptx/copy_async.cuh. A copy is made at once or, as often, not before the thread waits for it.
#pragma once

#include <unordered_map>

#include "../../emulation/device.h"

namespace flashsdpa::ptx {

struct CopyAsync {
  uint32_t shared;
  const void* global;
  uint32_t size;
  int bytes;
  void make() const {
    uint8_t* target = emulation::shared_bytes(*emulation::current().block, shared, size, false);
    std::memset(target, 0, size);
    std::memcpy(target, global, static_cast<size_t>(bytes));
    emulation::wrote_shared(shared, size);
  }
};
inline std::unordered_map<const emulation::Thread*, std::vector<CopyAsync>> copies_under_way;

inline void copy_async(uint32_t shared, const void* global, uint32_t size, int bytes) {
  if (shared % size || reinterpret_cast<uintptr_t>(global) % size) {
    emulation::fail("an asynchronous copy at a misaligned address");
  }
  const CopyAsync copy{shared, global, size, bytes};
  if (emulation::random_number() % 2) {
    copy.make();
  } else {
    copies_under_way[&emulation::current()].push_back(copy);
  }
}
inline void copy_async_4(uint32_t shared, const void* global, int bytes) { copy_async(shared, global, 4, bytes); }
inline void copy_async_16(uint32_t shared, const void* global, int bytes) { copy_async(shared, global, 16, bytes); }
inline void copy_async_wait() {
  auto& copies = copies_under_way[&emulation::current()];
  for (const CopyAsync& copy : copies) copy.make();
  copies.clear();
}

}  // namespace flashsdpa::ptx
