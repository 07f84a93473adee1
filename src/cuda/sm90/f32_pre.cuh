// Kernel before the backward kernels in float32: F32Stats of each row, a block of queries at a time.
#pragma once

#include "f32_backward.cuh"
#include "f32_forward.cuh"

namespace flashsdpa {

// Deltas by one warp a row. Returns whether any row of the block has a log-sum-exp that lost digits; every warp finds the same.
template <typename Tile>
__device__ inline bool f32_pre_rows(const F32Args& args, int batch, int head, int first) {
  const int warp = int(threadIdx.x) / ptx::kWarpLanes, lane = int(threadIdx.x) % ptx::kWarpLanes;
  const int64_t rows_before = (int64_t{batch} * args.heads_q + head) * args.seq_q;
  const float *out = f32_plane(args.out, batch, head), *grad = f32_plane(args.grad_out, batch, head);
  const float *lse = args.given_lse, *grad_lse = args.grad_lse;
  const int end = min(first + Tile::kBlockM, args.seq_q);
  bool coarse = false;
  for (int row = first + lane; row < end; row += ptx::kWarpLanes) {
    const float value = fabsf(__ldg(lse + rows_before + row));
    coarse |= value > kF32Coarse && value < -kMinusInfinity;
  }
  for (int row = first + warp; row < end; row += Tile::kWarps) {
    float sum = 0.f;
    for (int c = lane; c < args.out.columns; c += ptx::kWarpLanes) {
      const float g = __ldg(grad + row * args.grad_out.stride_row + c * args.grad_out.stride_column);
      sum = fmaf(__ldg(out + row * args.out.stride_row + c), g, sum);
    }
    for (int bit = 1; bit < ptx::kWarpLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    if (lane == 0) {
      const int64_t at = rows_before + row;
      const bool empty = lse[at] == kMinusInfinity;
      args.stats.lse[at] = empty ? -kMinusInfinity : lse[at];
      args.stats.delta[at] = empty ? 0.f : grad_lse ? sum - grad_lse[at] : sum;
      args.stats.shift[at] = 0.f;
    }
  }
  return __any_sync(0xffffffffu, coarse);
}

template <int kDim, bool kExact, bool kTerms>
__global__ void __launch_bounds__((F32FwdTile<kDim, kTerms>::kThreads))
    flashsdpa_bwd_pre_f32_sm90(const __grid_constant__ F32Args args) {
  using Tile = F32FwdTile<kDim, kTerms>;
  constexpr int kM = Tile::kM, kN = Tile::kBlockN;
  const int block = int(blockIdx.x / uint32_t(args.planes)), plane = int(blockIdx.x % uint32_t(args.planes));
  const int batch = plane / args.heads_q, head = plane % args.heads_q, first = block * Tile::kBlockM;
  if (!f32_pre_rows<Tile>(args, batch, head, first)) return;

  // The sum again, from the same scores as those of the other kernels, relative to what lse is. Such rows are hardly ever met.
  extern __shared__ uint8_t memory[];
  const uint32_t q_tile = f32_align(ptx::shared_address(memory)), k_tile = q_tile + Tile::kQBytes;
  const int warp = int(threadIdx.x) / ptx::kWarpLanes, lane = int(threadIdx.x) % ptx::kWarpLanes;
  const int row = first + warp * Tile::kWarpRows;
  const F32Scores<false, kM, kN> scores(batch, head, first, warp, lane);
  const typename Tile::Terms terms(args, scores, k_tile + Tile::kKBytes + warp * Tile::Terms::kWarpBytes);
  const float* lse = args.given_lse;
  const auto query = [&](int r) { return row + 8 * r + lane / 4; };
  const auto at = [&](int r) { return int64_t{plane} * args.seq_q + min(query(r), args.seq_q - 1); };
  F32Tiles<false, Tile::kBlockM, kN> tiles(args, batch, head, first);
  f32_load<Tile::kBlockM, kDim, Tile::kThreads>(q_tile, args.q, f32_plane(args.q, batch, head), first);
  float sum[2 * kM] = {};
#pragma unroll 1
  for (; tiles.more(); tiles.advance()) {
    f32_load<kN, kDim, Tile::kThreads>(k_tile, args.k, f32_plane(args.k, batch, head / args.group), tiles.at);
    ptx::copy_async_wait();
    __syncthreads();
    float s[kM][kN / 8][4] = {};
    f32_scores<kExact, true, kDim, kM, kN>(s, q_tile + warp * Tile::kWarpRows * kDim * 4, k_tile, args.k.columns, lane);
    terms.apply(args, scores, s, tiles.at, tiles.classes);
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const float value = lse[at(r)];
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[r] += f32_weight(s[r / 2][n][r % 2 * 2 + e], value, 0.f);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    if constexpr (kTerms) {
      if (args.terms.sinks.data) sum[r] += f32_weight(value_of_head(args.terms.sinks, batch, head), lse[at(r)], 0.f);
    }
    const bool coarse = fabsf(lse[at(r)]) > kF32Coarse && sum[r] > 0.f;
    if (coarse && lane % 4 == 0 && query(r) < args.seq_q) args.stats.shift[at(r)] = log2f(sum[r]);
  }
}

}  // namespace flashsdpa
