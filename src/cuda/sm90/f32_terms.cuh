// Soft cap, slopes, sinks and dropout (score_terms.h) in the float32 kernels: what becomes of one warp's block of
// scores, of its weights, and of the gradient of both. Without terms: products are scaled, and that is all.
//
// With c a scaled and capped score, Z dropout's factor of a weight (0 or `rescale`) and P = exp(c + ... - lse):
//   O takes Z P, dV too, and dS = P (1 - (c / softcap)^2) (Z dP - delta)
// `rescale` is left to the end of sums: Z is then 0 or 1 here, but for dS.
#pragma once

#include "dropout_bits.cuh"
#include "f32_visits.cuh"
#include "score_terms.cuh"

namespace flashsdpa {

// tanh to about 3 units in the last place, as good as the scores are: score_terms.cuh's 5 are for half precision.
// Without a branch, which tanhf has for each number: near 0 a polynomial (a minimax fit of the relative error), else
// 1 - 2 / (exp(2 x) + 1).
__device__ inline float f32_tanh(float x) {
  constexpr float kEnd = 0.62f, kTwoLog2e = 2.8853900817779268f;
  const float z = x * x;
  float p = fmaf(-0.0057430095f, z, 0.020671485f);
  p = fmaf(p, z, -0.053749118f);
  p = fmaf(p, z, 0.13331549f);
  p = fmaf(p, z, -0.33333287f);
  const float far = fmaf(-2.f, ptx::reciprocal_fast(ptx::exp2_fast(fabsf(x) * kTwoLog2e) + 1.f), 1.f);
  return fabsf(x) < kEnd ? fmaf(x * z, p, x) : copysignf(far, x);
}

template <bool kRowsAreKeys, int kM, int kN, bool kTerms>
struct F32Terms {
  using Scores = F32Scores<kRowsAreKeys, kM, kN>;
  static constexpr uint32_t kWarpBytes = 0;  // of shared memory
  __device__ F32Terms(const F32Args&, const Scores&, uint32_t) {}
  __device__ void apply(const F32Args& args, const Scores& scores, float (&s)[kM][kN / 8][4], int column,
                        int classes) const {
    scores.apply(args, s, column, classes);
  }
  __device__ void drop(const F32Args&, const Scores&, float (&)[kM][kN / 8][4], int) const {}
};

template <bool kRowsAreKeys, int kM, int kN>
struct F32Terms<kRowsAreKeys, kM, kN, true> {
  static_assert(kM == 1 && kN <= 64);
  using Scores = F32Scores<kRowsAreKeys, kM, kN>;
  static constexpr uint32_t kWarpBytes = kDropoutStreamBytes;

  float slope;
  DropoutStream stream;

  // memory: this warp's kWarpBytes, no longer read.
  __device__ F32Terms(const F32Args& args, const Scores& scores, uint32_t memory)
      : slope(args.terms.slopes.data ? value_of_head(args.terms.slopes, scores.batch, scores.head) : 0.f) {
    if (args.terms.seed) stream = DropoutStream(args.terms, scores.batch, scores.head, scores.lane, memory);
  }

  // Products to scores, mask and band and all. passed(n, i, factor): what the cap leaves of a gradient; of a removed
  // score, which may be NaN, a number all the same.
  template <typename Passed>
  __device__ void apply(const F32Args& args, const Scores& scores, float (&s)[kM][kN / 8][4], int column, int classes,
                        const Passed& passed) const {
    const ScoreTerms& terms = args.terms;
    const bool caps = terms.softcap > 0.f;
    const int row = scores.row + scores.lane / 4, lane_column = column + scores.lane % 4 * 2;
    const int place = kRowsAreKeys ? row - terms.diagonal - lane_column : row + terms.diagonal - lane_column;
    const float places[2] = {float(place), float(place + 8)};
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = s[0][n][i];
        if (caps) {
          const float part = f32_tanh(ptx::multiply(score, terms.to_cap));
          score = ptx::multiply(terms.softcap, part);
          passed(n, i, fmaxf(fmaf(-part, part, 1.f), 0.f));
        } else {
          score = ptx::multiply(score, args.scale);
          passed(n, i, 1.f);
        }
      }
    }
    if (slope != 0.f) {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[0][n][i] = fmaf(-slope, fabsf(places[i / 2] - float(8 * n + i % 2)), s[0][n][i]);
      }
    }
    scores.remove(args, s, column, classes);
  }
  __device__ void apply(const F32Args& args, const Scores& scores, float (&s)[kM][kN / 8][4], int column,
                        int classes) const {
    apply(args, scores, s, column, classes, [](int, int, float) {});
  }

  // Which weights dropout keeps, for keeps().
  __device__ uint32_t draw(const F32Args& args, const Scores& scores, int column) const {
    uint32_t kept[1] = {~0u};
    if (!args.terms.seed) return kept[0];
    const int row = scores.row + scores.lane / 4, lane_column = column + scores.lane % 4 * 2;
    stream.template draw<kRowsAreKeys, kN / 16>(row, lane_column, kept);
    return kept[0];
  }
  // The weight of accumulator i of block n.
  __device__ static bool keeps(uint32_t kept, int n, int i) { return is_kept<kRowsAreKeys>(&kept, 4 * n + i); }

  // Weights that dropout takes become 0.
  __device__ void drop(const F32Args& args, const Scores& scores, float (&p)[kM][kN / 8][4], int column) const {
    if (!args.terms.seed) return;
    const uint32_t kept = draw(args, scores, column);
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[0][n][i] = keeps(kept, n, i) ? p[0][n][i] : 0.f;
    }
  }
};

}  // namespace flashsdpa
