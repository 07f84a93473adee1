// How the shims are given soft cap, slopes, sinks and dropout, and batch invariance.
#pragma once

#include "src/params.h"

namespace flashsdpa {

// `pointers`: slopes, sinks, and dropout's seed and offset, each null where there is none. `numbers`: softcap, the slopes' strides of
// (batch, head), diagonal, the sinks' strides, dropout's kept and rescale, 1 for batch invariance. Both null: nothing of it.
inline void set_terms(const void* const* pointers, const double* numbers, Problem* p) {
  if (!pointers) return;
  const auto whole = [&](int i) { return static_cast<int64_t>(numbers[i]); };
  p->softcap = numbers[0];
  p->slopes = {static_cast<const float*>(pointers[0]), whole(1), whole(2)};
  p->diagonal = whole(3);
  p->sinks = {static_cast<const float*>(pointers[1]), whole(4), whole(5)};
  p->dropout.seed = static_cast<const int64_t*>(pointers[2]);
  p->dropout.offset = static_cast<const int64_t*>(pointers[3]);
  p->dropout.kept = static_cast<uint32_t>(whole(6));
  p->dropout.rescale = numbers[7];
  p->batch_invariant = whole(8) != 0;
}

}  // namespace flashsdpa
