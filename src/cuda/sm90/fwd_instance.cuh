// One head-dim class of the forward kernel, both dtypes: what each fwd_d*.cu instantiates.
#pragma once

#include "../common/status.h"
#include "fwd_instances.h"
#include "fwd_kernel.cuh"

namespace flashsdpa {

template <DType kType, int kDim, int kDimV, int kConsumers, bool kFew, bool kMasked>
const char* fwd_launch_instance(const FwdArgs& args, uint32_t blocks, int device, cudaStream_t stream) {
  using Tile = FwdTile<kDim, kDimV, kConsumers, kFew, kMasked>;
  const auto kernel = flashsdpa_fwd_sm90<kType, kDim, kDimV, kConsumers, kFew, kMasked>;
  static std::atomic<uint64_t> allowed{0};  // bit per device on which the kernel may take its shared memory
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (!(allowed.load(std::memory_order_relaxed) & bit)) {
    const char* error = error_text(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes));
    if (error) return error;
    allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  kernel<<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

template <int kDim, int kDimV, int kConsumers, bool kFew = false, bool kMasked = false>
constexpr FwdInstance fwd_make_instance() {
  using Tile = FwdTile<kDim, kDimV, kConsumers, kFew, kMasked>;
  return {kFew, Tile::kConsumers, Tile::kBlockN, Tile::kStages, kDim, kDimV,
          fwd_launch_instance<DType::kBFloat16, kDim, kDimV, kConsumers, kFew, kMasked>,
          fwd_launch_instance<DType::kFloat16, kDim, kDimV, kConsumers, kFew, kMasked>};
}

}  // namespace flashsdpa
