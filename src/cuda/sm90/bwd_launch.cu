// Host side of the backward kernels: picks the instance, lays out the scratch memory, describes the tensors, launches.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "../common/status.h"
#include "../launchers.h"
#include "bwd_instances.h"
#include "bwd_mask_gradient.h"
#include "short.h"
#include "tensors.h"

namespace flashsdpa {
namespace {

// Q, dO and the sum of dQ of the heads that tiles are dealt out to at a time: that many again are in flight behind them. In a fixed order
// more heads are better, as tiles of one wait for each other; and of long heads, of which few fit (NOTES.md).
constexpr int64_t kMegabyte = 1024 * 1024, kCacheForShort = 8 * kMegabyte, kCacheForQueries = 24 * kMegabyte, kShortHead = 4 * kMegabyte;

const BwdInstance& pick_instance(const Problem& p) {
  const int64_t larger = std::max(p.dim, p.dim_v);
  if (takes_terms(p)) return larger <= 64 ? kBwdTermsD64 : larger <= 128 ? kBwdTermsD128 : kBwdTermsD256;
  if (has_bool_mask(p)) return larger <= 64 ? kBwdBitsD64 : larger <= 128 ? kBwdBitsD128 : kBwdBitsD256;
  if (has_mask(p)) return larger <= 64 ? kBwdMaskedD64 : larger <= 128 ? kBwdMaskedD128 : kBwdMaskedD256;
  if (larger <= 64) return kBwdD64;
  if (larger <= 96) return kBwdD96;
  if (larger <= 128) return kBwdD128;
  if (larger <= 192) return p.dim_v <= 128 ? kBwdD192V128 : kBwdD192;
  return kBwdD256;
}

// What a call in any batch gets the same bits for has a fixed order too.
bool fixed_order(const BackwardParams& b) { return b.deterministic || b.problem.batch_invariant; }

bool wants_inputs(const BackwardParams& b) { return b.dq.data || b.dv.data; }  // dq is null too where dim is 0

struct BwdSizes {
  TensorSizes q, k, v, out;
  explicit BwdSizes(const Problem& p)
      : q{p.batch, p.heads_q, p.seq_q, p.dim},
        k{p.batch, p.heads_kv, p.seq_k, p.dim},
        v{p.batch, p.heads_kv, p.seq_k, p.dim_v},
        out{p.batch, p.heads_q, p.seq_q, p.dim_v} {}
};

bool reads_grad_out_in_place(const BackwardParams& b) {
  return b.grad_out.stride[3] == 1 && reach(b.grad_out.data, b.grad_out.stride, BwdSizes(b.problem).out).tma;
}

// Offsets in bytes, multiples of 256. All of it is linear in the length of the queries, but for what the mask's gradient needs.
struct BwdScratch {
  int64_t counter, stats, dq, turns, grad_out, mask, sinks, bytes;
  int64_t blocks_m, blocks;  // of queries: of a head, of all
  int64_t copy_columns = 0;  // of grad_out; 0: not copied

  BwdScratch(const BackwardParams& b, const BwdInstance& instance, int processors) {
    const Problem& p = b.problem;
    constexpr int64_t kAlign = 256, kWord = 4;
    int64_t end = 0;
    const auto take = [&](int64_t size) {
      const int64_t begin = end;
      end += ceil_div(size, kAlign) * kAlign;
      return begin;
    };
    blocks_m = ceil_div(p.seq_q, instance.block_m);
    blocks = blocks_m * p.batch * p.heads_q;
    if (!reads_grad_out_in_place(b)) copy_columns = ceil_div(p.dim_v, 8) * 8;  // rows of a multiple of 16 bytes
    counter = take(kWord);
    stats = take(blocks * (kBwdStats * instance.block_m + kBwdFlags) * kWord);
    dq = take(wants_inputs(b) ? blocks * instance.block_m * instance.dim * kWord : 0);
    turns = take(fixed_order(b) && wants_inputs(b) ? blocks * instance.adders * kWord : 0);
    grad_out = take(p.batch * p.heads_q * p.seq_q * copy_columns * 2);
    mask = take(b.dmask && p.seq_k > 0 ? bwd_plan_mask(p, processors).scratch_bytes : 0);
    sinks = take(b.dsinks ? blocks * kWord : 0);
    bytes = end;
  }
};

// Of Q, dO and dQ of the query heads that share a head.
int64_t query_bytes(const Problem& p, const BwdInstance& instance) {
  const int64_t group = p.heads_q / p.heads_kv;
  return std::max<int64_t>(1, group * p.seq_q * ((p.dim + p.dim_v) * 2 + instance.dim * 4));
}

FwdOrder make_order(const BackwardParams& b, const BwdInstance& instance) {
  const Problem& p = b.problem;
  const int64_t heads = p.batch * p.heads_kv, bytes_per_head = query_bytes(p, instance);
  const bool equal = p.band.open() && !has_mask(p);  // tiles; of a mask it is only a guess that first keys are seen by more
  FwdOrder order{};
  order.blocks_m = static_cast<uint32_t>(ceil_div(p.seq_k, instance.block_n));
  order.heads = static_cast<uint32_t>(heads);
  order.longest_first = !equal && !fixed_order(b);
  // Equal tiles: a head's together. But in a fixed order of additions they would wait for each other, those of many heads do not.
  const bool together = equal && !fixed_order(b);
  const int64_t cache = !fixed_order(b) && bytes_per_head <= kShortHead ? kCacheForShort : kCacheForQueries;
  order.section = static_cast<uint32_t>(
      together ? 1 : std::min(heads, std::max<int64_t>(1, cache / bytes_per_head)));
  order.tiles = order.blocks_m * order.heads;
  return order;
}

// Values of an additive mask as TMA reaches them: of q's type, with all queries and keys, more than one.
FwdTensor reach_values(const Problem& p) {
  const MaskView& mask = p.mask;
  if (!mask.data || mask.dtype != p.dtype || mask.size[2] == 1 || mask.stride[3] != 1) return {};
  return reach(mask.data, mask.stride, {mask.size[0], mask.size[1], mask.size[2], mask.size[3]});
}

const char* encode_all(const BackwardParams& b, const BwdInstance& instance, BwdArgs* args) {
  const Problem& p = b.problem;
  const BwdSizes size(p);
  args->q = reach(b.q.data, b.q.stride, size.q);
  args->k = reach(b.k.data, b.k.stride, size.k);
  args->v = reach(b.v.data, b.v.stride, size.v);
  args->dk = reach(b.dk.data, b.dk.stride, size.k);
  args->dv = reach(b.dv.data, b.dv.stride, size.v);
  const char* error = encode(args->q, size.q, p.dtype, instance.block_m, &args->map_q);
  if (!error) error = encode(args->grad_out, size.out, p.dtype, instance.block_m, &args->map_grad_out);
  if (!error) error = encode(args->k, size.k, p.dtype, instance.block_n, &args->map_k);
  if (!error) error = encode(args->v, size.v, p.dtype, instance.block_n, &args->map_v);
  args->values = reach_values(p);
  const int64_t(&mask)[4] = p.mask.size;
  if (!error) error = encode(args->values, {mask[0], mask[1], mask[2], mask[3]}, p.dtype, int(kGranule), &args->map_values);
  if (!wants_inputs(b)) return error;
  if (!error) error = encode(args->dk, size.k, p.dtype, instance.block_n, &args->map_dk);
  if (!error) error = encode(args->dv, size.v, p.dtype, instance.block_n, &args->map_dv);
  return error;
}

}  // namespace

int64_t scratch_backward_sm90(const void* params) {
  const BackwardParams& b = *static_cast<const BackwardParams*>(params);
  CurrentDevice device;
  if (find_sm90_device(&device)) device.processors = 0;  // the launch will say why not
  if (is_short(b)) return bwd_short_scratch_bytes(b, device.processors);
  return BwdScratch(b, pick_instance(b.problem), device.processors).bytes;
}

bool backward_needs_plan_sm90(const void* params) { return !is_short(*static_cast<const BackwardParams*>(params)); }

const char* launch_backward_sm90(const void* params, const Launch& launch) {
  const BackwardParams& b = *static_cast<const BackwardParams*>(params);
  const Problem& p = b.problem;
  const bool no_rows = p.batch == 0 || p.heads_q == 0 || p.seq_q == 0;
  if (no_rows || (p.seq_k == 0 && !b.dsinks)) return nullptr;  // no gradient, or only zeros
  CurrentDevice device;
  if (const char* reason = find_sm90_device(&device)) return reason;
  if (const char* reason = refuse_problem(p)) return reason;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  if (is_short(b)) return bwd_launch_short(b, device.number, device.processors, stream);
  if (const char* reason = refuse_without_plan(p)) return reason;
  const BwdInstance& instance = pick_instance(p);
  const BwdScratch scratch(b, instance, device.processors);
  const FwdOrder order = make_order(b, instance);
  if (scratch.blocks > INT32_MAX || ceil_div(p.seq_k, instance.block_n) * p.batch * p.heads_kv > INT32_MAX)
    return "this kernel takes up to 2^31 tiles; split the batch";
  const auto at = [&](int64_t offset) { return static_cast<uint8_t*>(b.scratch) + offset; };
  const auto blocks = static_cast<uint32_t>(scratch.blocks);
  const auto run_blocks = std::min(order.tiles, static_cast<uint32_t>(device.processors));
  const auto heads_q = static_cast<int32_t>(p.heads_q), seq_q = static_cast<int32_t>(p.seq_q);
  const auto blocks_m = static_cast<int32_t>(scratch.blocks_m);

  BwdArgs args{};
  if (scratch.copy_columns > 0) {
    const int64_t row = scratch.copy_columns, stride[4] = {p.heads_q * p.seq_q * row, p.seq_q * row, row, 1};
    args.grad_out = reach(at(scratch.grad_out), stride, BwdSizes(p).out);
  } else {
    args.grad_out = reach(b.grad_out.data, b.grad_out.stride, BwdSizes(p).out);
  }
  const char* error = encode_all(b, instance, &args);
  if (error) return error;
  args.stats = reinterpret_cast<float*>(at(scratch.stats));
  args.dq = reinterpret_cast<float*>(at(scratch.dq));
  args.turns = fixed_order(b) && wants_inputs(b) ? reinterpret_cast<uint32_t*>(at(scratch.turns)) : nullptr;
  args.counter = reinterpret_cast<uint32_t*>(at(scratch.counter));
  args.order = order;
  args.heads_q = heads_q;
  args.heads_kv = static_cast<int32_t>(p.heads_kv);
  args.group = static_cast<int32_t>(p.heads_q / p.heads_kv);
  args.seq_q = seq_q;
  args.seq_k = static_cast<int32_t>(p.seq_k);
  args.blocks_m = blocks_m;
  const bool all_alike = p.band.open() && !fixed_order(b) && query_bytes(p, instance) <= kShortHead;
  args.spread = all_alike ? static_cast<uint32_t>(std::min<int64_t>((scratch.blocks_m << 32) / std::max<int64_t>(p.seq_k, 1), UINT32_MAX)) : 0;
  // A limit beyond the last key for the first query, or before the first key for the last one, may as well be there; the
  // rows that fill the last block up count as queries.
  args.band_lo = static_cast<int32_t>(std::clamp(p.band.lo, -p.seq_q - instance.block_m, p.seq_k));
  args.band_hi = static_cast<int32_t>(std::clamp(p.band.hi, -p.seq_q, p.seq_k));
  args.scale = p.scale == 0 ? 1.f : static_cast<float>(std::fabs(p.scale));
  args.scale_log2 = args.scale * 1.4426950408889634f;
  args.inverse_scale = std::min(1.f / args.scale, FLT_MAX);
  args.sign = p.scale == 0 ? 0.f : p.scale < 0 ? -1.f : 1.f;
  args.grad_scale = static_cast<float>(p.scale);
  if (has_mask(p)) args.mask = make_mask(p);
  args.terms = make_score_terms(p);
  if (!has_terms_in_scores(p)) args.terms.scale = 1.f;
  if (args.mask.values || has_terms_in_scores(p)) {  // which come to scores as they are scaled; terms do it themselves
    args.sign = has_terms_in_scores(p) ? 1.f : args.grad_scale;
    args.scale = args.inverse_scale = 1.f;
    args.scale_log2 = 1.4426950408889634f;
  }

  BwdPreArgs pre{};
  pre.out = static_cast<const uint16_t*>(b.out.data);
  pre.grad_out = static_cast<const uint16_t*>(b.grad_out.data);
  pre.lse = static_cast<const float*>(b.lse);
  pre.grad_lse = static_cast<const float*>(b.grad_lse);
  std::copy_n(b.out.stride, 3, pre.out_stride);
  std::copy_n(b.grad_out.stride, 4, pre.grad_stride);
  pre.q = args.q.data;
  pre.k = args.k.data;
  std::copy_n(b.q.stride, 3, pre.q_stride);
  std::copy_n(b.k.stride, 3, pre.k_stride);
  pre.group = args.group;
  pre.dim = static_cast<int32_t>(p.dim);
  pre.seq_k = args.seq_k;
  pre.band_lo = args.band_lo;
  pre.band_hi = args.band_hi;
  pre.scale = args.sign * args.scale;
  pre.grad_copy = scratch.copy_columns > 0 ? reinterpret_cast<uint16_t*>(at(scratch.grad_out)) : nullptr;
  pre.copy_columns = static_cast<int32_t>(scratch.copy_columns);
  pre.stats = reinterpret_cast<float*>(at(scratch.stats));
  pre.dq = args.dq;
  pre.turns = args.turns;
  pre.counter = args.counter;
  pre.tiles_taken = args.turns ? 0 : run_blocks;
  pre.turns_per_block = instance.adders;
  pre.dq_floats = wants_inputs(b) ? instance.block_m * instance.dim : 0;
  pre.heads_q = heads_q;
  pre.seq_q = seq_q;
  pre.blocks_m = blocks_m;
  pre.block_m = instance.block_m;
  pre.dim_v = static_cast<int32_t>(p.dim_v);
  pre.mask = args.mask;
  pre.terms = args.terms;
  pre.sink_sums = b.dsinks ? reinterpret_cast<float*>(at(scratch.sinks)) : nullptr;
  if ((error = bwd_launch_pre(pre, p.dtype, has_score_terms(p), blocks, stream))) return error;
  if (b.dsinks && (error = bwd_launch_sinks({pre.sink_sums, b.dsinks, p.batch, heads_q, blocks_m}, stream))) return error;
  // Without a key only sinks have a gradient, that of the log-sum-exp; the others are zeros.
  if (b.dmask && p.seq_k == 0) {
    const int64_t* size = p.mask.size;
    const int64_t bytes = size[0] * size[1] * size[2] * size[3] * dtype_size(p.mask.dtype);
    if ((error = error_text(cudaMemsetAsync(b.dmask, 0, static_cast<size_t>(bytes), stream)))) return error;
  } else if (b.dmask) {
    error = bwd_launch_mask(b, bwd_plan_mask(p, device.processors), args, at(scratch.mask), device.number, device.processors, stream);
    if (error) return error;
  }
  if (!wants_inputs(b)) return nullptr;

  const auto run = p.dtype == DType::kBFloat16 ? instance.launch_bfloat16 : instance.launch_float16;
  if (run_blocks > 0 && (error = run(args, run_blocks, device.number, stream))) return error;

  BwdPostArgs post{};
  post.dq_sum = args.dq;
  post.dq = static_cast<uint16_t*>(b.dq.data);
  std::copy_n(b.dq.stride, 3, post.stride);
  post.heads_q = heads_q;
  post.seq_q = seq_q;
  post.blocks_m = blocks_m;
  post.block_m = instance.block_m;
  post.dim = static_cast<int32_t>(p.dim);
  post.dim_class = instance.dim;
  post.scale = args.grad_scale;
  return bwd_launch_post(post, p.dtype, instance.by_keys, run_blocks > 0, blocks, stream);
}

}  // namespace flashsdpa
