// The gradient of an additive mask in float32: P (Z dP - delta) of f32_terms.cuh, summed over the axes in which the
// mask has size 1.
//
// A block has one tile of the gradient, or a part of its visits (bwd_mask_gradient.h), and sums in registers what they
// say of each place of the tile; at the end it adds up rows, or columns, or both, where the mask has one. So every sum
// has one owner and one order. Q and K have one place each in shared memory, dO and V too: those two arrive under the
// product of the others.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "bwd_mask_visits.cuh"
#include "f32_backward.cuh"
#include "f32_mask_gradient.h"
#include "shared_memory.h"

namespace flashsdpa {

template <int kDimClass>
struct F32MaskTile {
  static constexpr int kDim = kDimClass, kM = 1;
  static constexpr int kWarps = kDim == 256 ? 4 : 8, kThreads = kWarps * ptx::kWarpLanes;
  static constexpr int kBlockM = kWarps * 16, kBlockN = kDim == 256 ? 32 : 64;
  using Scores = F32Scores<false, kM, kBlockN>;
  using Terms = F32Terms<false, kM, kBlockN, true>;
  static constexpr uint32_t kQueryBytes = kBlockM * kDim * 4, kKeyBytes = kBlockN * kDim * 4;
  static constexpr uint32_t kSharedBytes = 2 * (kQueryBytes + kKeyBytes) + kWarps * Terms::kWarpBytes + kF32Align;
};

// The classes that the plan gives the granules of a tile, two bits for each of its rows of granules.
template <typename Tile>
__device__ inline int f32_mask_classes(const FwdMask& mask, const BwdMaskPlace& tile) {
  const int32_t* plan = f32_plan(mask, tile.batch, tile.head);
  const int row = tile.m * Tile::kBlockM / int(kGranule), col = tile.n * Tile::kBlockN / int(kGranule);
  int classes = 0;
#pragma unroll
  for (int i = 0; i < Tile::kBlockM / int(kGranule); ++i) {
    const int32_t* list = plan + plan_row_offset(min(row + i, mask.rows - 1), mask.cols);
    const int count = __ldg(list), before = entries_before(list + 1, count, col);
    const int entry = before < count ? __ldg(list + 1 + before) : -1;
    if (entry >> 2 == col) classes |= (entry & 3) << 2 * i;
  }
  return classes;
}

template <int kDim, bool kExact>
class F32MaskUnit {
  using Tile = F32MaskTile<kDim>;
  using Terms = typename Tile::Terms;
  static constexpr int kM = Tile::kM, kN = Tile::kBlockN;

 public:
  __device__ F32MaskUnit(const F32MaskArgs& args, uint32_t shared)
      : args_(args),
        shared_(shared),
        warp_(int(threadIdx.x) / ptx::kWarpLanes),
        lane_(int(threadIdx.x) % ptx::kWarpLanes) {}

  __device__ void sum_visits(int unit) {
    BwdMaskWalk<Tile> walk(args_, unit);
    const int classes = f32_mask_classes<Tile>(args_.bwd.mask, bwd_mask_first(args_, unit % args_.tiles));
    if (walk.left > 0) load(q_tile(), args_.bwd.q, k_tile(), args_.bwd.k, walk.at);
    while (walk.left > 0) {
      const BwdMaskPlace at = walk.at;
      const int row = at.m * Tile::kBlockM, column = at.n * kN;
      const typename Tile::Scores scores(at.batch, at.head, row, warp_, lane_);
      const Terms terms(args_.bwd, scores,
                        grad_tile() + Tile::kQueryBytes + Tile::kKeyBytes + warp_ * Terms::kWarpBytes);
      ptx::copy_async_wait();
      __syncthreads();  // Q and K are there, dO and V read
      load(grad_tile(), args_.bwd.grad_out, v_tile(), args_.bwd.v, at);
      float p[kM][kN / 8][4] = {};
      f32_scores<kExact, true, kDim, kM, kN>(p, q_tile() + warp_rows(), k_tile(), args_.bwd.k.columns, lane_);
      terms.apply(args_.bwd, scores, p, column, classes);
      float delta[2];
      weigh(p, at, scores.row, delta);
      const uint32_t kept = terms.draw(args_.bwd, scores, column);
      ptx::copy_async_wait();
      __syncthreads();  // dO and V are there, Q and K read
      walk.advance(args_);
      if (walk.left > 0) load(q_tile(), args_.bwd.q, k_tile(), args_.bwd.k, walk.at);
      float d[kM][kN / 8][4] = {};
      f32_scores<kExact, true, kDim, kM, kN>(d, grad_tile() + warp_rows(), v_tile(), args_.bwd.v.columns, lane_);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float slope = Terms::keeps(kept, n, i) ? d[0][n][i] * args_.bwd.terms.rescale : 0.f;
          // A weight of 0 says nothing, whatever NaN V holds there.
          if (p[0][n][i] != 0.f) sum_[n][i] = fmaf(p[0][n][i], slope - delta[i / 2], sum_[n][i]);
        }
      }
    }
    __syncthreads();  // all is read
  }

  __device__ void store(int unit) {
    const FwdMask& mask = args_.bwd.mask;
    const BwdMaskPlace tile = bwd_mask_first(args_, unit % args_.tiles);
    const int part = unit / args_.tiles, first_row = tile.m * Tile::kBlockM, first_key = tile.n * kN;
    float* target = args_.parts > 1 ? args_.sums + part * args_.elements : args_.grad;
    target += (int64_t(tile.batch) * args_.grad_heads + tile.head) * mask.queries * mask.keys;
    const auto put = [&](int query, int key, float x) {
      if (query < mask.queries && key < mask.keys) target[int64_t(query) * mask.keys + key] = x;
    };
    const bool one_query = mask.queries == 1;
    const int row = warp_ * 16 + lane_ / 4;
    if (mask.keys == 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = 0.f;
#pragma unroll
        for (int n = 0; n < kN / 8; ++n) x += sum_[n][2 * r] + sum_[n][2 * r + 1];
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        x += __shfl_xor_sync(0xffffffffu, x, 2);
        if (lane_ % 4 > 0) continue;
        if (one_query) {
          ptx::store_shared_4(shared_ + 4 * (row + 8 * r), __float_as_uint(x));
        } else {
          put(first_row + row + 8 * r, 0, x);
        }
      }
      if (one_query) put_sums(Tile::kBlockM, 1, [&](int, float x) { put(0, 0, x); });
    } else if (one_query) {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float x = sum_[n][e] + sum_[n][2 + e];
          for (int bit = 4; bit < ptx::kWarpLanes; bit *= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
          if (lane_ < 4) ptx::store_shared_4(shared_ + 4 * (warp_ * kN + 8 * n + 2 * lane_ + e), __float_as_uint(x));
        }
      }
      put_sums(Tile::kWarps, kN, [&](int key, float x) { put(0, first_key + key, x); });
    } else {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          put(first_row + row + 8 * (i / 2), first_key + 8 * n + 2 * (lane_ % 4) + i % 2, sum_[n][i]);
      }
    }
  }

 private:
  __device__ uint32_t q_tile() const { return shared_; }
  __device__ uint32_t k_tile() const { return shared_ + Tile::kQueryBytes; }
  __device__ uint32_t grad_tile() const { return k_tile() + Tile::kKeyBytes; }
  __device__ uint32_t v_tile() const { return grad_tile() + Tile::kQueryBytes; }
  __device__ uint32_t warp_rows() const { return uint32_t(warp_ * 16 * kDim * 4); }

  __device__ void load(uint32_t queries, const F32Tensor& of_queries, uint32_t keys, const F32Tensor& of_keys,
                       const BwdMaskPlace& at) const {
    constexpr int kRows = Tile::kBlockM, kThreads = Tile::kThreads;
    f32_load<kRows, kDim, kThreads>(queries, of_queries, f32_plane(of_queries, at.batch, at.head), at.m * kRows);
    f32_load<kN, kDim, kThreads>(keys, of_keys, f32_plane(of_keys, at.batch, at.head / args_.bwd.group), at.n * kN);
  }

  // Scores to weights. Rows past the last one have none.
  __device__ void weigh(float (&p)[kM][kN / 8][4], const BwdMaskPlace& at, int row, float (&delta)[2]) const {
    const F32Stats& stats = args_.bwd.stats;
    const int64_t rows_before = (int64_t{at.batch} * args_.bwd.heads_q + at.head) * args_.bwd.seq_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 8 * r + lane_ / 4;
      const int64_t place = rows_before + min(query, args_.bwd.seq_q - 1);
      const float lse = query < args_.bwd.seq_q ? __ldg(stats.lse + place) : -kMinusInfinity;
      const float shift = __ldg(stats.shift + place);
      delta[r] = __ldg(stats.delta + place);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) p[0][n][e] = f32_weight(p[0][n][e], lse, shift);
      }
    }
  }

  // act(column, its sum over `rows`) of the floats at shared_ in rows of `columns`, in a fixed order.
  template <typename Act>
  __device__ void put_sums(int rows, int columns, const Act& act) const {
    __syncthreads();
    const int column = int(threadIdx.x);
    if (column >= columns) return;
    float x = 0.f;
    for (int r = 0; r < rows; ++r) x += ptx::load_shared_float(shared_ + 4 * (r * columns + column));
    act(column, x);
  }

  const F32MaskArgs& args_;
  const uint32_t shared_;
  const int warp_, lane_;
  float sum_[kN / 8][4] = {};
};

template <int kDim, bool kExact>
__global__ void __launch_bounds__(F32MaskTile<kDim>::kThreads, 1)
    flashsdpa_bwd_mask_f32_sm90(const __grid_constant__ F32MaskArgs args) {
  extern __shared__ uint8_t memory[];
  F32MaskUnit<kDim, kExact> sums(args, f32_align(ptx::shared_address(memory)));
  sums.sum_visits(int(blockIdx.x));
  sums.store(int(blockIdx.x));
}

template <int kDim, bool kExact>
const char* f32_run_mask_instance(const F32MaskArgs& args, uint32_t blocks, int device, cudaStream_t stream) {
  using Tile = F32MaskTile<kDim>;
  const auto kernel = flashsdpa_bwd_mask_f32_sm90<kDim, kExact>;
  static SharedMemoryGrant grant;
  if (const char* error = grant.ask(kernel, Tile::kSharedBytes, device)) return error;
  kernel<<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

template <int kDim>
constexpr F32MaskInstance f32_make_mask_instance() {
  using Tile = F32MaskTile<kDim>;
  return {Tile::kBlockM, Tile::kBlockN, f32_run_mask_instance<kDim, true>, f32_run_mask_instance<kDim, false>};
}

}  // namespace flashsdpa
