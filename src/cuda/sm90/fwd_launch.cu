// Host side of the forward kernel: picks the instance, describes the tensors, orders the tiles, launches.
#include <algorithm>
#include <cmath>

#include "../common/status.h"
#include "../launchers.h"
#include "fwd_instances.h"
#include "tensors.h"

namespace flashsdpa {
namespace {

constexpr int64_t kCacheForKeys = 24 * 1024 * 1024;   // K and V of the heads in flight stay in half of the L2 cache
constexpr int kConsumerRowsOfBox = 64;

const FwdInstance& pick_instance(const Problem& p) {
  constexpr int64_t kShort = 1536;  // measured at 1024 and 4096
  const int64_t larger = std::max(p.dim, p.dim_v);
  if (larger <= 64) return p.seq_k < kShort ? kFwdD64Short : kFwdD64;
  if (larger <= 96) return kFwdD96;
  if (larger <= 128) return kFwdD128;
  if (larger <= 192) return p.dim_v <= 128 ? kFwdD192V128 : kFwdD192;
  return kFwdD256;
}

struct FwdSizes {
  TensorSizes q, k, v, out;
  explicit FwdSizes(const Problem& p)
      : q{p.batch, p.heads_q, p.seq_q, p.dim},
        k{p.batch, p.heads_kv, p.seq_k, p.dim},
        v{p.batch, p.heads_kv, p.seq_k, p.dim_v},
        out{p.batch, p.heads_q, p.seq_q, p.dim_v} {}
};

void reach_all(const ForwardParams& f, const FwdSizes& size, FwdArgs* args) {
  args->q = reach(f.q.data, f.q.stride, size.q);
  args->k = reach(f.k.data, f.k.stride, size.k);
  args->v = reach(f.v.data, f.v.stride, size.v);
  args->out = reach(f.out.data, f.out.stride, size.out);
}

// Section: as many heads as fit the cache with their K and V. Without a band every tile costs the same, and one group
// of heads at a time is best for the cache.
FwdOrder make_order(const Problem& p, int block_m) {
  const int64_t heads = p.batch * p.heads_q, group = p.heads_q / p.heads_kv;
  const int64_t bytes_per_head = std::max<int64_t>(1, p.seq_k * (p.dim + p.dim_v) * 2);
  const int64_t section = std::max<int64_t>(1, kCacheForKeys / bytes_per_head) * group;
  FwdOrder order{};
  order.blocks_m = static_cast<uint32_t>(ceil_div(p.seq_q, block_m));
  order.heads = static_cast<uint32_t>(heads);
  order.longest_first = !p.band.open();
  order.section = static_cast<uint32_t>(std::min(heads, p.band.open() ? group : section));
  order.tiles = order.blocks_m * order.heads;
  return order;
}

enum class Deal { kOnce, kStatic, kDynamic };  // one tile a block; tiles dealt out in turn; as blocks get free

Deal pick_deal(const ForwardParams& f) {
  if (f.counter) return Deal::kDynamic;
  return f.problem.band.open() ? Deal::kStatic : Deal::kOnce;  // unequal tiles dealt out in turn would end unevenly
}

}  // namespace

const char* launch_forward_sm90(const void* params, const Launch& launch) {
  const ForwardParams& f = *static_cast<const ForwardParams*>(params);
  const Problem& p = f.problem;
  if (p.batch == 0 || p.heads_q == 0 || p.seq_q == 0 || p.dim_v == 0) return nullptr;
  CurrentDevice device;
  if (const char* reason = find_sm90_device(&device)) return reason;
  if (const char* reason = refuse_problem(p)) return reason;
  const FwdInstance& instance = pick_instance(p);

  FwdArgs args{};
  const FwdSizes size(p);
  reach_all(f, size, &args);
  const char* error = encode(args.q, size.q, p.dtype, kConsumerRowsOfBox, &args.map_q);
  if (!error) error = encode(args.k, size.k, p.dtype, instance.block_n, &args.map_k);
  if (!error) error = encode(args.v, size.v, p.dtype, instance.block_n, &args.map_v);
  if (!error) error = encode(args.out, size.out, p.dtype, kConsumerRowsOfBox, &args.map_out);
  if (error) return error;

  const int64_t tiles = ceil_div(p.seq_q, instance.block_m) * p.batch * p.heads_q;
  if (tiles > INT32_MAX) return "this kernel takes up to 2^31 tiles of queries; split the batch";
  args.lse = static_cast<float*>(f.lse);
  args.order = make_order(p, instance.block_m);
  args.heads_q = static_cast<int32_t>(p.heads_q);
  args.group = static_cast<int32_t>(p.heads_q / p.heads_kv);
  args.seq_q = static_cast<int32_t>(p.seq_q);
  args.seq_k = static_cast<int32_t>(p.seq_k);
  // A limit beyond the last key for the first query, or before the first key for the last one, may as well be there.
  args.band_lo = static_cast<int32_t>(std::clamp(p.band.lo, -p.seq_q, p.seq_k));
  args.band_hi = static_cast<int32_t>(std::clamp(p.band.hi, -p.seq_q, p.seq_k));
  args.scale = p.scale == 0 ? 1.f : static_cast<float>(std::fabs(p.scale));
  args.sign = p.scale == 0 ? 0.f : p.scale < 0 ? -1.f : 1.f;

  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const Deal deal = args.order.tiles <= static_cast<uint32_t>(device.processors) ? Deal::kOnce : pick_deal(f);
  if (deal == Deal::kDynamic) {
    args.counter = reinterpret_cast<uint32_t*>(f.counter);
    if ((error = error_text(cudaMemsetAsync(args.counter, 0, sizeof *args.counter, stream)))) return error;
  }
  const uint32_t blocks = deal == Deal::kOnce ? args.order.tiles : static_cast<uint32_t>(device.processors);
  const auto run = p.dtype == DType::kBFloat16 ? instance.launch_bfloat16 : instance.launch_float16;
  return run(args, blocks, device.number, stream);
}

void describe_forward_sm90(const void* params, KernelDetail* detail) {
  const ForwardParams& f = *static_cast<const ForwardParams*>(params);
  const FwdInstance& instance = pick_instance(f.problem);
  FwdArgs args{};
  reach_all(f, FwdSizes(f.problem), &args);
  *detail = {instance.block_m, instance.block_n, instance.stages,
             f.problem.band.open() ? "a head's tiles together, taken as blocks get free"
                                   : "longest tiles first, taken as blocks get free",
             {args.q.tma, args.k.tma, args.v.tma, args.out.tma}};
}

}  // namespace flashsdpa
