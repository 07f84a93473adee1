// For the delay test (tests/gpu/test_delays_sm90.py), which is built with FLASHSDPA_TEST_DELAYS; nothing otherwise.
//
// A missing barrier often shows nothing, because the roles happen to run in the right order. With pauses of random
// length where they wait for and signal each other they run in many orders, and what reads shared memory that nobody
// has written reads NaN.
#pragma once

#include <cstdint>

#include "../../ptx/warpgroup.cuh"

namespace flashsdpa {

enum class FwdPoint : uint32_t { kLoad, kKeyThere, kFree, kStore };

#ifdef FLASHSDPA_TEST_DELAYS

// Every warp for itself: up to about 1 us, one time in 16 up to about 16 us. No branch, so that the warp stays together.
__device__ inline void fwd_delay(FwdPoint point) {
  uint32_t x = uint32_t(clock64()) + (threadIdx.x / ptx::kWarpLanes * 4 + uint32_t(point)) * 0x9e3779b9u + blockIdx.x;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  const uint32_t nanoseconds = x >> 22;  // 0 .. 1023
  __nanosleep(x % 16 == 0 ? 16 * nanoseconds : nanoseconds);
}

// All of the block's shared memory becomes NaN, in every 16-bit type; before anything is initialised in it.
template <int kBytes>
__device__ inline void fwd_poison(uint32_t shared) {
  for (uint32_t offset = 4 * threadIdx.x; offset < kBytes; offset += 4 * blockDim.x) {
    ptx::store_shared_4(shared + offset, 0xffffffffu);
  }
  ptx::fence_proxy_shared();  // or the copy engine's first tiles might be overwritten
  __syncthreads();
}

#else

__device__ inline void fwd_delay(FwdPoint) {}
template <int kBytes>
__device__ inline void fwd_poison(uint32_t) {}

#endif

}  // namespace flashsdpa
