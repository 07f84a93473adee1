// The decisions of ../dropout.h as a tensor, by ATen: for derivatives that no kernel computes.
#pragma once

#include "call.h"

namespace flashsdpa {

struct Span {
  int64_t first, count;
};

// (batch, heads, queries.count, keys.count) of `type`: what dropout multiplies each weight by. Undefined where o has none.
Tensor dropout_factor(const Options& o, at::ScalarType type, int64_t batch, int64_t heads, Span queries, Span keys);

}  // namespace flashsdpa
