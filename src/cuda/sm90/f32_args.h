// What the host gives the float32 kernels.
#pragma once

#include <cstdint>

#include "fwd_args.h"

namespace flashsdpa {

// A tensor (batch, head, row, column); strides in elements.
struct F32Tensor {
  float* data;
  int64_t stride_batch, stride_head, stride_row;
  int32_t rows, columns;
  int32_t stride_column;  // 1; of grad_out 0 too
  bool vectors;           // columns side by side, every row at a multiple of 16 bytes
};

// Of each row (batch, query head, query), what the backward needs besides its tensors.
struct F32Stats {
  float* lse;    // +inf for a row without keys, so that its weights are 0
  float* delta;  // sum(out * grad_out) - grad_lse
  float* shift;  // where lse has few digits left for the logarithm of the sum (kF32Coarse): that, base 2; else 0
};
constexpr float kF32Coarse = 4096.f;  // of |lse|

struct F32Args {
  F32Tensor q, k, v, out;
  F32Tensor grad_out, dq, dk, dv;  // backward
  float* lse;                      // forward: (batch, heads_q, seq_q), natural logarithm
  F32Stats stats;                  // backward, as the two that follow: (batch, heads_q, seq_q)
  const float *given_lse, *grad_lse;  // of the forward; null: no gradient
  int32_t heads_q, heads_kv, group;
  int32_t seq_q, seq_k;
  int32_t planes;            // forward and dQ: batch * heads_q; dK and dV: batch * heads_kv
  int32_t blocks;            // of rows of a plane
  int32_t band_lo, band_hi;  // key j for query i: i + lo <= j <= i + hi; clamped, so that sums fit 32 bits
  float scale;
  FwdMask mask;  // its plan null: no mask
  ScoreTerms terms;  // kernels with terms; of its `scale` nothing is read, `scale` above is the caller's always
};

}  // namespace flashsdpa
