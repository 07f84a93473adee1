// Forward attention on Hopper: out = softmax(q k^T * scale) v and its log-sum-exp, for bfloat16 and float16.
//
//   warpgroup 0         producer: keeps the stages of K and V, and Q of the next tile, filled; with a mask another of its warps
//                       walks the plan (fwd_walk.cuh)
//   warpgroups 1..      consumers, 64 queries each: S = Q K^T (shared x shared), softmax, O += P V (registers x shared)
//
// Two things hide the softmax behind the tensor cores (NOTES.md has the picture and the numbers). Within a consumer, S
// of the next key block is under way with P V of the last one. Between consumers, named barriers let one issue its
// products at a time, so that the softmax of one runs under the products of another.
#pragma once

#include "fwd_consume.cuh"
#include "fwd_produce.cuh"

namespace flashsdpa {

template <DType kType, int kDim, int kDimV, int kConsumers, bool kFew, Masks kMasks, bool kTerms>
__global__ void __launch_bounds__((FwdTile<kDim, kDimV, kConsumers, kFew, kMasks, kTerms>::kThreads), 1)
    flashsdpa_fwd_sm90(const __grid_constant__ FwdArgs args) {
  using Tile = FwdTile<kDim, kDimV, kConsumers, kFew, kMasks, kTerms>;
  extern __shared__ uint8_t memory[];
  const FwdShared<Tile> shared{(ptx::shared_address(memory) + 1023) & ~1023u};
  // The same for all threads of a warp, and told so to the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ptx::kWarpgroupThreads, 0);
  const int thread = threadIdx.x % ptx::kWarpgroupThreads;
  fwd_poison<Tile::kSharedBytes>(ptx::shared_address(memory));
  if (threadIdx.x == 0) fwd_init_barriers(shared);
  __syncthreads();

  if (warpgroup == 0) {
    if constexpr (Tile::kHandOver) ptx::registers_give<Tile::kProducerRegisters>();
    if (!(args.q.tma && args.k.tma && args.v.tma)) {
      fwd_produce<Tile, false>(args, shared, thread);
    } else if (thread == 0) {
      fwd_produce<Tile, true>(args, shared, thread);
    } else if constexpr (Tile::kMasked) {
      if (thread == ptx::kWarpLanes) fwd_walk<Tile>(args, shared);
    }
  } else {
    if constexpr (Tile::kHandOver) ptx::registers_take<Tile::kConsumerRegisters>();
    fwd_consume<Tile, kType == DType::kBFloat16>(args, shared, warpgroup - 1, thread);
  }
}

}  // namespace flashsdpa
