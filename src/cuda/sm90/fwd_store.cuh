// A consumer's epilogue: 64 rows of output, scaled and rounded, to global memory.
#pragma once

#include "fwd_load.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

// Through shared memory: the tile in the layout of a TMA box, one thread issues the store. The caller has made sure
// that the previous store has read this memory.
template <typename Tile, bool kBFloat16>
__device__ inline void stage_out(uint32_t shared, const float (&o)[Tile::kDimV / 2], const float (&factor)[2],
                                 int thread) {
  const int lane = thread % ptx::kWarpLanes, warp = thread / ptx::kWarpLanes;
  const int row = warp * 16 + lane % 16, half = lane / 16;  // whose address this lane gives: of 8 columns, or 8 more
#pragma unroll
  for (int j = 0; j < Tile::kDimV / 16; ++j) {
    uint32_t r[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int i = 8 * j + 2 * t;
      r[t] = ptx::pack<kBFloat16>(o[i] * factor[t % 2], o[i + 1] * factor[t % 2]);
    }
    ptx::stmatrix_x4(shared + swizzled_offset<kConsumerRows>(row, 2 * j + half), r[0], r[1], r[2], r[3]);
  }
}

template <typename Tile>
__device__ inline void store_staged(uint32_t shared, const FwdArgs& args, int row, int head, int batch) {
#pragma unroll
  for (int box = 0; box < Tile::kBoxesV; ++box) {
    ptx::tma_store(&args.map_out, shared + box * Tile::kQueryBoxBytes, {box * kBoxColumns, row, head, batch});
  }
  ptx::tma_store_commit();
}

// Straight from the accumulators, for outputs that TMA cannot write.
template <typename Tile, bool kBFloat16>
__device__ inline void store_plain(const FwdTensor& out, const float (&o)[Tile::kDimV / 2], const float (&factor)[2],
                                   int row, int head, int batch, int thread) {
  const int lane = thread % ptx::kWarpLanes, warp = thread / ptx::kWarpLanes;
  uint16_t* base = out.data + batch * out.stride_batch + head * out.stride_head;
#pragma unroll
  for (int i = 0; i < Tile::kDimV / 2; i += 2) {
    const int r = row + warp * 16 + lane / 4 + 8 * score_row(i), column = score_column(i) + 2 * (lane % 4);
    const uint32_t pair = ptx::pack<kBFloat16>(o[i] * factor[score_row(i)], o[i + 1] * factor[score_row(i)]);
    uint16_t* target = base + r * out.stride_row + column;
    if (r < out.rows && column < out.columns) target[0] = uint16_t(pair);
    if (r < out.rows && column + 1 < out.columns) target[1] = uint16_t(pair >> 16);
  }
}

}  // namespace flashsdpa
