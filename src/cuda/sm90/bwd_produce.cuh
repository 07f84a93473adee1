// The warps of the producer warpgroup that load tiles of the backward kernel.
#pragma once

#include "../../ptx/grid.cuh"
#include "bwd_values_load.cuh"
#include "dropout_bits.cuh"

namespace flashsdpa {

// kAlone: all tensors go by TMA, and loader 0 does it alone; else all loaders are here.
template <typename Tile, bool kAlone>
__device__ inline void bwd_load(const BwdArgs& args, const BwdShared<Tile>& shared, int loader) {
  Ring<Tile::kStages> q_ring;
  Ring<Tile::kStagesGradOut> grad_out_ring;
  Ring<kTileSlots> tile_ring;
  std::conditional_t<Tile::kMasked, BwdPlanWalk<Tile>, BwdVisit> at;
  DropoutStreamWriter streams;
  // The kernel before may still run. It writes stats, the copy of grad_out and the counter; q, k and v of the first tile are
  // asked for meanwhile.
  bool waited = false;
  const auto wait_for_pre = [&] {
    if (!waited) ptx::wait_for_grid_before();
    waited = true;
  };
  uint32_t next = blockIdx.x;
  const auto claim = [&] {
    wait_for_pre();
    if (loader == 0) next = atomicAdd(args.counter, 1u);
  };
  if (args.turns) claim();  // in a fixed order tiles are taken in the order of blocks' start, which need not be that of their numbers
  while (true) {
    FwdWork work;
    if (kAlone || loader == 0) {
      ptx::mbarrier_wait(shared.empty_tile(tile_ring.stage()), tile_ring.phase() ^ 1);
      work = bwd_work<Tile>(args, next);
      fwd_put_work<false>(shared.tile(tile_ring.stage()), work);
      if constexpr (!Tile::kMasked) ptx::mbarrier_arrive(shared.full_tile(tile_ring.stage()));
    }
    if constexpr (!kAlone) {
      ptx::barrier_sync(int(FwdBarrier::kProducer), Tile::kLoaders);
      work = fwd_get_work<false>(shared.tile(tile_ring.stage()));
    }
    if constexpr (Tile::kMasked) {
      at.start(args, work);
      if (at.left == 0) work.last = work.first;  // nothing to see; a loader that reads this finds the same
      if (kAlone || loader == 0) {
        fwd_put_work<false>(shared.tile(tile_ring.stage()), work);
        ptx::mbarrier_arrive(shared.full_tile(tile_ring.stage()));
      }
    }
    const auto k_ring = bwd_k_ring<Tile>(tile_ring);
    const auto v_ring = bwd_v_ring(tile_ring);
    tile_ring.advance();
    if (work.end()) break;
    const FwdSlot k_slot{shared.k(k_ring.stage()), shared.full_k(k_ring.stage()), shared.empty_k(k_ring.stage()), k_ring.phase() ^ 1};
    const FwdSlot v_slot{shared.v(), shared.full_v(), shared.empty_v(), v_ring.phase() ^ 1};
    if (work.empty()) {
      const auto pass = [](const FwdSlot& slot) {
        ptx::mbarrier_wait(slot.empty, slot.empty_parity);
        ptx::mbarrier_arrive(slot.full);
      };
      if (kAlone || loader == 0) pass(k_slot), pass(v_slot);
      claim();
      continue;
    }

    if constexpr (!Tile::kMasked) at.start(args, work);
    const auto load_q = [&] {
      const int stage = q_ring.stage();
      const FwdSlot slot{shared.q(stage), shared.full_q(stage), shared.empty_q(stage), q_ring.phase() ^ 1};
      if (kAlone || loader == 0) {  // who completes `full`, so that the slot cannot be filled and emptied meanwhile
        ptx::mbarrier_wait(slot.empty, slot.empty_parity);
        bwd_tell(args, shared, int(q_ring.count % Tile::kVisits), work, at);
        if constexpr (Tile::kTerms) {
          if (args.terms.seed) streams.lay(args.terms, work.batch, at.head, shared.stream(stage));
        }
      }
      uint32_t more_bytes = Tile::kStatsBytes;
      if constexpr (Tile::kValues) more_bytes += bwd_values_bytes(args, work, at);
      load_rows<Tile::kBlockM, Tile::kBoxes, ptx::Reuse::kSoon, kAlone, Tile::kLoaders, /*kWords=*/false>(
          slot, args.q, &args.map_q, at.m * Tile::kBlockM, at.head, work.batch, loader, more_bytes);
      if constexpr (Tile::kValues) {
        if (kAlone || loader == 0) bwd_load_values(args, shared, stage, work, at);
      }
      wait_for_pre();
      if (kAlone || loader == 0) {
        const float* stats = args.stats + bwd_block(args, work, at) * Tile::kStatsFloats;
        ptx::bulk_load(shared.stats(stage), stats, Tile::kStatsBytes, shared.full_q(stage));
      }
      q_ring.advance();
    };
    const auto load_grad_out = [&] {
      const int stage = grad_out_ring.stage();
      const FwdSlot slot{shared.grad_out(stage), shared.full_grad_out(stage), shared.empty_grad_out(stage),
                         grad_out_ring.phase() ^ 1};
      load_rows<Tile::kBlockM, Tile::kBoxesV, ptx::Reuse::kSoon, kAlone, Tile::kLoaders, /*kWords=*/false>(
          slot, args.grad_out, &args.map_grad_out, at.m * Tile::kBlockM, at.head, work.batch, loader);
      grad_out_ring.advance();
    };

    const auto load_k = [&] {
      load_rows<Tile::kBlockN, Tile::kBoxes, ptx::Reuse::kNone, kAlone, Tile::kLoaders, /*kWords=*/false>(
          k_slot, args.k, &args.map_k, work.row, work.head, work.batch, loader);
    };
    // In the order in which consumers wait, but that the first Q does not wait for the memory of K.
    if constexpr (Tile::kKeysAhead) load_k();
    load_q();
    if constexpr (!Tile::kKeysAhead) load_k();
    load_rows<Tile::kBlockN, Tile::kBoxesV, ptx::Reuse::kNone, kAlone, Tile::kLoaders, /*kWords=*/false>(
        v_slot, args.v, &args.map_v, work.row, work.head, work.batch, loader);
    load_grad_out();
    at.advance(args, work);
#pragma unroll 1
    while (at.left > 0) {
      load_q();
      load_grad_out();
      at.advance(args, work);
    }
    claim();
  }
  ptx::launch_dependents();  // not before: blocks of the kernel behind would only hold places of other streams' kernels
}

}  // namespace flashsdpa
