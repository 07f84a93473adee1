// One head-dim class of the forward kernel, both dtypes: what each fwd_d*.cu instantiates.
#pragma once

#include "fwd_instances.h"
#include "fwd_kernel.cuh"
#include "shared_memory.h"

namespace flashsdpa {

template <DType kType, int kDim, int kDimV, int kConsumers, bool kFew, Masks kMasks, bool kTerms = false>
const char* fwd_launch_instance(const FwdArgs& args, uint32_t blocks, int device, cudaStream_t stream) {
  using Tile = FwdTile<kDim, kDimV, kConsumers, kFew, kMasks, kTerms>;
  const auto kernel = flashsdpa_fwd_sm90<kType, kDim, kDimV, kConsumers, kFew, kMasks, kTerms>;
  static SharedMemoryGrant grant;
  if (const char* error = grant.ask(kernel, Tile::kSharedBytes, device)) return error;
  kernel<<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

template <int kDim, int kDimV, int kConsumers, bool kFew = false, Masks kMasks = Masks::kNone,
          bool kTerms = false>
constexpr FwdInstance fwd_make_instance() {
  using Tile = FwdTile<kDim, kDimV, kConsumers, kFew, kMasks, kTerms>;
  return {kFew, Tile::kConsumers, Tile::kBlockN, Tile::kStages, kDim, kDimV,
          fwd_launch_instance<DType::kBFloat16, kDim, kDimV, kConsumers, kFew, kMasks, kTerms>,
          fwd_launch_instance<DType::kFloat16, kDim, kDimV, kConsumers, kFew, kMasks, kTerms>};
}

}  // namespace flashsdpa
