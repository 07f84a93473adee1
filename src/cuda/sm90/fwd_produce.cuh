// The producer of the forward kernel: takes tiles, and keeps the stages of K and V and the next Q filled.
#pragma once

#include "fwd_blocks.cuh"
#include "fwd_delays.cuh"
#include "fwd_load.cuh"
#include "fwd_shared.cuh"

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
  // The tile in turn and its first block of keys. With a mask that is some dependent loads, made while the tile before still
  // waits for memory.
  FwdWork work;
  std::conditional_t<Tile::kMasked, PlanWalk<Tile>, RangeWalk> walk;
  FwdBlock block{-1, 0};
  const auto first_block = [&] {
    if (work.end()) return;
    walk.start(args, work);
    block = walk.step();
    if (block.none()) {  // nothing to see: one block past the last key, of zeros
      const int past = (args.seq_k + Tile::kBlockN - 1) / Tile::kBlockN;
      block = {past, 0};
      work.first = past;
      work.last = past + 1;
    }
  };
  const auto begin_tile = [&] {
    if (!kAlone && thread > 0) return;
    work = fwd_work<Tile>(args, next);
    first_block();
  };
  if constexpr (Tile::kMasked) begin_tile();
  while (true) {
    if (kAlone || thread == 0) {
      ptx::mbarrier_wait(shared.empty_tile(tile_ring.stage()), tile_ring.phase() ^ 1);
      if constexpr (!Tile::kMasked) begin_tile();
      fwd_put_work<Tile::kFew>(shared.tile(tile_ring.stage()), work);
      if constexpr (Tile::kMasked) ptx::store_shared_4(shared.tile_block(tile_ring.stage()), block.word());
      ptx::mbarrier_arrive(shared.full_tile(tile_ring.stage()));
    }
    if constexpr (!kAlone) {
      ptx::barrier_sync(int(FwdBarrier::kProducer), ptx::kWarpgroupThreads);
      work = fwd_get_work<Tile::kFew>(shared.tile(tile_ring.stage()));
      first_block();
    }
    tile_ring.advance();
    if (work.end()) break;
    const int head_kv = work.head / args.group, batch = work.batch;

    FwdBlock ahead = walk.step();  // the block after `block`
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

    // In the order in which consumers wait: S runs one block ahead of P V. The first K does not wait for Q's memory. With a mask
    // a step takes a while; it is taken before a wait for memory that is needed later than K's.
    const auto step = [&] { return ahead.none() ? ahead : walk.step(); };
    load_k();
    FwdBlock after = step();
    if (Tile::kMasked && ahead.none()) claim();  // one block
#pragma unroll 1
    for (int c = 0; c < Tile::kConsumers; ++c) {
      const FwdSlot slot{shared.q(c), shared.full_q(c), shared.empty_q(c), q_phase ^ 1};
      load_queries<Tile, kAlone>(slot, args, work.row + c * queries, work.head, work.batch, thread);
    }
    q_phase ^= 1;
#pragma unroll 1
    while (!ahead.none()) {
      const int last = block.n;
      block = ahead;
      ahead = after;
      load_k();
      after = step();
      if (Tile::kMasked && ahead.none()) claim();
      load_v(last);
    }
    const int last = block.n;
    if constexpr (Tile::kMasked) {
      begin_tile();
    } else {
      claim();
    }
    load_v(last);
  }
}

}  // namespace flashsdpa
