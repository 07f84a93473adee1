// Host side of the mask's gradient: how its work is shared out, its scratch memory, the launch.
#include <algorithm>

#include "../common/status.h"
#include "bwd_instances.h"
#include "bwd_mask_gradient.h"
#include "tensors.h"

namespace flashsdpa {
namespace {

// The words that start at 0, the counter and the turns, then what other parts have summed.
int64_t words_bytes(const BwdMaskPlan& plan) { return ceil_div((1 + plan.tiles) * 4, 256) * 256; }

}  // namespace

BwdMaskPlan bwd_plan_mask(const Problem& p, int processors) {
  const int64_t larger = std::max(p.dim, p.dim_v);
  const BwdMaskInstance* instance = !takes_terms(p) ? (larger <= 64 ? &kBwdMaskD64 : larger <= 128 ? &kBwdMaskD128 : &kBwdMaskD256)
                                    : larger <= 64    ? &kBwdMaskTermsD64
                                    : larger <= 128   ? &kBwdMaskTermsD128
                                                      : &kBwdMaskTermsD256;
  BwdMaskPlan plan{BwdMaskShare(p, instance->block_m, instance->block_n, processors), instance, 0};
  plan.scratch_bytes = words_bytes(plan) + (plan.parts > 1 ? mask_elements(p.mask) * 4 : 0);
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
  plan.tell(b.problem, &args);
  const char* error = error_text(cudaMemsetAsync(scratch, 0, words_bytes(plan), stream));
  if (error) return error;
  const auto run = b.problem.dtype == DType::kBFloat16 ? plan.instance->launch_bfloat16 : plan.instance->launch_float16;
  return run(args, static_cast<uint32_t>(std::min<int64_t>(units, processors)), device, stream);
}

}  // namespace flashsdpa
