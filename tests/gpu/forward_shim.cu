// The forward launcher with flat arguments, for tests that build it without torch. `strides`: those of q, k, v and out,
// (batch, head, row) each. `sizes`: batch, heads_q, heads_kv, seq_q, seq_k, dim, dim_v. `band`: lo, hi.
#include "src/cuda/launchers.h"

using namespace flashsdpa;

extern "C" __attribute__((visibility("default"))) const char* forward(
    const void* q, const void* k, const void* v, void* out, void* lse, void* counter, const int64_t* strides,
    const int64_t* sizes, const int64_t* band, int bfloat16, double scale, void* stream) {
  ForwardParams f{};
  f.problem.batch = sizes[0];
  f.problem.heads_q = sizes[1];
  f.problem.heads_kv = sizes[2];
  f.problem.seq_q = sizes[3];
  f.problem.seq_k = sizes[4];
  f.problem.dim = sizes[5];
  f.problem.dim_v = sizes[6];
  f.problem.dtype = bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  f.problem.scale = scale;
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
  Launch launch;
  launch.stream = stream;
  return launch_forward_sm90(&f, launch);
}
