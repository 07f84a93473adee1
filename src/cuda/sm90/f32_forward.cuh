// Forward kernel in float32: a block of queries, each warp some of them, goes through the keys with an online softmax.
//
// K and V have one place each in shared memory: V arrives under the product with K, the next K under that with V. Two blocks
// share a processor, where their registers allow it.
#pragma once

#include <type_traits>

#include "../../ptx/mbarrier.cuh"
#include "f32_products.cuh"
#include "f32_terms.cuh"
#include "f32_visits.cuh"

namespace flashsdpa {

template <int kDimClass, bool kWithTerms = false>
struct F32FwdTile {
  static constexpr bool kTerms = kWithTerms;
  static constexpr int kDim = kDimClass;
  static constexpr int kM = 1;  // blocks of 16 queries of a warp
  static constexpr int kWarps = kDim == 256 ? 8 : 4, kThreads = kWarps * ptx::kWarpLanes;
  static constexpr int kBlocks = kDim == 256 ? 1 : 2;  // that share a processor
  static constexpr int kWarpRows = 16 * kM, kBlockM = kWarps * kWarpRows, kBlockN = kDim == 256 ? 32 : 64;
  static constexpr uint32_t kQBytes = kBlockM * kDim * 4, kKBytes = kBlockN * kDim * 4;
  using Terms = F32Terms<false, kM, kBlockN, kTerms>;
  static constexpr uint32_t kSharedBytes = kQBytes + 2 * kKBytes + kWarps * Terms::kWarpBytes + kF32Align;
  static_assert(int(kGranule) % kWarpRows == 0);
};

// What one warp knows of its rows; a lane has two of each block of 16.
template <int kM>
struct F32Softmax {
  float top[kM][2], sum[kM][2];  // the largest score so far; this lane's share of the sum of exp(score - top)

  __device__ F32Softmax() {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) top[r / 2][r % 2] = kMinusInfinity, sum[r / 2][r % 2] = 0.f;
  }

  // What is taken off a row's scores: any number, where it has none yet.
  __device__ static float reference(float top) { return top == kMinusInfinity ? 0.f : top; }

  // Scores become exp(score - top); `factor` is for what was summed before. Whether any lane's factor is not 1.
  template <int kN>
  __device__ bool take(float (&s)[kM][kN][4], float (&factor)[kM][2]) {
    bool raised = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most = top[m][r];
#pragma unroll
        for (int n = 0; n < kN; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        raised |= most != top[m][r];
        const float below = reference(most);
        factor[m][r] = exponential(top[m][r], below);
        top[m][r] = most;
        float added = 0.f;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            s[m][n][e] = exponential(s[m][n][e], below);
            added += s[m][n][e];
          }
        }
        sum[m][r] = fmaf(sum[m][r], factor[m][r], added);
      }
    }
    return __any_sync(0xffffffffu, raised);
  }

  // A logit more in a row whose sum is reduced. Returns the factor for what was summed before.
  __device__ float add(int m, int r, float logit) {
    const float most = fmaxf(top[m][r], logit), below = reference(most), factor = exponential(top[m][r], below);
    sum[m][r] = fmaf(sum[m][r], factor, exponential(logit, below));
    top[m][r] = most;
    return factor;
  }

  __device__ static float exponential(float score, float below) {
    constexpr float kLog2e = 1.4426950408889634f;
    return ptx::exp2_fast(ptx::subtract(score, below) * kLog2e);
  }
};

template <int kDim, bool kExact, bool kTerms>
__global__ void __launch_bounds__((F32FwdTile<kDim, kTerms>::kThreads), (F32FwdTile<kDim, kTerms>::kBlocks))
    flashsdpa_fwd_f32_sm90(const __grid_constant__ F32Args args) {
  using Tile = F32FwdTile<kDim, kTerms>;
  constexpr int kM = Tile::kM, kN = Tile::kBlockN;
  extern __shared__ uint8_t memory[];
  const uint32_t q_tile = f32_align(ptx::shared_address(memory));
  const uint32_t k_tile = q_tile + Tile::kQBytes, v_tile = k_tile + Tile::kKBytes;

  const int block = args.blocks - 1 - int(blockIdx.x / uint32_t(args.planes));  // with a band, later queries see more keys
  const int plane = int(blockIdx.x % uint32_t(args.planes)), batch = plane / args.heads_q, head = plane % args.heads_q;
  const int first = block * Tile::kBlockM;
  const float* q = f32_plane(args.q, batch, head);
  const float* k = f32_plane(args.k, batch, head / args.group);
  const float* v = f32_plane(args.v, batch, head / args.group);

  F32Tiles<false, Tile::kBlockM, kN> tiles(args, batch, head, first);
  f32_load<Tile::kBlockM, kDim, Tile::kThreads>(q_tile, args.q, q, first);
  if (tiles.more()) f32_load<kN, kDim, Tile::kThreads>(k_tile, args.k, k, tiles.at);
  ptx::copy_async_commit();

  const int warp = int(threadIdx.x) / ptx::kWarpLanes, lane = int(threadIdx.x) % ptx::kWarpLanes;
  const int row = first + warp * Tile::kWarpRows;
  const F32Scores<false, kM, kN> scores(batch, head, first, warp, lane);
  const typename Tile::Terms terms(args, scores, v_tile + Tile::kKBytes + warp * Tile::Terms::kWarpBytes);
  F32Softmax<kM> softmax;
  float o[kM][kDim / 8][4] = {};
  while (tiles.more()) {
    const int column = tiles.at, classes = tiles.classes;
    ptx::copy_async_wait_for_all_but<0>();
    __syncthreads();  // K is there, and V read
    f32_load<kN, kDim, Tile::kThreads>(v_tile, args.v, v, column);
    ptx::copy_async_commit();
    float s[kM][kN / 8][4] = {};
    f32_scores<kExact, true, kDim, kM, kN>(s, q_tile + warp * Tile::kWarpRows * kDim * 4, k_tile, args.k.columns, lane);
    terms.apply(args, scores, s, column, classes);
    float factor[kM][2];
    if (softmax.take(s, factor)) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[m][n][i] *= factor[m][i / 2];
        }
      }
    }
    terms.drop(args, scores, s, column);
    ptx::copy_async_wait_for_all_but<0>();
    __syncthreads();  // V is there, and K read
    tiles.advance();
    if (tiles.more()) f32_load<kN, kDim, Tile::kThreads>(k_tile, args.k, k, tiles.at);
    ptx::copy_async_commit();
    f32_add_product<kExact, kDim, kM, kN>(o, s, v_tile, args.v.columns, lane);
  }
  ptx::copy_async_wait_for_all_but<0>();

  float left[kM][2];  // of the output, by sinks; times what dropout's rest is worth
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = softmax.sum[m][r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      softmax.sum[m][r] = sum;
      left[m][r] = 1.f;
      if constexpr (kTerms) {
        left[m][r] = args.terms.rescale;
        if (args.terms.sinks.data) left[m][r] *= softmax.add(m, r, value_of_head(args.terms.sinks, batch, head));
        sum = softmax.sum[m][r];
      }
      const int query = row + 16 * m + 8 * r + lane / 4;
      if (lane % 4 == 0 && query < args.seq_q) {
        // Of a row without keys -inf, of one with a NaN NaN.
        args.lse[int64_t{plane} * args.seq_q + query] = sum == 0.f ? kMinusInfinity : softmax.top[m][r] + logf(sum);
      }
    }
  }
  f32_store<kDim>(args.out, f32_plane(args.out, batch, head), o, row, lane,
                  [&](int m, int r) { return softmax.sum[m][r] == 0.f ? 0.f : 1.f / softmax.sum[m][r] * left[m][r]; });
}

}  // namespace flashsdpa
