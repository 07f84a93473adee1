// Host side of the mask's gradient in float32, and the kernel that adds up its parts.
#include <algorithm>

#include "bwd_mask_share.h"
#include "f32_mask_gradient.h"

namespace flashsdpa {
namespace {

constexpr int kThreads = 256;

const F32MaskInstance& instance_for(const Problem& p) {
  const int64_t dim = std::max(p.dim, p.dim_v);
  return dim <= 64 ? kF32MaskD64 : dim <= 128 ? kF32MaskD128 : kF32MaskD256;
}
BwdMaskShare share_for(Problem p, int processors) {
  p.batch_invariant = false;  // of this gradient it is not promised, and parts for one sequence are copies for all
  return {p, instance_for(p).block_m, instance_for(p).block_n, processors};
}

}  // namespace

__global__ void __launch_bounds__(kThreads)
    flashsdpa_bwd_mask_parts_f32_sm90(const float* sums, float* grad, int64_t elements, int parts) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= elements) return;
  float sum = 0.f;
  for (int part = 0; part < parts; ++part) sum += sums[part * elements + at];
  grad[at] = sum;
}

int64_t f32_mask_scratch(const BackwardParams& b, int processors) {
  const Problem& p = b.problem;
  if (!b.dmask || p.seq_q == 0 || p.seq_k == 0 || p.batch == 0 || p.heads_q == 0) return 0;
  const int64_t parts = share_for(p, processors).parts;
  return parts > 1 ? parts * mask_elements(p.mask) : 0;
}

const char* f32_run_mask(const BackwardParams& b, const F32Args& bwd, float* scratch, const CurrentDevice& device,
                         cudaStream_t stream) {
  const Problem& p = b.problem;
  const int64_t elements = mask_elements(p.mask);
  if (p.seq_k == 0)
    return error_text(cudaMemsetAsync(b.dmask, 0, static_cast<size_t>(elements) * sizeof(float), stream));
  const BwdMaskShare share = share_for(p, device.processors);
  if (share.tiles * share.parts > INT32_MAX)
    return "this kernel takes up to 2^31 tiles of the mask's gradient; split the batch";
  F32MaskArgs args{};
  args.bwd = bwd;
  args.grad = static_cast<float*>(b.dmask);
  args.sums = scratch;
  args.elements = elements;
  share.tell(p, &args);
  const F32MaskInstance& instance = instance_for(p);
  const auto units = static_cast<uint32_t>(share.tiles * share.parts);
  const char* error = (p.allow_tf32 ? instance.tf32 : instance.exact)(args, units, device.number, stream);
  if (error || share.parts == 1) return error;
  const auto blocks = static_cast<uint32_t>(ceil_div(elements, kThreads));  // a gradient of few tiles
  flashsdpa_bwd_mask_parts_f32_sm90<<<blocks, kThreads, 0, stream>>>(scratch, args.grad, elements, args.parts);
  return error_text(cudaGetLastError());
}

}  // namespace flashsdpa
