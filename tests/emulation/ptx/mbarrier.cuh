// Emulated src/ptx/mbarrier.cuh.
#pragma once

#include "../../emulation/device.h"

namespace flashsdpa::ptx {

// Of the dynamic shared memory, the only object there is.
inline uint32_t shared_address(const void*) { return emulation::kSharedBase; }

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  if (barrier % 8) emulation::fail("an mbarrier at an address that is no multiple of 8");
  emulation::MBarrier fresh;
  fresh.expected = fresh.missing = arrivals;
  emulation::current().block->mbarriers[barrier] = fresh;
}
inline void mbarrier_init_fence() {
  for (auto& [address, barrier] : emulation::current().block->mbarriers) barrier.fenced = true;
}
inline void mbarrier_arrive(uint32_t barrier) {
  emulation::mbarrier_arrived(*emulation::current().block, barrier, 1, 0);
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulation::mbarrier_arrived(*emulation::current().block, barrier, 1, bytes);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const emulation::MBarrier& state = emulation::mbarrier(*emulation::current().block, barrier);
  emulation::wait_until([&] { return state.completed % 2 != parity; }, "the mbarrier at", barrier);
}

}  // namespace flashsdpa::ptx
