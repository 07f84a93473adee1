// The lists of a mask plan (mask_plan.h), as kernels read them.
#pragma once

#include "../../mask_plan.h"

namespace flashsdpa {

// How many of `count` entries, ascending, are of granules before `granule`.
__device__ inline int entries_before(const int32_t* entries, int count, int granule) {
  int low = 0;  // entries before `low` are, those from `count` on are not
  while (low < count) {
    const int middle = (low + count) / 2;
    if ((__ldg(entries + middle) >> 2) < granule) {
      low = middle + 1;
    } else {
      count = middle;
    }
  }
  return low;
}

// The class of two granules together.
__device__ inline int join_classes(int a, int b) { return a == b ? a : a == kMixed || b == kMixed ? kMixed : kBits; }

}  // namespace flashsdpa
