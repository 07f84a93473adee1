// Backward attention on Hopper: dq, dk and dv from q, k, v, grad_out and the log-sum-exp, for bfloat16 and float16.
//
//   warpgroup 0         producer: one warp or two keep the stages of Q and dO, and K and V of the tile, filled; others see to
//                       dQ (bwd_turns.cuh)
//   warpgroups 1..      consumers: bwd_by_keys.cuh up to 128 columns, bwd_by_columns.cuh beyond
//
// A tile is kBlockN keys of one head of k and v, against all query blocks that see one of them, of all query heads that
// share the head. dK and dV of a tile stay in registers; dQ, to which many tiles add, is a sum of floats in scratch
// memory, zeroed by the kernel before and rounded by the kernel after (bwd_rows.cu). NOTES.md has the picture.
#pragma once

#include "../../params.h"
#include "bwd_by_columns.cuh"
#include "bwd_by_keys.cuh"
#include "bwd_produce.cuh"
#include "bwd_turns.cuh"

namespace flashsdpa {

template <DType kType, int kDim, int kDimV, Masks kMasks, bool kTerms>
__global__ void __launch_bounds__((BwdTile<kDim, kDimV, kMasks, kTerms>::kThreads), 1)
    flashsdpa_bwd_sm90(const __grid_constant__ BwdArgs args) {
  using Tile = BwdTile<kDim, kDimV, kMasks, kTerms>;
  constexpr bool kBFloat16 = kType == DType::kBFloat16;
  extern __shared__ uint8_t memory[];
  const BwdShared<Tile> shared{(ptx::shared_address(memory) + 1023) & ~1023u};
  // The same for all threads of a warp, and told so to the compiler; anew in each branch, as kept across them it spills.
  const auto warp = [] { return int(__shfl_sync(0xffffffffu, threadIdx.x / ptx::kWarpLanes, 0)); };
  const int thread = threadIdx.x % ptx::kWarpgroupThreads;
  fwd_poison<Tile::kSharedBytes>(ptx::shared_address(memory));
  if (threadIdx.x == 0) bwd_init_barriers(shared);
  __syncthreads();

  if (warp() < kWarpsPerGroup) {
    ptx::registers_give<Tile::kProducerRegisters>();
    const int loader = thread - (ptx::kWarpgroupThreads - Tile::kLoaders);
    if (loader < 0) {
      if constexpr (Tile::kStaged) {
        if (const int adder = warp(); adder < Tile::kAdders) bwd_add_pieces(args, shared, adder, thread % ptx::kWarpLanes);
      } else if (warp() == 0) {
        bwd_keep_turns(args, shared, thread % ptx::kWarpLanes);
      }
    } else if (!(args.q.tma && args.k.tma && args.v.tma)) {
      bwd_load<Tile, false>(args, shared, loader);
    } else if (loader == 0) {
      bwd_load<Tile, true>(args, shared, loader);
    }
  } else {
    ptx::registers_take<Tile::kConsumerRegisters>();
    const int consumer = warp() / kWarpsPerGroup - 1;
    if constexpr (!Tile::kByKeys) {
      bwd_consume_by_columns<Tile, kBFloat16>(args, shared, consumer, thread);
    } else if constexpr (kDim == 96) {
      // Its second box is half used, and a width is known at compile time.
      if (consumer == 0) {
        bwd_consume_by_keys<Tile, kBFloat16, kBwdPiece>(args, shared, consumer * kConsumerRows, thread);
      } else {
        bwd_consume_by_keys<Tile, kBFloat16, kBwdPiece / 2>(args, shared, consumer * kConsumerRows, thread);
      }
    } else {
      bwd_consume_by_keys<Tile, kBFloat16, kBwdPiece>(args, shared, consumer * kConsumerRows, thread);
    }
  }
}

}  // namespace flashsdpa
