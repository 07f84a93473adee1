// Host side of the forward kernel: which instance a call gets, how its rows are packed and its keys split.
//
// The plan is the one whose time, by the model below, is shortest. The model knows four things: a block of keys takes a
// processor as long as its bytes take to arrive, or its products to compute; a wave of tiles takes as long as its
// longest; nothing is faster than the memory gives K and V; a split launch pays for its second kernel and the partial
// results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../params.h"
#include "../common/status.h"
#include "fwd_args.h"
#include "fwd_instances.h"
#include "tensors.h"

namespace flashsdpa {

struct FwdPlan {
  const FwdInstance* instance = nullptr;
  int64_t group = 1;     // query heads that share a key head
  int64_t pack = 1;      // of these, how many lie side by side in a tile
  int64_t packs = 1;     // in a group
  int64_t queries = 64;  // of one consumer
  int64_t blocks_m = 0, tiles = 0;
  int splits = 1;
  double microseconds = 0;
};

// Runs the plan; f.scratch holds fwd_partial_bytes if it splits keys. Null, or an error text.
const char* fwd_launch(const ForwardParams& f, const FwdPlan& plan, const CurrentDevice& device, cudaStream_t stream);
int64_t fwd_partial_bytes(const Problem& p, const FwdPlan& plan);

// The instances for many queries.
inline const FwdInstance& fwd_whole_instance(const Problem& p) {
  constexpr int64_t kShort = 1536;  // measured at 1024 and 4096
  const int64_t larger = std::max(p.dim, p.dim_v);
  if (has_score_terms(p)) return larger <= 64 ? kFwdTermsD64 : larger <= 128 ? kFwdTermsD128 : kFwdTermsD256;
  if (has_mask(p)) {
    const bool bits = has_bool_mask(p);
    if (larger <= 64) return bits ? kFwdBitsD64 : kFwdMaskedD64;
    if (larger <= 128) return bits ? kFwdBitsD128 : kFwdMaskedD128;
    if (bits && p.dim_v > 128) return kFwdBitsD256;
    return larger <= 192 && p.dim_v <= 128 ? kFwdMaskedD192V128 : kFwdMaskedD256;
  }
  if (larger <= 64) return p.seq_k < kShort ? kFwdD64Short : kFwdD64;
  if (larger <= 96) return kFwdD96;
  if (larger <= 128) return kFwdD128;
  if (larger <= 192) return p.dim_v <= 128 ? kFwdD192V128 : kFwdD192;
  return kFwdD256;
}

inline const FwdInstance& fwd_few_instance(const Problem& p, int consumers) {
  const int64_t larger = std::max(p.dim, p.dim_v);
  if (has_mask(p)) return larger <= 64 ? kFwdMaskedFewD64 : larger <= 128 ? kFwdMaskedFewD128 : kFwdMaskedFewD256;
  if (larger <= 64) return consumers == 1 ? kFwdFew64D64 : kFwdFew128D64;
  if (larger <= 128) return consumers == 1 ? kFwdFew64D128 : kFwdFew128D128;
  return consumers == 1 ? kFwdFew64D256 : kFwdFew128D256;
}

// Tiles of `instance` with `pack` heads in each.
inline FwdPlan fwd_tiling(const Problem& p, const FwdInstance& instance, int64_t pack) {
  FwdPlan plan;
  plan.instance = &instance;
  plan.group = p.heads_q / std::max<int64_t>(p.heads_kv, 1);
  plan.pack = pack;
  plan.packs = ceil_div(plan.group, pack);
  plan.queries = kConsumerRows / pack;
  plan.blocks_m = ceil_div(p.seq_q, instance.consumers * plan.queries);
  plan.tiles = plan.blocks_m * p.batch * p.heads_kv * plan.packs;
  return plan;
}

// Whether few queries with a mask may go this way: all in one granule, the heads of a pack under one mask.
inline bool fwd_mask_allows(const Problem& p, const FwdPlan& few) {
  return !has_mask(p) || (few.blocks_m == 1 && (few.pack == 1 || p.mask.size[1] == 1));
}

// Keys that a tile of `queries` from `row` on visits.
inline int64_t fwd_keys(const Problem& p, int64_t row, int64_t queries) {
  const int64_t last = std::min(row + queries, p.seq_q) - 1;
  const int64_t begin = std::clamp<int64_t>(row + p.band.lo, 0, p.seq_k);
  const int64_t end = std::clamp<int64_t>(last + p.band.hi + 1, 0, p.seq_k);
  return std::max<int64_t>(0, end - begin);
}

// Whether every tile visits as many key blocks.
inline bool fwd_equal_tiles(const Problem& p) { return p.band.open() && !has_mask(p); }

// Key blocks of the tiles, by the band alone: of the longest and on average. The number of keys is a straight line in the row, bent twice
// at the most, so the ends and the middle tell it well enough.
struct FwdLengths {
  double longest, mean;
};
inline FwdLengths fwd_lengths(const Problem& p, const FwdPlan& plan) {
  const int64_t queries = plan.instance->consumers * plan.queries;
  const auto blocks = [&](int64_t m) {
    return static_cast<double>(ceil_div(fwd_keys(p, m * queries, queries), plan.instance->block_n));
  };
  const double first = blocks(0), middle = blocks(plan.blocks_m / 2), last = blocks(plan.blocks_m - 1);
  return {std::max({first, middle, last}), (first + 2 * middle + last) / 4};
}

// Of an H200. The rates follow from runs of the instances for many queries; the fixed costs are not measured yet.
struct FwdModel {
  static constexpr double kMemory = 4.2e6;         // bytes a microsecond, all processors together
  static constexpr double kProcessorBytes = 50e3;  // bytes a microsecond that one processor takes in
  static constexpr double kProcessorFlop = 5.5e6;  // and computes
  static constexpr double kTile = 1.0;             // start and end of a tile
  static constexpr double kCombine = 3.0;          // the second kernel
  static constexpr double kPartials = 3e6;         // bytes a microsecond of partial results, written and read
};

inline double fwd_microseconds(const Problem& p, const FwdPlan& plan, const FwdLengths& length, int splits,
                               int processors) {
  const FwdInstance& i = *plan.instance;
  const double dims = i.dim + i.dim_v;
  const double block = std::max(i.block_n * dims * 2 / FwdModel::kProcessorBytes,
                                i.block_m() * i.block_n * dims * 2 / FwdModel::kProcessorFlop);
  const double longest = std::ceil(length.longest / splits) * block + FwdModel::kTile;
  const auto pieces = static_cast<double>(plan.tiles * splits);
  // Equal tiles go in waves. Unequal ones, longest first, leave little idle at the end.
  const double computing =
      fwd_equal_tiles(p) ? std::ceil(pieces / processors) * longest
                    : std::max(longest, pieces / processors * (length.mean / splits * block + FwdModel::kTile));
  const auto keys = static_cast<double>(p.batch * p.heads_kv * fwd_keys(p, 0, p.seq_q));
  const double time = std::max(computing, keys * static_cast<double>(p.dim + p.dim_v) * 2 / FwdModel::kMemory);
  if (splits == 1) return time;
  const double rows = static_cast<double>(p.batch * p.heads_q * p.seq_q), floats = static_cast<double>(p.dim_v);
  return time + FwdModel::kCombine + 2 * splits * rows * floats * sizeof(float) / FwdModel::kPartials;
}

// The best number of splits: one of those that just fill one, two, three or four waves.
inline void fwd_choose_splits(const Problem& p, int processors, bool may_split, FwdPlan* plan) {
  const FwdLengths length = fwd_lengths(p, *plan);
  plan->microseconds = fwd_microseconds(p, *plan, length, 1, processors);
  if (!may_split || !plan->instance->few || plan->tiles == 0) return;
  constexpr int kWaves = 4;
  const int64_t most = std::min<int64_t>(kMaxFwdSplits, static_cast<int64_t>(length.longest));
  for (int wave = 1; wave <= kWaves; ++wave) {
    const auto splits = static_cast<int>(std::min(most, wave * processors / plan->tiles));
    if (splits < 2) continue;
    const double time = fwd_microseconds(p, *plan, length, splits, processors);
    if (time < plan->microseconds) plan->microseconds = time, plan->splits = splits;
  }
}

// Of the tiles of one batch size; `may_split`: there is memory for partial results.
inline FwdPlan fwd_plan_of(const Problem& p, int processors, bool may_split) {
  constexpr double kWorthIt = 0.85;  // for what the model does not know
  FwdPlan best = fwd_tiling(p, fwd_whole_instance(p), 1);
  if (best.tiles == 0) return best;
  fwd_choose_splits(p, processors, may_split, &best);
  if (has_score_terms(p)) return best;  // no kernel for few queries has them
  const int64_t pack = ceil_div(best.group, ceil_div(best.group, kConsumerRows));  // equal packs
  for (const int consumers : {2, 1}) {
    const FwdInstance& instance = fwd_few_instance(p, consumers);
    if (instance.consumers != consumers) continue;  // with a mask there is one for a single consumer alone
    FwdPlan few = fwd_tiling(p, instance, 1);
    const FwdPlan packed = fwd_tiling(p, instance, pack);
    if (packed.tiles < few.tiles && fwd_mask_allows(p, packed)) few = packed;
    if (!fwd_mask_allows(p, few)) continue;
    fwd_choose_splits(p, processors, may_split, &few);
    // Where 64 rows hold all queries of a pack there is nothing to lose: the larger tiles would be half empty.
    const bool small = consumers == 1 && few.blocks_m == 1;
    if (few.microseconds < best.microseconds * kWorthIt || (small && few.microseconds <= best.microseconds)) best = few;
  }
  return best;
}

inline FwdPlan fwd_plan(const Problem& p, int processors, bool may_split) {
  Problem planned = p;
  planned.batch = planned_batch(p);
  FwdPlan plan = fwd_plan_of(planned, processors, may_split);
  plan.tiles = fwd_tiling(p, *plan.instance, plan.pack).tiles;
  return plan;
}

}  // namespace flashsdpa
