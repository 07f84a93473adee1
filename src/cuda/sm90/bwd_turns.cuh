// The warps of the producer warpgroup that see to dQ, so that no consumer waits for global memory: by keys they add what the
// consumers have laid down to the sum; by columns, where consumers add from registers, one keeps the turns.
//
// In a fixed order of additions a block of dQ is added to once BwdArgs::turns says so, and the next turn is given once the
// addition is performed: two trips to the L2 cache, about as long as a consumer takes for a block.
#pragma once

#include "bwd_blocks.cuh"

namespace flashsdpa {

// By keys. One warp of two: adds every second block, so that one addition may be under way while the next is made.
template <typename Tile>
__device__ inline void bwd_add_pieces(const BwdArgs& args, const BwdShared<Tile>& shared, uint32_t adder, int lane) {
  Ring<kTileSlots> tile_ring;
  Ring<2> blocks;  // a stage for each adder
  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    bwd_leave_work(shared, tile_ring, lane);
    if (work.end()) break;
    if (lane == 0) {
#pragma unroll 1
      for (BwdFollower<Tile> at(work, args.group); at.left > 0; at.advance(args, work), blocks.advance()) {
        if (Tile::kMasked || blocks.stage() == int(adder)) {
          ptx::mbarrier_wait(shared.full_pieces(blocks.stage()), blocks.phase());
        }
        if constexpr (Tile::kMasked) bwd_hear(shared, int(blocks.count % Tile::kVisits), at);
        if (blocks.stage() != int(adder)) continue;
        const int64_t block = bwd_block(args, work, at);
        fwd_delay(FwdPoint::kStore);
        uint32_t mine = 0;
        if (args.turns) {
          mine = bwd_turn<Tile>(args, work, at);
          bwd_wait_turn(args.turns + block, mine);
          ptx::fence_proxy();
        }
        ptx::bulk_reduce_add(args.dq + block * Tile::kDqFloats, shared.piece(0), Tile::kDqFloats * sizeof(float));
        ptx::tma_store_commit();
        ptx::tma_store_wait_read();
        fwd_delay(FwdPoint::kFree);
        ptx::mbarrier_arrive(shared.empty_pieces());
        if (args.turns) {
          ptx::tma_store_wait();
          ptx::fence_proxy();
          ptx::add_release(args.turns + block, bwd_turn_step<Tile>(work, mine));
        }
      }
    }
    __syncwarp();  // the other lanes wait here, and not for the next tile
  }
}

// By columns, in a fixed order. One warp: tells the consumers that a block's turn has come, and, once all have added to it,
// gives the next; what they added is ordered before that through their arrivals.
template <typename Tile>
__device__ inline void bwd_keep_turns(const BwdArgs& args, const BwdShared<Tile>& shared, int lane) {
  Ring<kTileSlots> tile_ring;
  Ring<Tile::kStages> blocks;
  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    bwd_leave_work(shared, tile_ring, lane);
    if (work.end()) break;
    if (lane == 0 && args.turns) {
#pragma unroll 1
      for (BwdFollower<Tile> at(work, args.group); at.left > 0; at.advance(args, work), blocks.advance()) {
        if constexpr (Tile::kMasked) {
          ptx::mbarrier_wait(shared.full_q(blocks.stage()), blocks.phase());
          bwd_hear(shared, int(blocks.count % Tile::kVisits), at);
        }
        uint32_t* turn = args.turns + bwd_block(args, work, at);
        const uint32_t mine = bwd_turn<Tile>(args, work, at);
        bwd_wait_turn(turn, mine);
        ptx::mbarrier_arrive(shared.turn());
        ptx::mbarrier_wait(shared.added(), blocks.count % 2);
        ptx::add_release(turn, bwd_turn_step<Tile>(work, mine));
      }
    }
    __syncwarp();
  }
}

}  // namespace flashsdpa
