// What the loader does for the values of an additive mask that TMA reaches: beyond 64 columns they come with Q; and those of the block
// after are asked for into the L2 cache, for each is read once, or by few, from memory.
#pragma once

#include "bwd_blocks.cuh"
#include "fwd_load.cuh"

namespace flashsdpa {

// act(box of a block, where it is in the mask) for those of a block's granules of which values are read.
template <typename Tile, typename Act>
__device__ inline void bwd_for_values(const BwdArgs& args, const FwdWork& work, int head, int m, uint32_t classes, const Act& act) {
  constexpr int kLists = BwdPlanWalk<Tile>::kLists, kRows = BwdPlanWalk<Tile>::kRows;
  if (!args.values.tma) return;
#pragma unroll
  for (int c = 0; c < kLists; ++c) {
    if (GranuleClass(classes >> 2 * c & 3) != kMixed) continue;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      act(c, ptx::BoxOrigin{work.row + c * int(kGranule), m * Tile::kBlockM + r * int(kGranule), head * args.values.map_head,
                            work.batch * args.values.map_batch});
    }
  }
}

// Of one block: how many bytes come with its Q.
template <typename Tile>
__device__ inline uint32_t bwd_values_bytes(const BwdArgs& args, const FwdWork& work, const BwdPlanWalk<Tile>& at) {
  uint32_t bytes = 0;
  if constexpr (Tile::kValuesWithQ) {
    bwd_for_values<Tile>(args, work, at.head, at.m, at.classes, [&](int, const ptx::BoxOrigin&) { bytes += Tile::kValuesBoxBytes; });
  }
  return bytes;
}

// By one thread, which has expected them; `stage` is free.
template <typename Tile>
__device__ inline void bwd_load_values(const BwdArgs& args, const BwdShared<Tile>& shared, int stage, const FwdWork& work,
                                       const BwdPlanWalk<Tile>& at) {
  if constexpr (Tile::kValuesWithQ) {
    // Of a mask that broadcasts, the same are soon read for other heads or batches.
    const bool again = !args.values.map_head || !args.values.map_batch;
    const uint64_t policy = again ? ptx::cache_policy<ptx::Reuse::kSoon>() : ptx::cache_policy<ptx::Reuse::kNone>();
    bwd_for_values<Tile>(args, work, at.head, at.m, at.classes, [&](int box, const ptx::BoxOrigin& origin) {
      ptx::tma_load(shared.values_box(stage, box), &args.map_values, origin, shared.full_q(stage), policy);
    });
  }
  const auto& after = at.after();
  if (after.m >= 0) {
    bwd_for_values<Tile>(args, work, after.head, after.m, after.classes,
                         [&](int, const ptx::BoxOrigin& origin) { ptx::tma_prefetch(&args.map_values, origin); });
  }
}

}  // namespace flashsdpa
