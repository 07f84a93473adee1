// Accumulators on their way to global memory, through shared memory: pieces of dQ, and, the last step of a tile, dK and dV of its
// keys, scaled and rounded.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "bwd_shared.cuh"
#include "fwd_load.cuh"

namespace flashsdpa {

// Where a tile starts in its tensor.
struct BwdOrigin {
  int row, head, batch;
};

// A piece of dQ, in the order of the sum: four registers of all threads, then the next four.
template <int kFirst, int kEnd, int kCount>
__device__ inline void stage_piece(uint32_t piece, const float (&values)[kCount], int thread) {
#pragma unroll
  for (int i = kFirst; i < kEnd; i += 4) {
    ptx::store_shared_floats(piece + i * (ptx::kWarpgroupThreads * 4) + thread * 16, values[i], values[i + 1], values[i + 2],
                             values[i + 3]);
  }
}

// 64 keys from `row` on of a tile of kRows: an accumulator of keys x columns.
template <int kRows, bool kBFloat16, int kCount>
__device__ inline void stage_rows(uint32_t shared, const float (&values)[kCount], float factor, int row, int thread) {
  const int lane = thread % ptx::kWarpLanes, warp = thread / ptx::kWarpLanes;
  const int at = row + warp * 16 + lane % 16, half = lane / 16;  // whose address this lane gives: of 8 columns, or 8 more
#pragma unroll
  for (int j = 0; j < kCount / 8; ++j) {
    uint32_t r[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      r[t] = ptx::pack<kBFloat16>(values[8 * j + 2 * t] * factor, values[8 * j + 2 * t + 1] * factor);
    }
    ptx::stmatrix_x4(shared + swizzled_offset<kRows>(at, 2 * j + half), r[0], r[1], r[2], r[3]);
  }
}

// One box of 64 columns of all kRows keys: an accumulator of columns x keys.
template <int kRows, bool kBFloat16>
__device__ inline void stage_columns(uint32_t shared, const float (&values)[kRows / 2], float factor, int thread) {
  const int lane = thread % ptx::kWarpLanes, warp = thread / ptx::kWarpLanes;
  const int row = lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;  // the 8 x 8 elements this lane points at
#pragma unroll
  for (int j = 0; j < kRows / 16; ++j) {
    uint32_t r[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      r[t] = ptx::pack<kBFloat16>(values[8 * j + 2 * t] * factor, values[8 * j + 2 * t + 1] * factor);
    }
    ptx::stmatrix_x4_transposed(shared + swizzled_offset<kRows>(16 * j + row, chunk), r[0], r[1], r[2], r[3]);
  }
}

// A staged tile of kRows keys. By TMA: by one thread, which commits. Else by `threads` of them.
template <int kRows, int kBoxes>
__device__ inline void store_tile(uint32_t shared, const FwdTensor& tensor, const CUtensorMap* map, BwdOrigin at,
                                  int thread, int threads) {
  if (tensor.tma) {
    if (thread > 0) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      ptx::tma_store(map, shared + box * kRows * kBoxRowBytes, {box * kBoxColumns, at.row, at.head, at.batch});
    }
    ptx::tma_store_commit();
    return;
  }
  uint16_t* base = tensor.data + at.batch * tensor.stride_batch + at.head * tensor.stride_head;
  constexpr int kPairs = kBoxes * kBoxColumns / 2;
#pragma unroll 1
  for (int i = thread; i < kRows * kPairs; i += threads) {
    const int r = i / kPairs, pair = i % kPairs;
    const uint32_t both = ptx::load_shared_4(shared + swizzled_offset<kRows>(r, pair / 4) + pair % 4 * 4);
    uint16_t* target = base + (at.row + r) * tensor.stride_row + 2 * pair;
    if (at.row + r < tensor.rows && 2 * pair < tensor.columns) target[0] = uint16_t(both);
    if (at.row + r < tensor.rows && 2 * pair + 1 < tensor.columns) target[1] = uint16_t(both >> 16);
  }
}

// Keys that no query sees.
template <int kRows>
__device__ inline void store_zeros(const FwdTensor& tensor, BwdOrigin at, int thread, int threads) {
  uint16_t* base = tensor.data + at.batch * tensor.stride_batch + at.head * tensor.stride_head;
  const int rows = min(kRows, tensor.rows - at.row);
#pragma unroll 1
  for (int i = thread; i < rows * tensor.columns; i += threads) {
    base[(at.row + i / tensor.columns) * tensor.stride_row + i % tensor.columns] = 0;
  }
}

template <typename Tile>
__device__ inline void store_gradients(const BwdArgs& args, const BwdShared<Tile>& shared, int stage, const FwdWork& work, int thread) {
  constexpr int kThreads = Tile::kConsumers * ptx::kWarpgroupThreads;
  const BwdOrigin at{work.row, work.head, work.batch};
  store_tile<Tile::kBlockN, Tile::kBoxesV>(shared.dv(), args.dv, &args.map_dv, at, thread, kThreads);
  store_tile<Tile::kBlockN, Tile::kBoxes>(shared.dk(stage), args.dk, &args.map_dk, at, thread, kThreads);
}

template <typename Tile>
__device__ inline void store_zero_gradients(const BwdArgs& args, const FwdWork& work, int thread) {
  constexpr int kThreads = Tile::kConsumers * ptx::kWarpgroupThreads;
  const BwdOrigin at{work.row, work.head, work.batch};
  store_zeros<Tile::kBlockN>(args.dv, at, thread, kThreads);
  store_zeros<Tile::kBlockN>(args.dk, at, thread, kThreads);
}

}  // namespace flashsdpa
