// Online softmax over one block of scores in the accumulator layout of wgmma, two rows a lane.
//
// Element i of a lane is row (i / 2) % 2 of its two, column 8 * (i / 4) + 2 * (lane % 4) + i % 2; four lanes share a
// row.
#pragma once

#include <cstdint>

#include "../../ptx/arithmetic.cuh"

namespace flashsdpa {

constexpr float kMinusInfinity = -__builtin_huge_valf();

__device__ constexpr int score_row(int i) { return (i / 2) % 2; }
__device__ constexpr int score_column(int i) { return 8 * (i / 4) + i % 2; }  // but for the lane's part

// Scores past column `limit[row]` are removed; limits are relative to the lane's first column.
template <int kCount>
__device__ inline void mask_after(float (&s)[kCount], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = score_column(i) > limit[score_row(i)] ? kMinusInfinity : s[i];
}

template <int kCount>
__device__ inline void mask_before(float (&s)[kCount], const int (&limit)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = score_column(i) < limit[score_row(i)] ? kMinusInfinity : s[i];
}

// The usual online softmax takes the maximum of every block before its exponentials. Any reference will do that keeps exp2
// within range, so here the exponentials come first, relative to the reference that the row has, and only if their sum
// shows that the row has outgrown it is the maximum taken, and the row done again. That is rare after the first block.
struct OnlineSoftmax {
  float max[2] = {kMinusInfinity, kMinusInfinity};    // the reference: a maximum of scores before scaling
  float shift[2] = {kMinusInfinity, kMinusInfinity};  // the reference, scaled; -inf: none for a multiply-add
  float sum[2] = {0.f, 0.f};                          // this lane's share

  // P of one row of a block, packed in pairs as the A operand of the next product, but for the weights that keep(i, pair)
  // drops; returns the lane's sum of P, those and all.
  template <bool kBFloat16, int kCount, typename Keep>
  __device__ float exponentiate(int row, const float (&s)[kCount], float scale_log2, uint32_t (&p)[kCount / 8][4],
                                const Keep& keep) const {
    return pack_row<kBFloat16>(row, s, p, keep, [&](float score) { return fmaf(score, scale_log2, -shift[row]); });
  }

  // Whether all lanes of the warp may keep what they have: a sum within the limit has no term beyond it. False for NaN and
  // infinity, which a row without a reference gives.
  __device__ static bool within_range(float total) {
    constexpr float kLimit = 256.f;  // exact in every type, and far from the largest float16
    return __all_sync(0xffffffffu, total <= kLimit);
  }

  // Makes the maximum of this block and those before the reference, and P of the row relative to it. `factor` is for all
  // that was summed before. Returns the lane's sum of P.
  template <bool kBFloat16, int kCount, typename Keep>
  __device__ float raise(int row, const float (&s)[kCount], float scale_log2, uint32_t (&p)[kCount / 8][4], const Keep& keep,
                         float& factor) {
    float top = max[row];
#pragma unroll
    for (int i = 2 * row; i < kCount; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float safe = top == kMinusInfinity ? 0.f : top;  // without a key: exp2 of -inf, not of -inf - -inf
    factor = ptx::exp2_fast((max[row] - safe) * scale_log2);
    sum[row] *= factor;
    max[row] = top;
    // A multiply-add rounds once, a scaled reference before it: from here on the difference may leave exp2's range. Such
    // rows come this way in every block, where the difference is taken first.
    constexpr float kLargest = 1 << 20;
    shift[row] = fabsf(top * scale_log2) < kLargest ? top * scale_log2 : kMinusInfinity;
    return pack_row<kBFloat16>(row, s, p, keep, [&](float score) { return (score - safe) * scale_log2; });
  }

  // Each row's sum over its four lanes.
  __device__ void reduce() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
      sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
    }
  }

  // A logit more in a row whose sum is reduced and whose scores need no scaling. Returns the factor for what was summed before.
  __device__ float add(int row, float logit) {
    constexpr float kLog2e = 1.4426950408889634f;
    const float top = fmaxf(max[row], logit), safe = top == kMinusInfinity ? 0.f : top;
    const float factor = ptx::exp2_fast((max[row] - safe) * kLog2e);
    sum[row] = fmaf(sum[row], factor, ptx::exp2_fast((logit - safe) * kLog2e));
    max[row] = top;
    return factor;
  }

  __device__ float inverse(int row) const { return sum[row] == 0.f ? 0.f : 1.f / sum[row]; }
  __device__ float log_sum_exp(int row, float scale) const {
    return sum[row] == 0.f ? kMinusInfinity : fmaf(max[row], scale, logf(sum[row]));
  }

 private:
  template <bool kBFloat16, int kCount, typename Keep, typename Exponent>
  __device__ static float pack_row(int row, const float (&s)[kCount], uint32_t (&p)[kCount / 8][4], const Keep& keep,
                                   const Exponent& exponent) {
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 2 * row; i < kCount; i += 4) {
      const float low = ptx::exp2_fast(exponent(s[i])), high = ptx::exp2_fast(exponent(s[i + 1]));
      total[0] += low;
      total[1] += high;
      p[i / 8][i % 8 / 2] = keep(i, ptx::pack<kBFloat16>(low, high));
    }
    return total[0] + total[1];
  }
};

}  // namespace flashsdpa
