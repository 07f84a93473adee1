// Layouts of outputs, written once for real (int64_t) and symbolic (SymInt) sizes, so that both agree.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymInt.h>

#include <algorithm>
#include <array>
#include <limits>

#include "mask_plan.h"

namespace flashsdpa {

inline bool equals(int64_t a, int64_t b) { return a == b; }
inline bool equals(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_FALSE(a.sym_eq(b)); }
inline bool at_least(int64_t a, int64_t b) { return a >= b; }
inline bool at_least(const c10::SymInt& a, const c10::SymInt& b) { return TORCH_GUARD_OR_TRUE(a.sym_ge(b)); }
inline int64_t one_or_more(int64_t a) { return std::max<int64_t>(a, 1); }
inline c10::SymInt one_or_more(const c10::SymInt& a) { return a.max(1); }

// Dense strides for a (batch, heads, rows, columns) tensor: columns innermost, the other axes nested as they are in
// `like`. An axis whose stride says nothing (size 1, or broadcast with stride 0) goes just outside the axes on its
// right.
template <class Int>
std::array<Int, 4> dense_strides(const std::array<Int, 4>& sizes, c10::ArrayRef<Int> like_strides) {
  std::array<int, 3> order;  // innermost first
  std::array<bool, 3> silent;
  int count = 0;
  for (int axis = 2; axis >= 0; --axis) {
    silent[axis] = equals(sizes[axis], Int(1)) || equals(like_strides[axis], Int(0));
    if (silent[axis]) continue;
    int at = count++;
    for (; at > 0 && !at_least(like_strides[axis], like_strides[order[at - 1]]); --at) order[at] = order[at - 1];
    order[at] = axis;
  }
  for (int axis = 2; axis >= 0; --axis) {
    if (!silent[axis]) continue;
    int at = 0;
    for (int i = 0; i < count; ++i)
      if (order[i] > axis) at = i + 1;
    std::copy_backward(order.begin() + at, order.begin() + count, order.begin() + count + 1);
    order[at] = axis;
    ++count;
  }
  std::array<Int, 4> strides{Int(1), Int(1), Int(1), Int(1)};
  Int step = one_or_more(sizes[3]);
  for (int axis : order) {
    strides[axis] = step;
    step = step * one_or_more(sizes[axis]);
  }
  return strides;
}

// Of a mask that is planned, either length: up to here no index and no count of words overflows.
constexpr int64_t kPlanLongest = std::numeric_limits<int32_t>::max();

// The shape of the mask plan (mask_plan.h) of a 4-D mask: (mask batch, mask heads, words).
template <class Int>
std::array<Int, 3> plan_shape(c10::ArrayRef<Int> mask) {
  return {mask[0], mask[1], plan_words(mask[2], mask[3])};
}

// lse is float32, float64 for float64 inputs; bias gradients accumulate in the same type.
inline at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace flashsdpa
