// Copies from global to shared memory of each thread for itself, without registers (cp.async): any number under way.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

// kBytes bytes, 4, 8 or 16, both addresses multiples of that; of these the first `bytes` are read, the rest become zero.
template <int kBytes>
__device__ inline void copy_async(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes) : "memory");
}

// All 16 bytes, past the L1 cache. In a few instructions less: a number of bytes known at run time alone takes some.
__device__ inline void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Ends a group: the copies that this thread has begun since the last one, perhaps none.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until no more than kGroups of this thread's groups are under way, the latest. Copies count as its ordinary writes of shared memory.
template <int kGroups>
__device__ inline void copy_async_wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Until all copies of this thread are done. They count as its ordinary writes of shared memory.
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace flashsdpa::ptx
