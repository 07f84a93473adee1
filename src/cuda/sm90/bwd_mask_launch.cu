// Host side of the mask's gradient: how its work is shared out, its scratch memory, the launch.
#include <algorithm>

#include "../common/status.h"
#include "bwd_instances.h"
#include "bwd_mask_gradient.h"
#include "tensors.h"

namespace flashsdpa {
namespace {

// With fewer tiles than this many for each processor, several parts share the visits of a tile.
constexpr int64_t kUnitsForProcessor = 4;

// The words that start at 0, the counter and the turns, then what other parts have summed.
int64_t words_bytes(const BwdMaskPlan& plan) { return ceil_div((1 + plan.tiles) * 4, 256) * 256; }

}  // namespace

BwdMaskPlan bwd_plan_mask(const Problem& p, int processors) {
  const int64_t larger = std::max(p.dim, p.dim_v), *size = p.mask.size;
  BwdMaskPlan plan{};
  plan.instance = !takes_terms(p) ? (larger <= 64 ? &kBwdMaskD64 : larger <= 128 ? &kBwdMaskD128 : &kBwdMaskD256)
                  : larger <= 64     ? &kBwdMaskTermsD64
                  : larger <= 128    ? &kBwdMaskTermsD128
                                     : &kBwdMaskTermsD256;
  const int64_t blocks_m = ceil_div(p.seq_q, plan.instance->block_m), blocks_n = ceil_div(p.seq_k, plan.instance->block_n);
  plan.tiles_m = size[2] == 1 ? 1 : blocks_m;
  plan.tiles_n = size[3] == 1 ? 1 : blocks_n;
  plan.batches = size[0] == 1 ? p.batch : 1;
  plan.heads = size[1] == 1 ? p.heads_q : 1;
  plan.blocks_m = size[2] == 1 ? blocks_m : 1;
  plan.blocks_n = size[3] == 1 ? blocks_n : 1;
  plan.tiles = size[0] * size[1] * plan.tiles_m * plan.tiles_n;
  const int64_t visits = plan.batches * plan.heads * plan.blocks_m * plan.blocks_n, enough = kUnitsForProcessor * processors;
  const int64_t planned = size[0] == 1 ? plan.tiles : plan.tiles / size[0] * planned_batch(p);
  plan.parts = std::clamp<int64_t>(ceil_div(enough, planned), 1, visits);
  plan.scratch_bytes = words_bytes(plan) + (plan.parts > 1 ? size[0] * size[1] * size[2] * size[3] * 4 : 0);
  return plan;
}

const char* bwd_launch_mask(const BackwardParams& b, const BwdMaskPlan& plan, const BwdArgs& bwd, void* scratch, int device,
                            int processors, cudaStream_t stream) {
  const int64_t units = plan.tiles * plan.parts;
  // A block takes one unit more than there are before it ends.
  if (units > INT32_MAX - processors) return "this kernel takes up to 2^31 tiles of the mask's gradient; split the batch";
  BwdMaskArgs args{};
  args.bwd = bwd;
  args.grad = b.dmask;
  args.counter = static_cast<uint32_t*>(scratch);
  args.turns = args.counter + 1;
  args.sum = reinterpret_cast<float*>(static_cast<uint8_t*>(scratch) + words_bytes(plan));
  args.tiles = static_cast<int32_t>(plan.tiles);
  args.parts = static_cast<int32_t>(plan.parts);
  args.grad_heads = static_cast<int32_t>(b.problem.mask.size[1]);
  args.tiles_m = static_cast<int32_t>(plan.tiles_m);
  args.tiles_n = static_cast<int32_t>(plan.tiles_n);
  args.batches = static_cast<int32_t>(plan.batches);
  args.heads = static_cast<int32_t>(plan.heads);
  args.blocks_m = static_cast<int32_t>(plan.blocks_m);
  args.blocks_n = static_cast<int32_t>(plan.blocks_n);
  const char* error = error_text(cudaMemsetAsync(scratch, 0, words_bytes(plan), stream));
  if (error) return error;
  const auto run = b.problem.dtype == DType::kBFloat16 ? plan.instance->launch_bfloat16 : plan.instance->launch_float16;
  return run(args, static_cast<uint32_t>(std::min<int64_t>(units, processors)), device, stream);
}

}  // namespace flashsdpa
