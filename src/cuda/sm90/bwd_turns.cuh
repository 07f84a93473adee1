// The warps of the producer warpgroup that see to dQ, so that no consumer waits for global memory: they add what the consumers
// have staged to the sum; or, where consumers add from registers, one keeps the turns.
//
// In a fixed order of additions a block of dQ is added to once BwdArgs::turns says so, and the next turn is given once the
// addition is performed: two trips to the L2 cache and more, about as long as a consumer takes for a block.
#pragma once

#include "../../ptx/grid.cuh"
#include "bwd_blocks.cuh"

namespace flashsdpa {

// One warp: adds one consumer's piece of each block. In a fixed order it asks for the turn of the next block while the
// addition to this one is under way.
template <typename Tile>
__device__ inline void bwd_add_pieces(const BwdArgs& args, const BwdShared<Tile>& shared, int adder, int lane) {
  constexpr int kLast = Tile::kDqFloats - (Tile::kAdders - 1) * kBwdPieceFloats;  // of class 96 a half
  const uint32_t bytes = (adder == Tile::kAdders - 1 ? kLast : kBwdPieceFloats) * int(sizeof(float));
  Ring<kTileSlots> tile_ring;
  Ring<1> blocks;
  ptx::wait_for_grid_before();  // which zeroes the sum and the turns
  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    bwd_leave_work(shared, tile_ring, lane);
    if (work.end()) break;
    if (lane == 0) {
      uint32_t* turn_before = nullptr;
      uint32_t step_before = 0;
      const auto give_turn = [&] {
        if (!turn_before) return;
        ptx::tma_store_wait();
        ptx::fence_proxy();
        ptx::add_release(turn_before, step_before);
      };
#pragma unroll 1
      for (BwdFollower<Tile> at(args, work); at.left > 0; at.advance(args, work), blocks.advance()) {
        if constexpr (Tile::kMasked) {
          give_turn();
          ptx::mbarrier_wait(shared.full_piece(adder), blocks.phase());
          bwd_hear(shared, int(blocks.count % Tile::kVisits), at);
        }
        const int64_t block = bwd_block(args, work, at);
        uint32_t* turn = args.turns + block * Tile::kAdders + adder;
        const uint32_t mine = args.turns ? bwd_turn<Tile>(args, work, at) : 0;
        const bool ready = args.turns && ptx::load_acquire(turn) == mine;
        if constexpr (!Tile::kMasked) {
          give_turn();
          ptx::mbarrier_wait(shared.full_piece(adder), blocks.phase());
        }
        fwd_delay(FwdPoint::kStore);
        if (args.turns) {
          if (!ready) bwd_wait_turn(turn, mine);
          ptx::fence_proxy();
          turn_before = turn;
          step_before = bwd_turn_step<Tile>(work, mine);
        }
        float* const sum = args.dq + block * Tile::kDqFloats + adder * kBwdPieceFloats;
        constexpr int kParts = Tile::kPieceParts;
        const uint32_t part_bytes = bytes / kParts;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          ptx::bulk_reduce_add(sum + part * part_bytes / sizeof(float), shared.piece(adder) + part * part_bytes, part_bytes);
          ptx::tma_store_commit();
        }
        if constexpr (kParts == 2) {
          ptx::tma_store_wait_read<1>();
          ptx::mbarrier_arrive(shared.empty_piece(adder, 0));
        }
        ptx::tma_store_wait_read();
        fwd_delay(FwdPoint::kFree);
        ptx::mbarrier_arrive(shared.empty_piece(adder, kParts - 1));
      }
      give_turn();
    }
    __syncwarp();  // the other lanes wait here, and not for the next tile
  }
}

// Without staging, in a fixed order. One warp: tells the consumers that a block's turn has come, and, once all have added to it,
// gives the next; what they added is ordered before that through their arrivals.
template <typename Tile>
__device__ inline void bwd_keep_turns(const BwdArgs& args, const BwdShared<Tile>& shared, int lane) {
  Ring<kTileSlots> tile_ring;
  Ring<Tile::kStages> blocks;
  ptx::wait_for_grid_before();  // which zeroes the turns
  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    bwd_leave_work(shared, tile_ring, lane);
    if (work.end()) break;
    if (lane == 0 && args.turns) {
#pragma unroll 1
      for (BwdFollower<Tile> at(args, work); at.left > 0; at.advance(args, work), blocks.advance()) {
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
