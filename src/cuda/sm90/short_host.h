// Host side that the kernels for short sequences share.
#pragma once

#include <cmath>

#include "../common/status.h"
#include "short.h"
#include "tensors.h"

namespace flashsdpa {

inline int short_class(const Problem& p) { return std::max(p.dim, p.dim_v) <= 32 ? 32 : 64; }

inline void short_make_args(const Problem& p, const ConstView& q, const ConstView& k, const ConstView& v, ShortArgs* args) {
  args->q = reach(q.data, q.stride, {p.batch, p.heads_q, p.seq_q, p.dim});
  args->k = reach(k.data, k.stride, {p.batch, p.heads_kv, p.seq_k, p.dim});
  args->v = reach(v.data, v.stride, {p.batch, p.heads_kv, p.seq_k, p.dim_v});
  args->mask.data = p.seq_k > 0 ? p.mask.data : nullptr;
  args->mask.dtype = p.mask.dtype;
  std::copy_n(p.mask.stride, 4, args->mask.stride);
  args->heads_q = static_cast<int32_t>(p.heads_q);
  args->group = static_cast<int32_t>(p.heads_q / p.heads_kv);
  args->seq_q = static_cast<int32_t>(p.seq_q);
  args->seq_k = static_cast<int32_t>(p.seq_k);
  // A limit beyond the last key for the first query, or before the first key for the last row, may as well be there.
  args->band_lo = static_cast<int32_t>(std::clamp<int64_t>(p.band.lo, -kShortRows, p.seq_k));
  args->band_hi = static_cast<int32_t>(std::clamp<int64_t>(p.band.hi, -kShortRows, p.seq_k));
  const bool numbers = p.mask.data && p.mask.dtype != DType::kBool;
  args->scale = numbers || p.scale == 0 ? 1.f : static_cast<float>(std::fabs(p.scale));
  args->factor = numbers ? static_cast<float>(p.scale) : p.scale == 0 ? 0.f : p.scale < 0 ? -1.f : 1.f;
}

}  // namespace flashsdpa
