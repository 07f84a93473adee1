// Warpgroup matrix products D (64 x N, float32, registers) += A (64 x 16) * B (16 x N), asynchronous.
//
// Use: fence, issue any number, commit, wait. Between issue and wait nobody touches the accumulators or the registers
// of A. Accumulator i of a lane is row 16 * warp + lane / 4 + 8 * ((i / 2) % 2),
// column 8 * (i / 4) + 2 * (lane % 4) + i % 2.
#pragma once

#include <cstdint>

#include "wgmma_shapes.cuh"

namespace flashsdpa::ptx {

// The accumulators of earlier instructions are settled before the tensor cores take them over.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most kPending committed groups are unfinished.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers are no memory, so a clobber does not keep the compiler from moving their use across a wait, or what is put into
// them across a fence: this does.
template <int kCount>
__device__ inline void wgmma_settle(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Has the first kHere values computed here, under the products in flight, and not where they are needed: the assembler, which sees no
// more than instructions, would sink them behind the wait that follows. For that it is told of a store that never happens
// (`never` is false, and known only at run time).
template <int kHere, int kCount>
__device__ inline void wgmma_compute_here(const float (&values)[kCount], bool never) {
  if (!never) return;
#pragma unroll
  for (int i = 0; i < kHere; ++i) asm volatile("st.shared.f32 [%0], %1;" ::"r"(0), "f"(values[i]) : "memory");
}
template <int kCount>
__device__ inline void wgmma_compute_here(const uint32_t (&words)[kCount], bool never) {
  if (!never) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("st.shared.u32 [%0], %1;" ::"r"(0), "r"(words[i]) : "memory");
}

// Registers of A stay as they are up to here, behind the wait for the products that read them.
template <int kRows>
__device__ inline void wgmma_keep(const uint32_t (&registers)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kRows; ++i) asm volatile("" ::"r"(registers[i / 4][i % 4]) : "memory");
}

// A copy that the compiler does not merge with its source: registers of A must not be written while a product reads
// them, and a merged copy would write them where the source is computed.
__device__ inline uint32_t wgmma_register_copy(uint32_t source) {
  uint32_t copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(source));
  return copy;
}

// A shared-memory operand in tiles of 128-byte rows with the 128-byte swizzle, as TMA writes them (8 rows: 1024 bytes).
//   K-major (Q and K of Q K^T): 64 elements of k a row; `group_bytes` unused; 16 elements of k further is 32 bytes.
//   MN-major (V of P V): 64 columns a row; 16 rows of k further is 2048 bytes; `group_bytes` to the next 64 columns.
__device__ inline uint64_t wgmma_operand(uint32_t shared, uint32_t group_bytes = 16) {
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(group_bytes >> 4) << 16 | (kEightRows >> 4) << 32 |
         kSwizzle128 << 62;
}
// The operand `bytes` further on (addresses are in units of 16 bytes and never carry out of their field).
__device__ inline uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

}  // namespace flashsdpa::ptx
