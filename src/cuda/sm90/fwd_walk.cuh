// Tiles and their blocks of keys, found by a warp of the producer that does nothing else, ahead of the one that loads. A tile of a
// mask plan takes thousands of clocks of dependent loads to begin, and a block hundreds: as much as its products.
#pragma once

#include "fwd_blocks.cuh"
#include "fwd_shared.cuh"

namespace flashsdpa {

// The first block of a tile, of whose blocks `walk` has the others.
template <typename Tile, typename Walk>
__device__ inline FwdBlock fwd_first_block(const FwdArgs& args, Walk& walk, FwdWork& work) {
  if (work.end()) return {-1, 0};
  walk.start(args, work);
  const FwdBlock block = walk.step();
  if (!block.none()) return block;
  // Nothing to see: one block past the last key, of zeros.
  const int past = (args.seq_k + Tile::kBlockN - 1) / Tile::kBlockN;
  work.first = past;
  work.last = past + 1;
  return {past, 0};
}

// The walker, one thread. For each tile: its work with its first block, the other blocks, none; at last, no work.
template <typename Tile>
__device__ inline void fwd_walk(const FwdArgs& args, const FwdShared<Tile>& shared) {
  Ring<kWalkSlots> ring;
  PlanWalk<Tile> walk;
  const auto put = [&](const FwdBlock& block, const FwdWork* work) {
    ptx::mbarrier_wait(shared.empty_walk(ring.stage()), ring.phase() ^ 1);
    if (work) fwd_put_work<Tile::kFew>(shared.walk(ring.stage()), *work);
    ptx::store_shared_4(shared.walk_block(ring.stage()), block.word());
    ptx::mbarrier_arrive(shared.full_walk(ring.stage()));
    ring.advance();
  };
  for (uint32_t tile = blockIdx.x;; tile = fwd_next_tile(args, tile)) {
    FwdWork work = fwd_work<Tile>(args, tile);
    FwdBlock block = fwd_first_block<Tile>(args, walk, work);
    put(block, &work);
    if (work.end()) break;
    do {
      block = walk.step();
      put(block, nullptr);
    } while (!block.none());
  }
}

// The loader's end of it, one thread. After a block that is none comes a tile.
template <typename Tile>
class BlockQueue {
 public:
  __device__ FwdBlock begin(const FwdShared<Tile>& shared, FwdWork& work) {
    ptx::mbarrier_wait(shared.full_walk(ring_.stage()), ring_.phase());
    work = fwd_read_work<Tile::kFew>(shared.walk(ring_.stage()));
    return take(shared);
  }
  __device__ FwdBlock step(const FwdShared<Tile>& shared) {
    ptx::mbarrier_wait(shared.full_walk(ring_.stage()), ring_.phase());
    return take(shared);
  }

 private:
  __device__ FwdBlock take(const FwdShared<Tile>& shared) {
    const uint32_t word = ptx::load_shared_4(shared.walk_block(ring_.stage()));
    ptx::mbarrier_arrive(shared.empty_walk(ring_.stage()));
    ring_.advance();
    return FwdBlock::from(word);
  }
  Ring<kWalkSlots> ring_;
};

}  // namespace flashsdpa
