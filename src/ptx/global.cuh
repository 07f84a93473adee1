// Global memory that several blocks write: additions, and the order of who comes first.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

// Four additions of floats, each atomic; `global` is aligned to 16 bytes.
__device__ inline void reduce_add_floats(float* global, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// What the thread that added to this word wrote before is seen by whoever loads the sum.
__device__ inline uint32_t load_acquire(const uint32_t* global) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}
__device__ inline void add_release(uint32_t* global, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// Orders bulk copies of this thread before and after with its ordinary accesses of any memory.
__device__ inline void fence_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace flashsdpa::ptx
