// What the producer warpgroup of the backward kernel does: one warp or two load tiles, one for each consumer adds that
// consumer's pieces of dQ to those of the other blocks.
#pragma once

#include "bwd_blocks.cuh"
#include "fwd_load.cuh"

namespace flashsdpa {

// kAlone: all tensors go by TMA, and loader 0 does it alone; else all loaders are here.
template <typename Tile, bool kAlone>
__device__ inline void bwd_load(const BwdArgs& args, const BwdShared<Tile>& shared, int loader) {
  Ring<Tile::kStages> q_ring;
  Ring<Tile::kStagesGradOut> grad_out_ring;
  Ring<kTileSlots> tile_ring;
  std::conditional_t<Tile::kMasked, BwdPlanWalk<Tile>, BwdVisit> at;
  uint32_t kv_phase = 0, next = 0;
  const auto claim = [&] {
    if (loader == 0) next = atomicAdd(args.counter, 1u);
  };
  claim();
  while (true) {
    FwdWork work;
    if (kAlone || loader == 0) {
      ptx::mbarrier_wait(shared.empty_tile(tile_ring.stage()), tile_ring.phase() ^ 1);
      work = bwd_work<Tile>(args, next);
      fwd_put_work<false>(shared.tile(tile_ring.stage()), work);
      ptx::store_shared_4(shared.tile(tile_ring.stage()) + kKvPhaseOffset, kv_phase);
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
    tile_ring.advance();
    if (work.end()) break;
    if (work.empty()) {
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
      }
      load_rows<Tile::kBlockM, Tile::kBoxes, ptx::Reuse::kSoon, kAlone, Tile::kLoaders, /*kWords=*/false>(
          slot, args.q, &args.map_q, at.m * Tile::kBlockM, at.head, work.batch, loader, Tile::kStatsBytes);
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

    // In the order in which consumers wait, but that the first Q does not wait for the memory of K and V.
    load_q();
    load_rows<Tile::kBlockN, Tile::kBoxes, ptx::Reuse::kNone, kAlone, Tile::kLoaders, /*kWords=*/false>(
        {shared.k(), shared.full_k(), shared.empty_kv(), kv_phase ^ 1}, args.k, &args.map_k, work.row, work.head, work.batch,
        loader);
    load_rows<Tile::kBlockN, Tile::kBoxesV, ptx::Reuse::kNone, kAlone, Tile::kLoaders, /*kWords=*/false>(
        {shared.v(), shared.full_v(), shared.empty_kv(), kv_phase ^ 1}, args.v, &args.map_v, work.row, work.head, work.batch,
        loader);
    kv_phase ^= 1;
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
}

// One warp: adds what `consumer` has staged to the sum, block by block; in turn, if the order is fixed. The next turn is given
// once the addition is performed, which is waited for behind the addition to the block after.
template <typename Tile>
__device__ inline void bwd_add_pieces(const BwdArgs& args, const BwdShared<Tile>& shared, int consumer, int lane) {
  // The second consumer of class 96 has half a box of columns.
  const uint32_t bytes = consumer == 1 && Tile::kDim == 96 ? Tile::kPieceBytes / 2 : Tile::kPieceBytes;
  Ring<kTileSlots> tile_ring;
  uint32_t phase = 0;
  Ring<Tile::kVisits> told;  // masked: the slots of what the loader told
  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    bwd_leave_work(shared, tile_ring, lane);
    if (work.end()) break;
    if (lane == 0) {
      uint32_t* turn_before = nullptr;
      uint32_t step_before = 0;
      const auto give_turn = [&](auto pending) {
        if (!turn_before) return;
        ptx::tma_store_wait<decltype(pending)::value>();
        ptx::fence_proxy();
        ptx::add_release(turn_before, step_before);
      };
#pragma unroll 1
      for (BwdFollower<Tile> at(work, args.group); at.left > 0; at.advance(args, work)) {
        ptx::mbarrier_wait(shared.full_piece(consumer), phase);
        phase ^= 1;
        if constexpr (Tile::kMasked) {
          at.hear(BwdWord<true>{ptx::load_shared_4(shared.visit(told.stage()))},
                  int(ptx::load_shared_4(shared.visit(told.stage()) + 4)));
          told.advance();
        }
        const int64_t block = bwd_block(args, work, at);
        fwd_delay(FwdPoint::kStore);
        uint32_t* turn = args.turns + block * Tile::kConsumers + consumer;
        uint32_t mine = 0;
        if (args.turns) {
          mine = bwd_turn<Tile>(args, work, at);
          bwd_wait_turn(turn, mine);
          ptx::fence_proxy();
        }
        ptx::bulk_reduce_add(args.dq + block * Tile::kDqFloats + consumer * kBwdPieceFloats, shared.piece(consumer), bytes);
        ptx::tma_store_commit();
        give_turn(std::integral_constant<int, 1>());
        turn_before = args.turns ? turn : nullptr;
        step_before = bwd_turn_step<Tile>(work, mine);
        ptx::tma_store_wait_read();
        fwd_delay(FwdPoint::kFree);
        ptx::mbarrier_arrive(shared.empty_piece(consumer));
      }
      give_turn(std::integral_constant<int, 0>());
    }
    __syncwarp();  // the other lanes wait here, and not for the next tile
  }
}

}  // namespace flashsdpa
