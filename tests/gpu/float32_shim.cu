// The float32 launchers behind the names and flat arguments of forward_shim.cu and backward_shim.cu, so that the same caller
// serves; what means nothing here has no name.
#include "src/cuda/launchers.h"
#include "tests/gpu/mask_shim.h"
#include "tests/gpu/problem_shim.h"
#include "tests/gpu/terms_shim.h"

using namespace flashsdpa;

#define FLASHSDPA_SHIM extern "C" __attribute__((visibility("default")))

namespace {

bool tf32_allowed = false;

Problem float32_problem(const int64_t* sizes, const int64_t* band, double scale) {
  Problem p = problem_of(sizes);
  p.dtype = DType::kFloat32;
  p.scale = scale;
  p.band = {band[0], band[1]};
  p.allow_tf32 = tf32_allowed;
  return p;
}

// The first `axes` strides of tensor `i`, of four axes, the last being 1 by default.
template <typename AnyView, typename Data>
void fill(AnyView* view, Data data, const int64_t* strides, int i, int axes) {
  view->data = data;
  for (int axis = 0; axis < 4; ++axis) view->stride[axis] = axis < axes ? strides[axes * i + axis] : 1;
}

}  // namespace

// From now on, as torch's matmul may be.
FLASHSDPA_SHIM void allow_tf32(int allowed) { tf32_allowed = allowed; }

FLASHSDPA_SHIM int64_t forward_scratch(const int64_t*, const int64_t*, const int32_t*, const int64_t*, const void*, const void*) { return 0; }

FLASHSDPA_SHIM const char* forward(const void* q, const void* k, const void* v, void* out, void* lse, void*, void*,
                                   const int64_t* strides, const int64_t* sizes, const int64_t* band, const int32_t*,
                                   const void* mask, int mask_dtype, const int64_t* mask_layout, const int32_t* mask_plan,
                                   const void* const* term_pointers, const double* term_numbers, int, double scale, void* stream) {
  ForwardParams f{};
  f.problem = float32_problem(sizes, band, scale);
  set_mask(mask, mask_dtype, mask_layout, mask_plan, &f.problem);
  set_terms(term_pointers, term_numbers, &f.problem);
  fill(&f.q, q, strides, 0, 3);
  fill(&f.k, k, strides, 1, 3);
  fill(&f.v, v, strides, 2, 3);
  fill(&f.out, out, strides, 3, 3);
  f.lse = lse;
  Launch launch;
  launch.stream = stream;
  return launch_forward_f32_sm90(&f, launch);
}

FLASHSDPA_SHIM const char* backward(void* const* tensors, const int64_t* strides, const void* lse, const void* grad_lse,
                                    const int64_t* sizes, const int64_t* band, const void* mask, int mask_dtype,
                                    const int64_t* mask_layout, const int32_t* mask_plan, void* grad_mask,
                                    const void* const* term_pointers, const double* term_numbers, float* grad_sinks, int, double scale,
                                    int, void* scratch, int64_t* scratch_bytes, void* stream) {
  BackwardParams b{};
  b.problem = float32_problem(sizes, band, scale);
  set_mask(mask, mask_dtype, mask_layout, mask_plan, &b.problem);
  set_terms(term_pointers, term_numbers, &b.problem);
  ConstView* const inputs[5] = {&b.grad_out, &b.q, &b.k, &b.v, &b.out};
  View* const gradients[3] = {&b.dq, &b.dk, &b.dv};
  for (int i = 0; i < 5; ++i) fill(inputs[i], tensors[i], strides, i, 4);
  for (int i = 0; i < 3; ++i) fill(gradients[i], tensors[5 + i], strides, 5 + i, 4);
  b.lse = lse;
  b.grad_lse = grad_lse;
  b.dmask = grad_mask;
  b.dsinks = grad_sinks;
  b.scratch = scratch;
  if (!scratch) {
    *scratch_bytes = scratch_backward_f32_sm90(&b);
    return nullptr;
  }
  Launch launch;
  launch.stream = stream;
  return launch_backward_f32_sm90(&b, launch);
}
