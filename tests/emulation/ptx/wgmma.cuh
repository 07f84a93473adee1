// Emulated src/ptx/wgmma.cuh.
#pragma once

#include "wgmma_shapes.cuh"

namespace flashsdpa::ptx {

inline void wgmma_fence() { emulation::fence_products(); }
inline void wgmma_commit() { emulation::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulation::wait_for_products(kPending);
}
template <int kCount>
void wgmma_settle(float (&)[kCount]) {}
template <int kHere, int kCount>
void wgmma_compute_here(const float (&)[kCount], bool) {}
template <int kCount>
void wgmma_compute_here(const uint32_t (&)[kCount], bool) {}
template <int kRows>
void wgmma_keep(const uint32_t (&)[kRows][4]) {}
inline uint32_t wgmma_register_copy(uint32_t source) { return source; }

inline uint64_t wgmma_operand(uint32_t shared, uint32_t group_bytes = 16) {
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return uint64_t{(shared & 0x3ffff) >> 4} | uint64_t{group_bytes >> 4} << 16 | (kEightRows >> 4) << 32 | kSwizzle128 << 62;
}
inline uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

}  // namespace flashsdpa::ptx
