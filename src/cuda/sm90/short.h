// Attention of at most 64 queries and 64 keys with up to 64 columns: the windows of vision models, very short texts. What the
// host gives its kernels, and when they are taken.
//
// A block of four warps, 16 queries each, does a (batch, head) in one go, all of it in registers and some shared memory. Several
// blocks share a processor, and while one waits for memory the others work. A mask is read as it is: of one granule a plan has
// nothing to say.
#pragma once

#include <algorithm>

#include <cuda_runtime_api.h>

#include "fwd_args.h"
#include "score_terms.h"

namespace flashsdpa {

constexpr int kShortRows = 64, kShortThreads = 128;
constexpr int64_t kShortDim = 64;

struct ShortMask {
  const void* data;  // null: none
  DType dtype;       // bool, float32, or q's
  int64_t stride[4];
};

struct ShortArgs {
  FwdTensor q, k, v;
  ShortMask mask;
  int32_t heads_q, group;  // group: query heads that share a head of k and v
  int32_t seq_q, seq_k;
  int32_t band_lo, band_hi;  // key j for query i: i + lo <= j <= i + hi; clamped, so that sums fit 32 bits
  float scale;               // > 0; a score is ((q . k) * factor + mask) * scale
  float factor;              // with a mask of numbers the caller's scale, and scale is 1; else -1, 0 or 1
};

struct FwdShortArgs : ShortArgs {
  FwdTensor out;
  float* lse;  // (batch, heads_q, seq_q), natural logarithm
};

// The gradient of an additive mask is a number of planes, (batch|1, heads|1), of seq_q x seq_k. A plane is the sum over `summed`
// (batch, head), of which each of its `parts` blocks takes its share.
struct ShortMaskGradient {
  void* out;         // (planes, seq_q, seq_k) contiguous, of mask.dtype; null: not wanted
  float* partial;    // (planes, parts, seq_q, seq_k), any content before; null where parts is 1
  int32_t parts, summed;
  bool over_batch, over_heads;  // the axes summed over
};

struct BwdShortArgs : ShortArgs {
  FwdTensor grad_out, dq, dk, dv;
  const float* grad_lse;    // (batch, heads_q, seq_q), or null
  int64_t grad_step;        // from column to column of grad_out
  bool inputs;              // dq, dk and dv are wanted
  float grad_scale;         // the caller's scale: of dq and dk
  ShortMaskGradient dmask;
};

inline bool is_short(const Problem& p) {
  return p.seq_q <= kShortRows && p.seq_k <= kShortRows && p.dim <= kShortDim && p.dim_v <= kShortDim &&
         p.batch * p.heads_q <= INT32_MAX && (p.mask.data || !p.plan.data) &&
         !has_score_terms(p);
}
// Where heads share a head of k and v its gradients are sums, and a mask of one row or column is rare.
inline bool is_short(const BackwardParams& b) {
  const Problem& p = b.problem;
  return is_short(p) && p.heads_q == p.heads_kv &&
         (!b.dmask || (p.mask.size[2] == p.seq_q && p.mask.size[3] == p.seq_k));
}

const char* fwd_launch_short(const ForwardParams& f, cudaStream_t stream);
const char* bwd_launch_short(const BackwardParams& b, int device, int processors, cudaStream_t stream);
int64_t bwd_short_scratch_bytes(const BackwardParams& b, int processors);

}  // namespace flashsdpa
