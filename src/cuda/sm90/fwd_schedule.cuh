// Which tile comes next, and which key blocks a tile needs.
#pragma once

#include "../../ptx/warpgroup.cuh"
#include "fwd_args.h"

namespace flashsdpa {

// A tile: queries from `row` on of one head (few queries: pack of heads) of one batch, against key blocks first <= n <
// last.
struct FwdWork {
  int row, head, batch;
  int first, last;
  int split;  // few queries: which part of the tile's keys; else 0
  __device__ bool empty() const { return first >= last; }
  __device__ bool end() const { return row < 0; }  // no tile is left
};

__device__ inline int clamp_to(int x, int low, int high) { return min(max(x, low), high); }

// The tile after `tile` for this block: the next that no block has taken, or, without a counter, in equal steps.
__device__ inline uint32_t fwd_next_tile(const FwdArgs& args, uint32_t tile) {
  return gridDim.x + (args.counter ? atomicAdd(args.counter, 1u) : tile);
}

struct TilePlace {
  uint32_t block, head;  // head: batch * heads + head, or the other way round (FwdArgs::batches)
};

// Where tile number `tile` < order.tiles is, of blocks that cost the more the higher their number. kCounted: there are no
// more than `sections` of heads without passes, and the last one takes all that are left.
template <bool kCounted = false>
__device__ inline TilePlace place_of(const FwdOrder& order, uint32_t tile, uint32_t sections = 0) {
  uint32_t top = order.blocks_m, low = 0, section = order.section;  // this pass: blocks low <= block < top
  if (order.longest_first) {
    constexpr uint32_t kLastPass = 4;
    while (true) {
      low = top > kLastPass ? top / 2 : 0;
      if (tile < (top - low) * order.heads) break;
      tile -= (top - low) * order.heads;
      top = low;
      section = min(2 * section, order.heads);  // shorter tiles read half the keys
    }
  }
  uint32_t in_section = tile / ((top - low) * section);
  if constexpr (kCounted) in_section = min(in_section, sections - 1);
  const uint32_t first_head = in_section * section, left = order.heads - first_head;
  const uint32_t within = tile - first_head * (top - low);
  const uint32_t heads = kCounted && in_section + 1 == sections ? left : min(section, left);
  return {top - 1 - within / heads, first_head + within % heads};
}

template <typename Tile>
__device__ inline FwdWork fwd_work(const FwdArgs& args, uint32_t tile) {
  constexpr int kBlockN = Tile::kBlockN;
  const int block_m = Tile::kFew ? Tile::kConsumers * args.few.queries : Tile::kBlockM;
  if (tile >= args.order.tiles) return {-1, 0, 0, 0, 0, 0};
  FwdWork work;
  work.split = 0;
  if constexpr (Tile::kFew) {
    work.split = int(tile % uint32_t(args.few.splits));
    tile /= uint32_t(args.few.splits);
  }
  const TilePlace place = place_of<Tile::kMasked>(args.order, tile, args.mask_sections);
  work.row = int(place.block) * block_m;
  if (Tile::kMasked && args.batches > 0) {
    work.batch = int(place.head % args.batches);
    work.head = int(place.head / args.batches);
  } else {
    work.batch = int(place.head / args.heads_q);
    work.head = int(place.head % args.heads_q);
  }
  const int last_row = min(work.row + block_m, args.seq_q) - 1;
  const int begin = clamp_to(work.row + args.band_lo, 0, args.seq_k);
  const int end = clamp_to(last_row + args.band_hi + 1, 0, args.seq_k);
  work.first = begin / kBlockN;
  work.last = begin < end ? (end + kBlockN - 1) / kBlockN : work.first;
  if constexpr (Tile::kFew) {
    const int from = work.first, blocks = work.last - from;
    work.first = from + blocks * work.split / args.few.splits;
    work.last = from + blocks * (work.split + 1) / args.few.splits;
  }
  return work;
}

// The producer works out what a tile is and hands it to the consumers through shared memory.
template <bool kFew>
__device__ inline void fwd_put_work(uint32_t slot, const FwdWork& work) {
  ptx::store_shared_16(slot, work.row, work.head, work.batch, work.first);
  ptx::store_shared_4(slot + 16, work.last);
  if constexpr (kFew) ptx::store_shared_4(slot + 20, work.split);
}

// By one thread.
template <bool kFew>
__device__ inline FwdWork fwd_read_work(uint32_t slot) {
  const auto word = [&](int offset) { return int(ptx::load_shared_4(slot + offset)); };
  return {word(0), word(4), word(8), word(12), word(16), kFew ? word(20) : 0};
}
// Each value from one lane, so that the compiler knows it, and all loops over the blocks, to be the same for the warp.
template <bool kFew>
__device__ inline FwdWork fwd_get_work(uint32_t slot) {
  const auto uniform = [&](int offset) { return int(__shfl_sync(0xffffffffu, ptx::load_shared_4(slot + offset), 0)); };
  return {uniform(0), uniform(4), uniform(8), uniform(12), uniform(16), kFew ? uniform(20) : 0};
}

}  // namespace flashsdpa
