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
  float shift[2] = {0.f, 0.f};                      // max, scaled

  // Takes one row of a block of scores into account. The maximum only has to keep exp2 within range, so that it is raised
  // when some row of the warp has outgrown it by a factor of 2^kSlack, which is rare after the first blocks; then the
  // result is true (for the whole warp) and all that was summed before shrinks by `correction`. A row without a key so
  // far has maximum -inf, taken as 0: exp2 sees -inf and never -inf - -inf.
  template <int kCount>
  __device__ bool raise(int row, const float (&s)[kCount], float scale_log2, float (&correction)[2]) {
    constexpr float kSlack = 8.f;
    float top[2] = {s[2 * row], s[2 * row + 1]};  // two chains: one warp alone has to hide its instructions' latency
#pragma unroll
    for (int i = 4; i < kCount; ++i)
      if (score_row(i) == row) top[i % 2] = fmaxf(top[i % 2], s[i]);
    const float before = max[row];
    float after = fmaxf(before, fmaxf(top[0], top[1]));
    after = fmaxf(after, __shfl_xor_sync(0xffffffffu, after, 1));
    after = fmaxf(after, __shfl_xor_sync(0xffffffffu, after, 2));
    const bool raised = __any_sync(0xffffffffu, (after - before) * scale_log2 > kSlack);
    max[row] = raised ? after : before;
    shift[row] = max[row] == kMinusInfinity ? 0.f : max[row] * scale_log2;
    correction[row] = exp2_fast(fmaf(before, scale_log2, -shift[row]));
    sum[row] *= correction[row];
    return raised;
  }

  // Turns the scores of one row into exp2(s * scale_log2 - shift) and adds them up.
  template <int kCount>
  __device__ void exponentiate(int row, float (&s)[kCount], float scale_log2) {
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (score_row(i) == row) {
        s[i] = exp2_fast(fmaf(s[i], scale_log2, -shift[row]));
        total[i % 2] += s[i];
      }
    sum[row] += total[0] + total[1];
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
