// One head-dim class of the backward kernel, both dtypes: what each bwd_d*.cu instantiates.
#pragma once

#include "bwd_instances.h"
#include "bwd_kernel.cuh"
#include "launch_behind.h"
#include "shared_memory.h"

namespace flashsdpa {

template <DType kType, int kDim, int kDimV, Masks kMasks, bool kTerms>
const char* bwd_launch_instance(const BwdArgs& args, uint32_t blocks, int device, cudaStream_t stream) {
  using Tile = BwdTile<kDim, kDimV, kMasks, kTerms>;
  const auto kernel = flashsdpa_bwd_sm90<kType, kDim, kDimV, kMasks, kTerms>;
  static SharedMemoryGrant grant;
  if (const char* error = grant.ask(kernel, Tile::kSharedBytes, device)) return error;
  return launch_behind(kernel, blocks, Tile::kThreads, Tile::kSharedBytes, stream, args);
}

template <int kDim, int kDimV, Masks kMasks = Masks::kNone, bool kTerms = false>
constexpr BwdInstance bwd_make_instance() {
  using Tile = BwdTile<kDim, kDimV, kMasks, kTerms>;
  return {Tile::kBlockM, Tile::kBlockN, Tile::kStages, Tile::kAdders, kDim, Tile::kByKeys,
          bwd_launch_instance<DType::kBFloat16, kDim, kDimV, kMasks, kTerms>,
          bwd_launch_instance<DType::kFloat16, kDim, kDimV, kMasks, kTerms>};
}

}  // namespace flashsdpa
