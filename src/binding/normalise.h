// SDPA takes any rank and broadcasts; the ops take 4-D tensors. This is the way between, by views alone.
#pragma once

#include "call.h"
#include "checks.h"

namespace flashsdpa {

struct Normalised {
  Tensor query, key, value;  // (batch, heads, length, head_dim)
  OptTensor attn_mask;       // (batch|1, heads|1, query length|1, key length|1)
  // Leading axes of the caller's query beyond (heads, length, head_dim), after broadcasting.
  c10::SymDimVector leading;
  int64_t rank = 4;
};

// Each returns whether its part of `result` is complete; a reason says why not. The inputs come first.
bool normalise_inputs(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa, Normalised& result,
                      Reasons& reasons);
// wrapped: torch.func has wrapped tensors of the call, the mask perhaps.
bool normalise_mask(const OptTensor& attn_mask, bool traced, bool wrapped, Normalised& result, Reasons& reasons);

// The caller's rank back from a (batch, heads, length, head_dim) output.
Tensor restore_rank(const Tensor& out, const Normalised& from);

}  // namespace flashsdpa
