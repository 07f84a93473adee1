// Copies from global to shared memory of each thread for itself, without registers (cp.async): any number under way.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

// Four bytes, both addresses multiples of 4; of these the first `bytes` are read, the rest become zero.
__device__ inline void copy_async_4(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Sixteen bytes, both addresses multiples of 16.
__device__ inline void copy_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Until all copies of this thread are done. They count as its ordinary writes of shared memory.
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace flashsdpa::ptx
