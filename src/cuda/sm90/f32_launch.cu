// Host side of the float32 kernels: describes the tensors and launches.
#include <algorithm>

#include "../launchers.h"
#include "bwd_instances.h"
#include "f32_instances.h"
#include "tensors.h"

namespace flashsdpa {
namespace {

const F32Instance& instance_for(const Problem& p, bool terms) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  if (terms) return dim <= 64 ? kF32TermsD64 : dim <= 128 ? kF32TermsD128 : kF32TermsD256;
  return dim <= 64 ? kF32D64 : dim <= 128 ? kF32D128 : kF32D256;
}

// `stride` may end with 0 of a gradient that is one number.
F32Tensor reach_f32(const void* data, const int64_t (&stride)[4], int64_t rows, int64_t columns) {
  const bool vectors = (columns == 1 || stride[3] == 1) && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                       (stride[0] | stride[1] | stride[2]) % 4 == 0;
  return {static_cast<float*>(const_cast<void*>(data)), stride[0], stride[1], stride[2], static_cast<int32_t>(rows),
          static_cast<int32_t>(columns), static_cast<int32_t>(stride[3]), vectors};
}

F32Args make_args(const Problem& p, const ConstView& q, const ConstView& k, const ConstView& v) {
  F32Args args{};
  args.q = reach_f32(q.data, q.stride, p.seq_q, p.dim);
  args.k = reach_f32(k.data, k.stride, p.seq_k, p.dim);
  args.v = reach_f32(v.data, v.stride, p.seq_k, p.dim_v);
  args.heads_q = static_cast<int32_t>(p.heads_q);
  args.heads_kv = static_cast<int32_t>(p.heads_kv);
  args.group = static_cast<int32_t>(p.heads_q / p.heads_kv);
  args.seq_q = static_cast<int32_t>(p.seq_q);
  args.seq_k = static_cast<int32_t>(p.seq_k);
  // A limit beyond the last key for the first query, or before the first key for the last one, may as well be there.
  args.band_lo = static_cast<int32_t>(std::clamp(p.band.lo, -p.seq_q, p.seq_k));
  args.band_hi = static_cast<int32_t>(std::clamp(p.band.hi, -p.seq_q, p.seq_k));
  args.scale = static_cast<float>(p.scale);
  if (has_mask(p)) args.mask = make_mask(p);
  args.terms = make_score_terms(p);
  return args;
}

// Blocks of `rows` of `seq`, of all planes.
const char* run(const F32Kernel& kernel, F32Args args, int64_t seq, int64_t planes, bool tf32, const CurrentDevice& device,
                const Launch& launch) {
  const int64_t blocks = ceil_div(seq, kernel.block_m);
  if (blocks * planes > INT32_MAX) return "the float32 kernels take up to 2^31 blocks of rows; split the batch";
  args.planes = static_cast<int32_t>(planes);
  args.blocks = static_cast<int32_t>(blocks);
  return (tf32 ? kernel.tf32 : kernel.exact)(args, static_cast<uint32_t>(blocks * planes), device.number,
                                             static_cast<cudaStream_t>(launch.stream));
}

const char* refuse(const Problem& p, CurrentDevice* device) {
  if (const char* reason = find_sm90_device(device)) return reason;
  const char* reason = refuse_problem(p);
  return reason ? reason : refuse_without_plan(p);
}

int64_t stat_rows(const Problem& p) { return p.batch * p.heads_q * p.seq_q; }

}  // namespace

const char* launch_forward_f32_sm90(const void* params, const Launch& launch) {
  const ForwardParams& f = *static_cast<const ForwardParams*>(params);
  const Problem& p = f.problem;
  if (p.batch == 0 || p.heads_q == 0 || p.seq_q == 0 || p.dim_v == 0) return nullptr;
  CurrentDevice device;
  if (const char* reason = refuse(p, &device)) return reason;
  F32Args args = make_args(p, f.q, f.k, f.v);
  args.out = reach_f32(f.out.data, f.out.stride, p.seq_q, p.dim_v);
  args.lse = static_cast<float*>(f.lse);
  return run(instance_for(p, has_score_terms(p)).forward, args, p.seq_q, p.batch * p.heads_q, p.allow_tf32, device, launch);
}

void describe_forward_f32_sm90(const void* params, KernelDetail* detail) {
  const ForwardParams& f = *static_cast<const ForwardParams*>(params);
  const F32Kernel& kernel = instance_for(f.problem, has_score_terms(f.problem)).forward;
  *detail = {kernel.block_m, kernel.block_n, 1, "last rows first", /*uses_tma=*/false, {}, 1, 1, /*kernel=*/nullptr,
             f.problem.allow_tf32 ? "mma.sync, one TF32 product for each of float32, as torch allows its matmul"
                                  : "mma.sync, three TF32 products for each of float32"};
}

int64_t scratch_backward_f32_sm90(const void* params) {
  const BackwardParams& b = *static_cast<const BackwardParams*>(params);
  CurrentDevice device;
  if (find_sm90_device(&device)) device.processors = 0;  // the launch will say why not
  return (3 * stat_rows(b.problem) + f32_mask_scratch(b, device.processors)) * int64_t{sizeof(float)};
}

const char* launch_backward_f32_sm90(const void* params, const Launch& launch) {
  const BackwardParams& b = *static_cast<const BackwardParams*>(params);
  const Problem& p = b.problem;
  const bool no_rows = p.batch == 0 || p.heads_q == 0 || p.seq_q == 0;
  if (no_rows || (p.seq_k == 0 && !b.dsinks)) return nullptr;  // no gradient, or only zeros
  CurrentDevice device;
  if (const char* reason = refuse(p, &device)) return reason;
  F32Args args = make_args(p, b.q, b.k, b.v);
  args.out = reach_f32(b.out.data, b.out.stride, p.seq_q, p.dim_v);
  args.grad_out = reach_f32(b.grad_out.data, b.grad_out.stride, p.seq_q, p.dim_v);
  const bool wants_inputs = b.dq.data != nullptr;
  if (wants_inputs) {
    args.dq = reach_f32(b.dq.data, b.dq.stride, p.seq_q, p.dim);
    args.dk = reach_f32(b.dk.data, b.dk.stride, p.seq_k, p.dim);
    args.dv = reach_f32(b.dv.data, b.dv.stride, p.seq_k, p.dim_v);
  }
  args.stats.lse = static_cast<float*>(b.scratch);
  args.stats.delta = args.stats.lse + stat_rows(p);
  args.stats.shift = args.stats.delta + stat_rows(p);
  args.given_lse = static_cast<const float*>(b.lse);
  args.grad_lse = static_cast<const float*>(b.grad_lse);
  const F32Instance& instance = instance_for(p, takes_terms(p));  // of sinks the log-sum-exp says it all
  const int64_t planes_q = p.batch * p.heads_q;
  const char* error = run(instance_for(p, has_score_terms(p)).pre, args, p.seq_q, planes_q, p.allow_tf32, device, launch);
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  if (!error && b.dsinks) error = f32_run_sinks(args, b.dsinks, p.batch, stream);
  if (!error && b.dmask) error = f32_run_mask(b, args, args.stats.shift + stat_rows(p), device, stream);
  if (error || !wants_inputs) return error;
  error = run(instance.queries, args, p.seq_q, planes_q, p.allow_tf32, device, launch);
  if (error || p.seq_k == 0) return error;
  return run(instance.keys, args, p.seq_k, p.batch * p.heads_kv, p.allow_tf32, device, launch);
}

}  // namespace flashsdpa
