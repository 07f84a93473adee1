// Tiles of float32 rows in shared memory, for products on mma.sync that read a tile by rows (f32_scores) and by columns
// (f32_add_product) without bank conflicts.
//
// A row has kDim floats, in chunks of 16 bytes. Chunk c of row r lies at place c ^ swizzle(r): eight lanes that read four
// neighbouring chunks of rows 2 i and 2 i + 1 find eight different groups of banks, and so do eight that read chunks 2 i and
// 2 i + 1 of rows r, r + 2, r + 4, r + 6.
#pragma once

#include "../../ptx/copy_async.cuh"
#include "../../ptx/warpgroup.cuh"
#include "f32_args.h"

namespace flashsdpa {

constexpr int kF32Chunk = 4;          // floats
constexpr uint32_t kF32Align = 128;  // of tiles: parts of an address can then be found by xor

__device__ inline uint32_t f32_align(uint32_t shared) { return (shared + kF32Align - 1) / kF32Align * kF32Align; }

__device__ constexpr uint32_t f32_swizzle(int row) { return uint32_t((row ^ row >> 1) & 1) << 2 | uint32_t(row >> 2 & 1) << 1; }
// Of a chunk, in a tile whose rows are kDim floats.
template <int kDim>
__device__ constexpr uint32_t f32_place(int row, int chunk) {
  return uint32_t(row * kDim * 4) + (uint32_t(chunk) ^ f32_swizzle(row)) * 16;
}

__device__ inline const float* f32_plane(const F32Tensor& t, int64_t batch, int64_t head) {
  return t.data + batch * t.stride_batch + head * t.stride_head;
}

// Starts the copies of kRows rows from `first` on by kThreads threads; what lies outside the tensor becomes zero.
template <int kRows, int kDim, int kThreads>
__device__ inline void f32_load(uint32_t tile, const F32Tensor& t, const float* plane, int first) {
  constexpr int kChunks = kDim / kF32Chunk, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int chunk = int(threadIdx.x) % kChunks, column = chunk * kF32Chunk, begin = int(threadIdx.x) / kChunks;
  const int columns = max(min(t.columns - column, kF32Chunk), 0), rows = t.rows - first;
  const float* source = plane + (first + begin) * t.stride_row + int64_t(column) * t.stride_column;
  if (t.vectors) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i, source += kStep * t.stride_row) {
      const int row = begin + i * kStep, there = row < rows ? columns : 0;
      ptx::copy_async<16>(tile + f32_place<kDim>(row, chunk), there ? source : plane, there * 4);
    }
    return;
  }
#pragma unroll 1
  for (int row = begin; row < kRows; row += kStep, source += kStep * t.stride_row) {
    const int there = row < rows ? columns : 0;
    const uint32_t target = tile + f32_place<kDim>(row, chunk);
#pragma unroll
    for (int e = 0; e < kF32Chunk; ++e) {
      ptx::copy_async<4>(target + 4 * e, e < there ? source + e * t.stride_column : plane, e < there ? 4 : 0);
    }
  }
}

}  // namespace flashsdpa
