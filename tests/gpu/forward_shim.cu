// The forward launcher with flat arguments, for tests that build it without torch. `strides`: those of q, k, v and out,
// (batch, head, row) each. `sizes`: batch, heads_q, heads_kv, seq_q, seq_k, dim, dim_v. `band`: lo, hi. `way`:
// consumers of the instance for few queries (0: the instance for many), heads packed, splits; null: as planned.
// `mask_layout`: the sizes of the mask, its strides (0 where a size is 1), and the plan's (batch, head); null: no mask.
// Terms: see terms_shim.h.
#include "src/cuda/launchers.h"
#include "src/cuda/sm90/fwd_plan.h"
#include "tests/gpu/mask_shim.h"
#include "tests/gpu/problem_shim.h"
#include "tests/gpu/terms_shim.h"

using namespace flashsdpa;

#define FLASHSDPA_SHIM extern "C" __attribute__((visibility("default")))

namespace {

FwdPlan plan_of(const Problem& p, const int32_t* way) {
  FwdPlan plan = fwd_tiling(p, way[0] == 0 ? fwd_whole_instance(p) : fwd_few_instance(p, way[0]), way[1]);
  plan.splits = way[2];
  return plan;
}

}  // namespace

// Bytes of scratch that the call takes.
FLASHSDPA_SHIM int64_t forward_scratch(const int64_t* sizes, const int64_t* band, const int32_t* way, const int64_t* mask_layout,
                                    const void* const* term_pointers, const double* term_numbers) {
  ForwardParams f{};
  f.problem = problem_of(sizes);
  set_mask(&f, 0, mask_layout, nullptr, &f.problem);
  set_terms(term_pointers, term_numbers, &f.problem);
  f.problem.band = {band[0], band[1]};
  return way ? fwd_partial_bytes(f.problem, plan_of(f.problem, way)) : forward_scratch_sm90(&f);
}

FLASHSDPA_SHIM const char* forward(const void* q, const void* k, const void* v, void* out, void* lse, void* counter,
                                   void* scratch, const int64_t* strides, const int64_t* sizes, const int64_t* band,
                                   const int32_t* way, const void* mask, int mask_dtype, const int64_t* mask_layout,
                                   const int32_t* mask_plan, const void* const* term_pointers, const double* term_numbers, int bfloat16,
                                   double scale, void* stream) {
  ForwardParams f{};
  f.problem = problem_of(sizes);
  f.problem.dtype = bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  f.problem.scale = scale;
  set_mask(mask, mask_dtype, mask_layout, mask_plan, &f.problem);
  set_terms(term_pointers, term_numbers, &f.problem);
  f.problem.band = {band[0], band[1]};
  f.q.data = q;
  f.k.data = k;
  f.v.data = v;
  f.out.data = out;
  for (int axis = 0; axis < 4; ++axis) {
    f.q.stride[axis] = axis < 3 ? strides[axis] : 1;
    f.k.stride[axis] = axis < 3 ? strides[3 + axis] : 1;
    f.v.stride[axis] = axis < 3 ? strides[6 + axis] : 1;
    f.out.stride[axis] = axis < 3 ? strides[9 + axis] : 1;
  }
  f.lse = lse;
  f.counter = static_cast<int32_t*>(counter);
  f.scratch = scratch;
  if (way) {
    CurrentDevice device;
    if (const char* error = find_sm90_device(&device)) return error;
    return fwd_launch(f, plan_of(f.problem, way), device, static_cast<cudaStream_t>(stream));
  }
  Launch launch;
  launch.stream = stream;
  return launch_forward_sm90(&f, launch);
}
