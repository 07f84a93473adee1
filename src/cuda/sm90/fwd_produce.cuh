// The producer of the forward kernel: takes tiles, and keeps the stages of K and V and the next Q filled.
#pragma once

#include "fwd_delays.cuh"
#include "fwd_load.cuh"
#include "fwd_shared.cuh"
#include "fwd_walk.cuh"

namespace flashsdpa {

// kAlone: all tensors go by TMA, and thread 0 does it alone; else the whole warpgroup is here.
template <typename Tile, bool kAlone>
__device__ inline void fwd_produce(const FwdArgs& args, const FwdShared<Tile>& shared, int thread) {
  // One consumer: mostly decoding, which reads a key once.
  constexpr ptx::Reuse kKeyReuse = Tile::kConsumers > 1 ? ptx::Reuse::kSoon : ptx::Reuse::kNone;
  const int queries = fwd_queries<Tile>(args);
  Ring<Tile::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_phase = 0, next = blockIdx.x;
  // Claimed as late as hides the latency of the claim: early claims deal out tiles before it is known who gets free.
  const auto claim = [&] {
    if (thread == 0) next = fwd_next_tile(args, next);
  };
  // The tile in turn and its first block of keys. To follow a mask plan is some dependent loads a block and more a tile, so a warp
  // of its own does it, if there is one that does not load.
  constexpr bool kQueued = Tile::kMasked && kAlone;
  FwdWork work;
  std::conditional_t<kQueued, BlockQueue<Tile>, std::conditional_t<Tile::kMasked, PlanWalk<Tile>, RangeWalk>> walk;
  FwdBlock block{-1, 0};
  while (true) {
    if (kAlone || thread == 0) {
      ptx::mbarrier_wait(shared.empty_tile(tile_ring.stage()), tile_ring.phase() ^ 1);
      if constexpr (kQueued) {
        block = walk.begin(shared, work);
      } else {
        work = fwd_work<Tile>(args, next);
        block = fwd_first_block<Tile>(args, walk, work);
      }
      fwd_put_work<Tile::kFew>(shared.tile(tile_ring.stage()), work);
      if constexpr (Tile::kMasked) ptx::store_shared_4(shared.tile_block(tile_ring.stage()), block.word());
      ptx::mbarrier_arrive(shared.full_tile(tile_ring.stage()));
    }
    if constexpr (!kAlone) {
      ptx::barrier_sync(int(FwdBarrier::kProducer), ptx::kWarpgroupThreads);
      work = fwd_get_work<Tile::kFew>(shared.tile(tile_ring.stage()));
      block = fwd_first_block<Tile>(args, walk, work);
    }
    tile_ring.advance();
    if (work.end()) break;
    const int head_kv = work.head / args.group, batch = work.batch;

    const auto step = [&] {
      if constexpr (kQueued) {
        return walk.step(shared);
      } else {
        return walk.step();
      }
    };
    FwdBlock ahead = step();  // the block after `block`
    const auto load_k = [&] {
      const int stage = k_ring.stage();
      const FwdSlot slot{shared.k(stage), shared.full_k(stage), shared.empty_k(stage), k_ring.phase() ^ 1};
      if constexpr (Tile::kMasked) {
        if (thread == 0) {  // who completes `full`, so that the slot cannot be filled and emptied meanwhile
          ptx::mbarrier_wait(slot.empty, slot.empty_parity);
          ptx::store_shared_4(shared.block(stage), ahead.word());
        }
      }
      load_rows<Tile::kBlockN, Tile::kBoxes, kKeyReuse, kAlone>(slot, args.k, &args.map_k, block.n * Tile::kBlockN, head_kv,
                                                                batch, thread);
      k_ring.advance();
    };
    const auto load_v = [&](int n) {
      const int stage = v_ring.stage();
      const FwdSlot slot{shared.v(stage), shared.full_v(stage), shared.empty_v(stage), v_ring.phase() ^ 1};
      load_rows<Tile::kBlockN, Tile::kBoxesV, kKeyReuse, kAlone>(slot, args.v, &args.map_v, n * Tile::kBlockN, head_kv,
                                                                 batch, thread);
      v_ring.advance();
    };

    const auto load_q = [&] {
#pragma unroll 1
      for (int c = 0; c < Tile::kConsumers; ++c) {
        const FwdSlot slot{shared.q(c), shared.full_q(c), shared.empty_q(c), q_phase ^ 1};
        load_queries<Tile, kAlone>(slot, args, work.row + c * queries, work.head, work.batch, thread);
      }
      q_phase ^= 1;
    };

    // In the order in which consumers wait: S runs one block ahead of P V. The first K does not wait for Q's memory, nor, where
    // that is freed last of all, does the second.
    constexpr bool kTwoKeysFirst = kQueued && !Tile::kOwnOut;
    bool q_due = true;
    load_k();
    if constexpr (!kTwoKeysFirst) load_q();
#pragma unroll 1
    while (!ahead.none()) {
      const int last = block.n;
      block = ahead;
      ahead = step();
      load_k();
      if (kTwoKeysFirst && q_due) load_q();
      q_due = false;
      load_v(last);
    }
    if (kTwoKeysFirst && q_due) load_q();
    if constexpr (!kQueued) claim();
    load_v(block.n);
  }
}

}  // namespace flashsdpa
