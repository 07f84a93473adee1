// The gradient of an additive mask on Hopper: dS = P (dP - delta), summed over the axes in which the mask has size 1, for
// bfloat16 and float16. A pass of its own behind flashsdpa_bwd_pre_sm90, whose stats it reads: S and dP once more, so that
// every sum has one owner, one order, and no addition in global memory.
//
//   warpgroup 0         producer: one warp or two (bwd_mask_produce.cuh)
//   warpgroups 1, 2     consumers of 64 queries each (bwd_mask_consume.cuh)
//
// What the units of work are, says bwd_mask_gradient.h; NOTES_MASKS.md has the reasons.
#pragma once

#include "bwd_mask_consume.cuh"
#include "bwd_mask_produce.cuh"
#include "shared_memory.h"

namespace flashsdpa {

template <DType kType, int kDim, int kDimV, bool kTerms>
__global__ void __launch_bounds__((BwdMaskTile<kDim, kDimV, kTerms>::kThreads), 1)
    flashsdpa_bwd_mask_sm90(const __grid_constant__ BwdMaskArgs args) {
  using Tile = BwdMaskTile<kDim, kDimV, kTerms>;
  extern __shared__ uint8_t memory[];
  const BwdMaskShared<Tile> shared{(ptx::shared_address(memory) + 1023) & ~1023u};
  const int warp = int(__shfl_sync(0xffffffffu, threadIdx.x / ptx::kWarpLanes, 0));
  fwd_poison<Tile::kSharedBytes>(ptx::shared_address(memory));
  if (threadIdx.x == 0) bwd_mask_init_barriers(shared);
  __syncthreads();

  if (warp < kWarpsPerGroup) {
    ptx::registers_give<Tile::kProducerRegisters>();
    const int loader = int(threadIdx.x) - (ptx::kWarpgroupThreads - Tile::kLoaders);
    const BwdArgs& bwd = args.bwd;
    if (loader >= 0 && !(bwd.q.tma && bwd.k.tma && bwd.v.tma && bwd.grad_out.tma)) {
      bwd_mask_load<Tile, false>(args, shared, loader);
    } else if (loader == 0) {
      bwd_mask_load<Tile, true>(args, shared, loader);
    }
  } else {
    ptx::registers_take<Tile::kConsumerRegisters>();
    bwd_mask_consume<Tile, kType == DType::kBFloat16>(args, shared);
  }
}

template <DType kType, int kDim, int kDimV, bool kTerms>
const char* bwd_launch_mask_instance(const BwdMaskArgs& args, uint32_t blocks, int device, cudaStream_t stream) {
  using Tile = BwdMaskTile<kDim, kDimV, kTerms>;
  const auto kernel = flashsdpa_bwd_mask_sm90<kType, kDim, kDimV, kTerms>;
  static SharedMemoryGrant grant;
  if (const char* error = grant.ask(kernel, Tile::kSharedBytes, device)) return error;
  kernel<<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

template <int kDim, int kDimV, bool kTerms = false>
constexpr BwdMaskInstance bwd_make_mask_instance() {
  using Tile = BwdMaskTile<kDim, kDimV, kTerms>;
  return {Tile::kBlockM, Tile::kBlockN, bwd_launch_mask_instance<DType::kBFloat16, kDim, kDimV, kTerms>,
          bwd_launch_mask_instance<DType::kFloat16, kDim, kDimV, kTerms>};
}

}  // namespace flashsdpa
