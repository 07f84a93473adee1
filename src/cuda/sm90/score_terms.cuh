// What becomes of a block of products q . k before masks and biases: scaled scores, the soft cap and then the slopes; in the
// accumulator layout of wgmma (see fwd_softmax.cuh), with rows of queries and columns of keys or the other way round.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "fwd_softmax.cuh"
#include "score_terms.h"

namespace flashsdpa {

// tanh to 5 units in the last place, small arguments and large ones alike: x P(x^2) / Q(x^2), a minimax fit of its relative
// error for |x| < 9, where it becomes 1 but for rounding, which may go a unit or two past 1. One instruction of the special
// function unit, where exponential and reciprocal would be two.
__device__ inline float tanh_of(float x) {
  constexpr float kEnd = 9.01f;
  const float y = ptx::clamp_keep(x, kEnd), z = y * y;
  float p = fmaf(1.33367622e-8f, z, 2.05962102e-5f);
  p = fmaf(p, z, 3.49480716e-3f);
  p = fmaf(p, z, 1.33803683e-1f);
  p = fmaf(p, z, 1.f);
  float q = fmaf(7.76924726e-7f, z, 3.28435686e-4f);
  q = fmaf(q, z, 2.58740119e-2f);
  q = fmaf(q, z, 4.67136837e-1f);
  q = fmaf(q, z, 1.f);
  return y * p * ptx::reciprocal_fast(q);
}

// Products become scores, capped if they are to be.
template <int kCount>
__device__ inline void scale_and_cap(const ScoreTerms& terms, float (&s)[kCount]) {
  if (terms.softcap > 0.f) {
#pragma unroll
    for (float& score : s) score = terms.softcap * tanh_of(score * terms.to_cap);
  } else if (terms.scale != 1.f) {
#pragma unroll
    for (float& score : s) score *= terms.scale;
  }
}

__device__ inline float value_of_head(const HeadView& view, int batch, int head) {
  return __ldg(view.data + batch * view.stride_batch + head * view.stride_head);
}

// Takes slope * distance off the scores. Where a distance is 0 in column c of the lane's row, place is c, counted from the
// lane's first column: the row is a query and place query + diagonal - key, or the row is a key and place key - diagonal -
// query. Row 1 is 8 rows on.
template <int kCount>
__device__ inline void take_slopes_off(float (&s)[kCount], float slope, int place) {
  const float places[2] = {float(place), float(place + 8)};
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = fmaf(-slope, fabsf(places[score_row(i)] - float(score_column(i))), s[i]);
}

}  // namespace flashsdpa
