// What the warpgroups of a specialised kernel need of each other: register hand-over, named barriers, proxy fences.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

constexpr int kWarpLanes = 32;
constexpr int kWarpgroupThreads = 128;

// The whole warpgroup gives registers back, or takes them (and waits until they are free). Multiples of 8.
template <int kRegisters>
__device__ inline void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Named barrier `id` (0 is __syncthreads): complete once `threads` threads have arrived, waiting or not.
__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary writes of shared memory before later reads by the copy engine and the tensor cores.
__device__ inline void fence_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8x8 tiles of 16-bit elements: lane l names the address of row l % 8 of tile l / 8; register t of a lane holds
// elements 2 * (l % 4), + 1 of row l / 4 of tile t.
__device__ inline void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// The same registers, each tile stored transposed: row r of a tile in memory is its column r.
__device__ inline void stmatrix_x4_transposed(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// The same four tiles read: register t of a lane gets elements 2 * (l % 4), + 1 of row l / 4 of tile t; transposed, of column l / 4.
template <bool kTransposed>
__device__ inline void ldmatrix_x4(uint32_t shared, uint32_t (&r)[4]) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
  }
}

__device__ inline void store_shared_floats(uint32_t shared, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ inline void store_shared_16(uint32_t shared, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ inline void store_shared_8(uint32_t shared, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(x), "r"(y) : "memory");
}
__device__ inline void store_shared_4(uint32_t shared, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}
__device__ inline uint32_t load_shared_4(uint32_t shared) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(shared) : "memory");
  return x;
}
__device__ inline float load_shared_float(uint32_t shared) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(shared) : "memory");
  return x;
}
__device__ inline void load_shared_floats(uint32_t shared, float& x, float& y) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(shared) : "memory");
}
__device__ inline void load_shared_floats(uint32_t shared, float& x, float& y, float& z, float& w) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(shared) : "memory");
}

__device__ inline uint2 load_shared_8(uint32_t shared) {
  uint2 pair;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pair.x), "=r"(pair.y) : "r"(shared) : "memory");
  return pair;
}

}  // namespace flashsdpa::ptx
