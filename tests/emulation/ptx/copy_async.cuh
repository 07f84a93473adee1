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
struct CopyGroups {
  std::vector<CopyAsync> open;
  std::vector<std::vector<CopyAsync>> committed;
};
inline std::unordered_map<const emulation::Thread*, CopyGroups> copies_under_way;

template <int kBytes>
void copy_async(uint32_t shared, const void* global, int bytes) {
  constexpr uint32_t size = kBytes;
  if (shared % size || reinterpret_cast<uintptr_t>(global) % size) {
    emulation::fail("an asynchronous copy at a misaligned address");
  }
  const CopyAsync copy{shared, global, size, bytes};
  if (emulation::random_number() % 2) {
    copy.make();
  } else {
    copies_under_way[&emulation::current()].open.push_back(copy);
  }
}
inline void copy_async_16(uint32_t shared, const void* global) { copy_async<16>(shared, global, 16); }
inline void copy_async_commit() {
  CopyGroups& copies = copies_under_way[&emulation::current()];
  copies.committed.push_back(std::move(copies.open));
  copies.open.clear();
}
template <int kGroups>
void copy_async_wait_for_all_but() {
  auto& groups = copies_under_way[&emulation::current()].committed;
  while (groups.size() > kGroups) {
    for (const CopyAsync& copy : groups.front()) copy.make();
    groups.erase(groups.begin());
  }
}
inline void copy_async_wait() {
  copy_async_commit();
  copy_async_wait_for_all_but<0>();
}

}  // namespace flashsdpa::ptx
