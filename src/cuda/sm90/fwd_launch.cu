// Host side of the forward kernel: describes the tensors, orders the tiles of the plan (fwd_plan.h), launches.
#include <algorithm>
#include <cmath>

#include "../launchers.h"
#include "fwd_plan.h"
#include "short.h"
#include "tensors.h"

namespace flashsdpa {
namespace {

constexpr int64_t kCacheForKeys = 24 * 1024 * 1024;   // K and V of the heads in flight stay in half of the L2 cache
constexpr int kUsualProcessors = 132;                 // of an H100 or H200, where there is none to ask

// The same for q and out, whose map for few queries has an axis of heads in a group and one of groups.
FwdTensor reach_rows(const void* data, const int64_t (&stride)[4], const TensorSizes& size, const FwdPlan& plan) {
  FwdTensor tensor = reach(data, stride, size);
  if (plan.instance->few && size.heads > 1 && !tensor.map_head) tensor.tma = false;
  return tensor;
}

// The tensor map of q or out, that of few queries with the axis of groups.
const char* encode_rows(const FwdTensor& tensor, const TensorSizes& size, DType dtype, const FwdPlan& plan, CUtensorMap* map) {
  const auto box_rows = static_cast<int>(plan.queries);
  if (!plan.instance->few) return encode(tensor, size, dtype, box_rows, map);
  if (!tensor.tma || size.rows == 0) return nullptr;
  const ptx::PackedMapShape shape{map_shape(tensor, size, box_rows), static_cast<uint64_t>(plan.group),
                                  static_cast<uint32_t>(plan.pack)};
  return ptx::encode_tensor_map(map, map_type(dtype), shape) ? nullptr : kMapRefused;
}

struct FwdSizes {
  TensorSizes q, k, v, out;
  explicit FwdSizes(const Problem& p)
      : q{p.batch, p.heads_q, p.seq_q, p.dim},
        k{p.batch, p.heads_kv, p.seq_k, p.dim},
        v{p.batch, p.heads_kv, p.seq_k, p.dim_v},
        out{p.batch, p.heads_q, p.seq_q, p.dim_v} {}
};

void reach_all(const ForwardParams& f, const FwdSizes& size, const FwdPlan& plan, FwdArgs* args) {
  args->q = reach_rows(f.q.data, f.q.stride, size.q, plan);
  args->k = reach(f.k.data, f.k.stride, size.k);
  args->v = reach(f.v.data, f.v.stride, size.v);
  args->out = reach_rows(f.out.data, f.out.stride, size.out, plan);
}

// Section: as many heads as fit the cache with their K and V. Where every tile costs the same, one group of heads at a time is
// best for the cache. Of a mask it is only a guess that later queries see more keys.
FwdOrder make_order(const Problem& p, const FwdPlan& plan) {
  const int64_t heads = p.batch * p.heads_kv * plan.packs, group = plan.packs;
  const int64_t bytes_per_head = std::max<int64_t>(1, p.seq_k * (p.dim + p.dim_v) * 2);
  const int64_t section = std::max<int64_t>(1, kCacheForKeys / bytes_per_head) * group;
  FwdOrder order{};
  order.blocks_m = static_cast<uint32_t>(plan.blocks_m);
  order.heads = static_cast<uint32_t>(heads);
  order.longest_first = !p.band.open();  // of a mask nothing is known here: last rows first, in sections
  order.section = static_cast<uint32_t>(std::min(heads, fwd_equal_tiles(p) ? group : section));
  order.tiles = static_cast<uint32_t>(plan.tiles * plan.splits);
  return order;
}

// Whole sections alone: a small last one would end with its longest tiles, which all begin at once.
uint32_t mask_sections(const FwdOrder& order) {
  return order.longest_first ? UINT32_MAX : std::max<uint32_t>(1, order.heads / std::max<uint32_t>(1, order.section));
}

int64_t row_floats(const Problem& p) { return ceil_div(p.dim_v, 4) * 4; }

FwdPartial make_partial(const Problem& p, const FwdPlan& plan, void* scratch) {
  FwdPartial partial{};
  partial.rows = static_cast<int32_t>(p.batch * p.heads_q * p.seq_q);
  partial.row_floats = static_cast<int32_t>(row_floats(p));
  partial.out = static_cast<float*>(scratch);
  partial.weight = partial.out + int64_t{plan.splits} * partial.rows * partial.row_floats;
  return partial;
}

enum class Deal { kOnce, kStatic, kDynamic };  // one tile a block; tiles dealt out in turn; as blocks get free

Deal pick_deal(const ForwardParams& f) {
  if (f.counter) return Deal::kDynamic;
  return fwd_equal_tiles(f.problem) ? Deal::kStatic : Deal::kOnce;  // unequal tiles dealt out in turn would end unevenly
}

bool nothing_to_do(const Problem& p) { return p.batch == 0 || p.heads_q == 0 || p.seq_q == 0 || p.dim_v == 0; }

}  // namespace

int64_t fwd_partial_bytes(const Problem& p, const FwdPlan& plan) {
  if (plan.splits == 1) return 0;
  constexpr int64_t kWeightFloats = 2;
  return plan.splits * p.batch * p.heads_q * p.seq_q * (row_floats(p) + kWeightFloats) * int64_t{sizeof(float)};
}

const char* fwd_launch(const ForwardParams& f, const FwdPlan& plan, const CurrentDevice& device, cudaStream_t stream) {
  const Problem& p = f.problem;
  const FwdInstance& instance = *plan.instance;
  FwdArgs args{};
  const FwdSizes size(p);
  reach_all(f, size, plan, &args);
  const char* error = encode_rows(args.q, size.q, p.dtype, plan, &args.map_q);
  if (!error) error = encode(args.k, size.k, p.dtype, instance.block_n, &args.map_k);
  if (!error) error = encode(args.v, size.v, p.dtype, instance.block_n, &args.map_v);
  if (!error) error = encode_rows(args.out, size.out, p.dtype, plan, &args.map_out);
  if (error) return error;

  if (plan.tiles > INT32_MAX) return "flashsdpa_fwd_sm90 takes up to 2^31 tiles of queries; split the batch";
  args.lse = static_cast<float*>(f.lse);
  args.order = make_order(p, plan);
  args.heads_q = static_cast<int32_t>(p.heads_kv * plan.packs);
  args.group = static_cast<int32_t>(plan.packs);
  args.seq_q = static_cast<int32_t>(p.seq_q);
  args.seq_k = static_cast<int32_t>(p.seq_k);
  // A limit beyond the last key for the first query, or before the first key for the last one, may as well be there.
  args.band_lo = static_cast<int32_t>(std::clamp(p.band.lo, -p.seq_q, p.seq_k));
  args.band_hi = static_cast<int32_t>(std::clamp(p.band.hi, -p.seq_q, p.seq_k));
  args.scale = p.scale == 0 ? 1.f : static_cast<float>(std::fabs(p.scale));
  args.sign = p.scale == 0 ? 0.f : p.scale < 0 ? -1.f : 1.f;
  if (has_mask(p)) {
    args.mask = make_mask(p);
    args.mask_sections = mask_sections(args.order);
    if (args.mask.values && p.mask.size[0] == 1) args.batches = static_cast<uint32_t>(p.batch);
  }
  if (args.mask.values) args.scale = 1.f, args.sign = static_cast<float>(p.scale);
  if (has_score_terms(p)) {
    args.terms = make_score_terms(p);
    args.mask_sections = mask_sections(args.order);
    if (changes_scores(p)) args.scale = args.sign = 1.f;
  }
  args.few.heads_q = static_cast<int32_t>(p.heads_q);
  args.few.group = static_cast<int32_t>(plan.group);
  args.few.pack = static_cast<int32_t>(plan.pack);
  args.few.queries = static_cast<int32_t>(plan.queries);
  args.few.splits = plan.splits;
  if (plan.splits > 1) args.few.partial = make_partial(p, plan, f.scratch);

  const Deal deal = args.order.tiles <= static_cast<uint32_t>(device.processors) ? Deal::kOnce : pick_deal(f);
  if (deal == Deal::kDynamic) {
    args.counter = reinterpret_cast<uint32_t*>(f.counter);
    if ((error = error_text(cudaMemsetAsync(args.counter, 0, sizeof *args.counter, stream)))) return error;
  }
  const uint32_t blocks = deal == Deal::kOnce ? args.order.tiles : static_cast<uint32_t>(device.processors);
  const auto run = p.dtype == DType::kBFloat16 ? instance.launch_bfloat16 : instance.launch_float16;
  error = run(args, blocks, device.number, stream);
  return error || plan.splits == 1 ? error : fwd_combine(args, p.dtype, stream);
}

const char* launch_forward_sm90(const void* params, const Launch& launch) {
  const ForwardParams& f = *static_cast<const ForwardParams*>(params);
  const Problem& p = f.problem;
  if (nothing_to_do(p)) return nullptr;
  CurrentDevice device;
  if (const char* reason = find_sm90_device(&device)) return reason;
  if (const char* reason = refuse_problem(p)) return reason;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  if (is_short(p)) return fwd_launch_short(f, stream);
  if (const char* reason = refuse_without_plan(p)) return reason;
  const FwdPlan plan = fwd_plan(p, device.processors, f.scratch != nullptr);
  return fwd_launch(f, plan, device, stream);
}

int64_t forward_scratch_sm90(const void* params) {
  const Problem& p = static_cast<const ForwardParams*>(params)->problem;
  CurrentDevice device;
  if (nothing_to_do(p) || is_short(p) || refuse_problem(p) || find_sm90_device(&device)) return 0;
  return fwd_partial_bytes(p, fwd_plan(p, device.processors, /*may_split=*/true));
}

bool forward_needs_plan_sm90(const void* params) { return !is_short(static_cast<const ForwardParams*>(params)->problem); }

void describe_forward_sm90(const void* params, KernelDetail* detail) {
  const ForwardParams& f = *static_cast<const ForwardParams*>(params);
  if (is_short(f.problem)) {
    *detail = {kShortRows, kShortRows, 0, "a head of a sequence in each block", /*uses_tma=*/false, {}, 1, 1,
               "flashsdpa_fwd_short_sm90",
               "mma.sync, four warps of 16 queries each, all keys at once, several blocks a processor"};
    return;
  }
  CurrentDevice device;
  const int processors = find_sm90_device(&device) ? kUsualProcessors : device.processors;
  const FwdPlan plan = fwd_plan(f.problem, processors, /*may_split=*/true);
  FwdArgs args{};
  reach_all(f, FwdSizes(f.problem), plan, &args);
  const char* schedule = fwd_equal_tiles(f.problem)  ? "a head's tiles together, taken as blocks get free"
                         : !f.problem.band.open() ? "longest tiles first, taken as blocks get free"
                                                  : "some heads' tiles together, last rows first, taken as blocks get free";
  *detail = {static_cast<int32_t>(plan.instance->consumers * plan.queries),
             plan.instance->block_n,
             plan.instance->stages,
             schedule,
             /*uses_tma=*/true,
             {args.q.tma, args.k.tma, args.v.tma, args.out.tma},
             plan.splits,
             static_cast<int32_t>(plan.pack)};
}

}  // namespace flashsdpa
