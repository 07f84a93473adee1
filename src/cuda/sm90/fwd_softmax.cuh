// Online softmax over one block of scores in the accumulator layout of wgmma, two rows a lane.
//
// Element i of a lane is row (i / 2) % 2 of its two, column 8 * (i / 4) + 2 * (lane % 4) + i % 2; four lanes share a row.
#pragma once

#include <cstdint>

namespace flashsdpa {

constexpr float kMinusInfinity = -__builtin_huge_valf();

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as a pair of 16-bit elements, `low` in the lower half.
template <bool kBFloat16>
__device__ inline uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

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

struct OnlineSoftmax {
  float max[2] = {kMinusInfinity, kMinusInfinity};  // of the scores before scaling
  float sum[2] = {0.f, 0.f};                        // this lane's share

  // Turns scores into exp2((s - max) * scale_log2); `correction` is what earlier sums and products shrink by. A row
  // without a key so far has maximum -inf: it is taken as 0, so that exp2 sees -inf and never -inf - -inf.
  template <int kCount>
  __device__ void update(float (&s)[kCount], float scale_log2, float (&correction)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float top = max[row];
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (score_row(i) == row) top = fmaxf(top, s[i]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float shift = top == kMinusInfinity ? 0.f : top * scale_log2;
      correction[row] = exp2_fast(fmaf(max[row], scale_log2, -shift));
      max[row] = top;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (score_row(i) == row) {
          s[i] = exp2_fast(fmaf(s[i], scale_log2, -shift));
          total += s[i];
        }
      sum[row] = fmaf(sum[row], correction[row], total);
    }
  }

  // Each row's sum over its four lanes.
  __device__ void reduce() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
      sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
    }
  }

  __device__ float inverse(int row) const { return sum[row] == 0.f ? 0.f : 1.f / sum[row]; }
  __device__ float log_sum_exp(int row, float scale) const {
    return sum[row] == 0.f ? kMinusInfinity : fmaf(max[row], scale, logf(sum[row]));
  }
};

}  // namespace flashsdpa
