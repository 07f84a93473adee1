// Which key blocks a tile visits, last first: all of its band, or those that the mask plan leaves of it. With a mask the producer
// walks the plan and tells the consumers the number of each block and what there is to do to it: of the first one with the tile,
// of the others with the block of K before.
#pragma once

#include "../../ptx/warpgroup.cuh"
#include "fwd_args.h"
#include "fwd_rows.cuh"
#include "fwd_schedule.cuh"
#include "fwd_tiles.h"
#include "plan_lists.cuh"

namespace flashsdpa {

// A block of keys and, for each consumer, the class of its granules together: kFull, all kept; kEmpty, none; kBits, as the
// bits say; kMixed, values to add. In one word of shared memory.
struct FwdBlock {
  int n;             // key block; -1: there is none
  uint32_t classes;  // 2 bits a consumer

  __device__ bool none() const { return n < 0; }
  __device__ GranuleClass of(int consumer) const { return GranuleClass(classes >> 2 * consumer & 3); }
  __device__ uint32_t word() const { return uint32_t(n) << 8 | classes; }
  __device__ static FwdBlock from(uint32_t word) { return {int(word) >> 8, word & 0xff}; }
};

// The plan for a tile of work. Where rows are heads too, the heads of a pack have one mask.
template <typename Tile>
__device__ inline const int32_t* plan_of(const FwdArgs& args, const FwdWork& work) {
  return args.mask.plan + work.batch * args.mask.plan_batch + fwd_first_head<Tile>(args, work.head) * args.mask.plan_head;
}

// The key blocks of one tile without a mask, last first.
struct RangeWalk {
  int next, first;
  __device__ void start(const FwdArgs&, const FwdWork& work) {
    next = work.last - 1;
    first = work.first;
  }
  __device__ FwdBlock step() { return {next >= first ? next-- : -1, 0}; }
};

// The key blocks of one tile that hold a score which plan and band both keep, last first. For one thread.
template <typename Tile>
struct PlanWalk {
  static constexpr int kGranules = Tile::kBlockN / int(kGranule);  // of keys in a block
  static constexpr int kRows = Tile::kConsumers;                   // of granules in a tile: one a consumer
  static_assert(Tile::kBlockN % kGranule == 0 && kConsumerRows == kGranule);
  static_assert(!Tile::kFew || kRows == 1, "few queries: all in the first granule");

  const int32_t* entries[kRows];  // of the row's list
  int next[kRows];                // the entry to come; -1: no more
  bool one_key;                   // all keys are alike, so all blocks are
  int first, alike;               // alike: the block to come then

  __device__ void start(const FwdArgs& args, const FwdWork& work) {
    const FwdMask& mask = args.mask;
    if constexpr (Tile::kTerms) {
      if (!mask.plan) {
        start_without_mask(work);
        return;
      }
    }
    const int32_t* plan = plan_of<Tile>(args, work);
    const bool whole = work.last * Tile::kBlockN >= args.seq_k;  // the lists' ends are the tile's
    bool any = false;
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      const int row = mask.queries == 1 || Tile::kFew ? 0 : work.row / int(kGranule) + c;
      const bool there = work.row + c * kConsumerRows < args.seq_q && !work.empty();
      const int32_t* list = plan + plan_row_offset(row, mask.cols);
      entries[c] = list + 1;
      next[c] = -1;
      if (there) {
        const int count = __ldg(list);
        next[c] = mask.one_key || whole ? count - 1 : entries_before(entries[c], count, work.last * kGranules) - 1;
      }
      any |= next[c] >= 0;
    }
    first = work.first;
    one_key = mask.one_key;
    alike = any ? work.last - 1 : -1;
  }

  // Kernels with terms: the blocks of the band, all alike.
  static constexpr uint32_t kAllFull = kFull * ((1 << 2 * kRows) - 1) / 3;
  __device__ void start_without_mask(const FwdWork& work) {
    entries[0] = nullptr;
    one_key = true;
    first = work.first;
    alike = work.empty() ? -1 : work.last - 1;
  }

  __device__ FwdBlock step() {
    FwdBlock block{-1, 0};
    if (one_key) {
      if (alike < first) return block;
      block.n = alike--;
      if constexpr (Tile::kTerms) {
        if (!entries[0]) return {block.n, kAllFull};
      }
#pragma unroll
      for (int c = 0; c < kRows; ++c) {
        if (next[c] >= 0) block.classes |= uint32_t(__ldg(entries[c]) & 3) << 2 * c;
      }
      return block;
    }
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      if (next[c] >= 0) block.n = max(block.n, (__ldg(entries[c] + next[c]) >> 2) / kGranules);
    }
    if (block.n < first) return {-1, 0};
#pragma unroll
    for (int c = 0; c < kRows; ++c) {
      int found[kGranules] = {};  // kEmpty
      for (int g = 0; g < kGranules && next[c] >= 0; ++g) {
        const int entry = __ldg(entries[c] + next[c]);
        if ((entry >> 2) / kGranules != block.n) break;
        found[g] = entry & 3;
        --next[c];
      }
      int all = found[0];
#pragma unroll
      for (int g = 1; g < kGranules; ++g) all = join_classes(all, found[g]);
      block.classes |= uint32_t(all) << 2 * c;
    }
    return block;
  }
};

}  // namespace flashsdpa
