// How the shims are given a mask.
#pragma once

#include "src/params.h"

namespace flashsdpa {

// `layout`: the sizes of the mask, its strides (0 where a size is 1), and the plan's (batch, head); null: no mask.
inline void set_mask(const void* mask, int dtype, const int64_t* layout, const int32_t* words, Problem* p) {
  if (!layout) return;
  p->mask.data = mask;
  p->mask.dtype = static_cast<DType>(dtype);
  for (int axis = 0; axis < 4; ++axis) {
    p->mask.size[axis] = layout[axis];
    p->mask.stride[axis] = layout[4 + axis];
  }
  p->plan = {words, layout[8], layout[9]};
}

}  // namespace flashsdpa
