// Backward kernels in float32. One scheme for both: a block owns rows of scores and goes through the other axis, so that every
// sum is one block's alone, always in the same order.
//
//             rows      own tiles   tiles in turn   sums
//   kQueries  queries   Q, dO       K, V            dQ += dS K
//   kKeys     keys      K, V        Q, dO           dK += dS Q, dV += P dO
//
// Scores are own[0] * turn[0]^T, dP is own[1] * turn[1]^T. Where the sums of kKeys do not fit the registers, dK and dV are
// two kernels. With terms (f32_terms.cuh) dS has a factor more, and dV takes weights without those that dropout took.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "f32_products.cuh"
#include "f32_terms.cuh"
#include "f32_visits.cuh"

namespace flashsdpa {

enum class F32Sums { kQueries, kKeys, kKeysAlone, kValuesAlone };

template <int kDimClass, F32Sums kSums, bool kWithTerms = false>
struct F32BwdTile {
  static constexpr bool kTerms = kWithTerms;
  static constexpr int kDim = kDimClass;
  static constexpr bool kRowsAreKeys = kSums != F32Sums::kQueries;
  static constexpr bool kFirst = kSums != F32Sums::kValuesAlone;  // the sum of dS
  static constexpr bool kSecond = kSums == F32Sums::kKeys || kSums == F32Sums::kValuesAlone;  // that of P
  static constexpr int kM = 1, kWarps = kDim == 256 ? 4 : 8, kThreads = kWarps * ptx::kWarpLanes;
  static constexpr int kWarpRows = 16 * kM, kRows = kWarps * kWarpRows, kTurn = kDim == 64 && !kTerms ? 64 : 32;
  static constexpr int kStages = kDim == 256 ? 1 : 2;
  static constexpr uint32_t kOwnBytes = kRows * kDim * 4, kTurnBytes = kTurn * kDim * 4, kStatBytes = kTurn * 4;
  static constexpr uint32_t kStageBytes = 2 * kTurnBytes + 3 * kStatBytes;
  using Terms = F32Terms<kRowsAreKeys, kM, kTurn, kTerms>;
  static constexpr uint32_t kSharedBytes = 2 * kOwnBytes + kStages * kStageBytes + kWarps * Terms::kWarpBytes + kF32Align;
  static_assert(int(kGranule) % kWarpRows == 0);
};

// exp(score - lse), of scores that are scaled; also where lse has no digits left for the logarithm of the sum.
__device__ inline float f32_weight(float score, float lse, float shift) {
  constexpr float kLog2e = 1.4426950408889634f;
  return ptx::exp2_fast(fmaf(fminf(ptx::subtract(score, lse), 0.f), kLog2e, -shift));
}

template <typename Tile, bool kExact>
class F32Backward {
  static constexpr bool kRowsAreKeys = Tile::kRowsAreKeys;
  static constexpr int kDim = Tile::kDim, kM = Tile::kM, kN = Tile::kTurn;
  using Terms = typename Tile::Terms;

 public:
  __device__ F32Backward(const F32Args& args, uint32_t shared)
      : args_(args), shared_(shared), warp_(int(threadIdx.x) / ptx::kWarpLanes), lane_(int(threadIdx.x) % ptx::kWarpLanes) {}

  // The block's rows against all of one plane of queries and keys. load_own: else they are there.
  __device__ void visit(int batch, int head, int first, bool load_own) {
    const int kv = head / args_.group;
    const int64_t rows_before = (int64_t{batch} * args_.heads_q + head) * args_.seq_q;
    const F32Scores<kRowsAreKeys, kM, kN> scores(batch, head, first, warp_, lane_);
    const Terms terms(args_, scores, turn(Tile::kStages) + warp_ * Terms::kWarpBytes);
    F32Tiles<kRowsAreKeys, Tile::kRows, kN> tiles(args_, batch, head, first);

    const auto load_turn = [&](int stage, int at) {
      const uint32_t tile = turn(stage);
      const int its = kRowsAreKeys ? head : kv;
      load<kN>(tile, kRowsAreKeys ? args_.q : args_.k, batch, its, at);
      load<kN>(tile + Tile::kTurnBytes, kRowsAreKeys ? args_.grad_out : args_.v, batch, its, at);
      if (kRowsAreKeys && int(threadIdx.x) < kN) load_stats(tile + 2 * Tile::kTurnBytes, rows_before, at);
    };
    if (load_own) {
      const int its = kRowsAreKeys ? kv : head;
      load<Tile::kRows>(shared_, kRowsAreKeys ? args_.k : args_.q, batch, its, first);
      load<Tile::kRows>(shared_ + Tile::kOwnBytes, kRowsAreKeys ? args_.v : args_.grad_out, batch, its, first);
    }
    if constexpr (!kRowsAreKeys) read_stats(rows_before, scores.row);
    int stage = 0;
    if (tiles.more()) load_turn(stage, tiles.at);
    while (tiles.more()) {
      ptx::copy_async_wait();
      __syncthreads();
      const int at = tiles.at, classes = tiles.classes, here = stage;
      tiles.advance();
      if (Tile::kStages > 1 && tiles.more()) load_turn(stage ^= 1, tiles.at);
      take(scores, terms, turn(here), at, classes);
      if (Tile::kStages == 1) {
        __syncthreads();
        if (tiles.more()) load_turn(stage, tiles.at);
      }
    }
    ptx::copy_async_wait();
    __syncthreads();  // all is read
  }

  __device__ void store(int batch, int head, int first) const {
    const int row = first + warp_ * Tile::kWarpRows;
    if constexpr (Tile::kFirst) {
      const F32Tensor& target = kRowsAreKeys ? args_.dk : args_.dq;
      f32_store<kDim>(target, f32_plane(target, batch, head), first_, row, lane_, [&](int, int) { return args_.scale; });
    }
    if constexpr (Tile::kSecond) {
      f32_store<kDim>(args_.dv, f32_plane(args_.dv, batch, head), second_, row, lane_,
                     [&](int, int) { return Tile::kTerms ? args_.terms.rescale : 1.f; });
    }
  }

 private:
  template <int kRows>
  __device__ void load(uint32_t tile, const F32Tensor& t, int batch, int head, int first) const {
    f32_load<kRows, kDim, Tile::kThreads>(tile, t, f32_plane(t, batch, head), first);
  }
  __device__ uint32_t turn(int stage) const { return shared_ + 2 * Tile::kOwnBytes + stage * Tile::kStageBytes; }

  // One query a thread; those past the last one have Q and dO of 0, so that any stats will do.
  __device__ void load_stats(uint32_t tile, int64_t rows_before, int at) const {
    const int i = int(threadIdx.x), query = at + i, bytes = query < args_.seq_q ? 4 : 0;
    const float* const stats[3] = {args_.stats.lse, args_.stats.delta, args_.stats.shift};
#pragma unroll
    for (int s = 0; s < 3; ++s) {
      ptx::copy_async<4>(tile + s * Tile::kStatBytes + 4 * i, stats[s] + (bytes ? rows_before + query : 0), bytes);
    }
  }
  __device__ void read_stats(int64_t rows_before, int row) {
#pragma unroll
    for (int r = 0; r < 2 * kM; ++r) {
      const int64_t at = rows_before + min(row + 8 * r + lane_ / 4, args_.seq_q - 1);
      lse_[r] = __ldg(args_.stats.lse + at);
      delta_[r] = __ldg(args_.stats.delta + at);
      shift_[r] = __ldg(args_.stats.shift + at);
    }
  }

  __device__ void take(const F32Scores<kRowsAreKeys, kM, kN>& scores, const Terms& terms, uint32_t tile, int at, int classes) {
    const uint32_t own = shared_ + warp_ * Tile::kWarpRows * kDim * 4, second = tile + Tile::kTurnBytes;
    const uint32_t stats = tile + 2 * Tile::kTurnBytes + lane_ % 4 * 8;
    float p[kM][kN / 8][4] = {};
    f32_scores<kExact, !kRowsAreKeys, kDim, kM, kN>(p, own, tile, args_.k.columns, lane_);
    float w[kM][kN / 8][4];  // with terms: what the cap lets pass, then dV's weights, when p is dS's
    if constexpr (Tile::kTerms) {
      terms.apply(args_, scores, p, at, classes, [&](int n, int i, float factor) { w[0][n][i] = factor; });
    } else {
      scores.apply(args_, p, at, classes);
    }
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      float lse[2], shift[2];
      if constexpr (kRowsAreKeys) {
        ptx::load_shared_floats(stats + 32 * n, lse[0], lse[1]);
        ptx::load_shared_floats(stats + 2 * Tile::kStatBytes + 32 * n, shift[0], shift[1]);
      }
#pragma unroll
      for (int i = 0; i < 4 * kM; ++i) {
        const int row = i / 2, query = i % 2;
        float& weight = p[i / 4][n][i % 4];
        weight = kRowsAreKeys ? f32_weight(weight, lse[query], shift[query]) : f32_weight(weight, lse_[row], shift_[row]);
      }
    }
    uint32_t kept = ~0u;
    if constexpr (Tile::kTerms) {
      kept = terms.draw(args_, scores, at);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = p[0][n][i];
          p[0][n][i] = weight * w[0][n][i];
          w[0][n][i] = Terms::keeps(kept, n, i) ? weight : 0.f;
        }
      }
    }
    if constexpr (Tile::kSecond) {
      f32_add_product<kExact, kDim, kM, kN>(second_, Tile::kTerms ? w : p, second, args_.v.columns, lane_);
    }
    if constexpr (Tile::kFirst) {
      float d[kM][kN / 8][4] = {};
      f32_scores<kExact, !kRowsAreKeys, kDim, kM, kN>(d, own + Tile::kOwnBytes, second, args_.v.columns, lane_);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        float delta[2];
        if constexpr (kRowsAreKeys) ptx::load_shared_floats(stats + Tile::kStatBytes + 32 * n, delta[0], delta[1]);
#pragma unroll
        for (int i = 0; i < 4 * kM; ++i) {
          float& slope = d[i / 4][n][i % 4];
          if constexpr (Tile::kTerms) slope = Terms::keeps(kept, n, i) ? slope * args_.terms.rescale : 0.f;
          p[i / 4][n][i % 4] *= slope - (kRowsAreKeys ? delta[i % 2] : delta_[i / 2]);
        }
      }
      f32_add_product<kExact, kDim, kM, kN>(first_, p, tile, args_.k.columns, lane_);
    }
  }

  const F32Args& args_;
  const uint32_t shared_;
  const int warp_, lane_;
  float first_[kM][kDim / 8][4] = {};   // kFirst: dQ or dK
  float second_[kM][kDim / 8][4] = {};  // kSecond: dV
  float lse_[2 * kM], delta_[2 * kM], shift_[2 * kM];  // of rows that are queries
};

template <int kDim, F32Sums kSums, bool kExact, bool kTerms>
__global__ void __launch_bounds__((F32BwdTile<kDim, kSums, kTerms>::kThreads), 1)
    flashsdpa_bwd_f32_sm90(const __grid_constant__ F32Args args) {
  using Tile = F32BwdTile<kDim, kSums, kTerms>;
  extern __shared__ uint8_t memory[];
  F32Backward<Tile, kExact> backward(args, f32_align(ptx::shared_address(memory)));
  const int heads = Tile::kRowsAreKeys ? args.heads_kv : args.heads_q;
  const int place = int(blockIdx.x / uint32_t(args.planes)), plane = int(blockIdx.x % uint32_t(args.planes));
  const int batch = plane / heads, head = plane % heads;
  // With a band, later queries see more keys, and earlier keys are seen by more queries: those first.
  const int first = (Tile::kRowsAreKeys ? place : args.blocks - 1 - place) * Tile::kRows;
  const int members = Tile::kRowsAreKeys ? args.group : 1;
#pragma unroll 1
  for (int member = 0; member < members; ++member) backward.visit(batch, head * members + member, first, member == 0);
  backward.store(batch, head, first);
}

}  // namespace flashsdpa
