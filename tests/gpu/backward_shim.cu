// The backward launcher with flat arguments, for tests that build it without torch. `tensors`: grad_out, q, k, v, out,
// dq, dk, dv (all null: not wanted), with four strides each in `strides`. `grad_mask`: or null. `sizes`: see
// problem_shim.h. `band`: lo, hi. `mask_layout`: see mask_shim.h; terms: see terms_shim.h; `grad_sinks`: or null. With `scratch` null,
// returns the bytes that it needs in *scratch_bytes.
#include "src/cuda/launchers.h"
#include "tests/gpu/mask_shim.h"
#include "tests/gpu/problem_shim.h"
#include "tests/gpu/terms_shim.h"

using namespace flashsdpa;

extern "C" __attribute__((visibility("default"))) const char* backward(
    void* const* tensors, const int64_t* strides, const void* lse, const void* grad_lse, const int64_t* sizes,
    const int64_t* band, const void* mask, int mask_dtype, const int64_t* mask_layout, const int32_t* mask_plan, void* grad_mask,
    const void* const* term_pointers, const double* term_numbers, float* grad_sinks, int bfloat16, double scale, int deterministic,
    void* scratch, int64_t* scratch_bytes, void* stream) {
  BackwardParams b{};
  b.problem = problem_of(sizes);
  b.problem.dtype = bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  b.problem.scale = scale;
  b.problem.band = {band[0], band[1]};
  set_mask(mask, mask_dtype, mask_layout, mask_plan, &b.problem);
  set_terms(term_pointers, term_numbers, &b.problem);
  ConstView* const inputs[5] = {&b.grad_out, &b.q, &b.k, &b.v, &b.out};
  View* const gradients[3] = {&b.dq, &b.dk, &b.dv};
  const auto fill = [&](auto* view, int i) {
    view->data = tensors[i];
    for (int axis = 0; axis < 4; ++axis) view->stride[axis] = strides[4 * i + axis];
  };
  for (int i = 0; i < 5; ++i) fill(inputs[i], i);
  for (int i = 0; i < 3; ++i) fill(gradients[i], 5 + i);
  b.lse = lse;
  b.grad_lse = grad_lse;
  b.dmask = grad_mask;
  b.dsinks = grad_sinks;
  b.deterministic = deterministic;
  b.scratch = scratch;
  if (!scratch) {
    *scratch_bytes = scratch_backward_sm90(&b);
    return nullptr;
  }
  Launch launch;
  launch.stream = stream;
  return launch_backward_sm90(&b, launch);
}
