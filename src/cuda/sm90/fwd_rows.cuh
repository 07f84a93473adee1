// What the rows of a consumer stand for: queries of one head or, for few queries, (query, head) pairs, heads innermost.
#pragma once

#include "fwd_schedule.cuh"
#include "fwd_tiles.h"

namespace flashsdpa {

struct FwdRow {
  int query;
  int further_head;  // which head of the pack, 0 for the first
  bool used;         // false: the row stands for nothing, its results are dropped
};

// How many queries the rows of a consumer hold.
template <typename Tile>
__device__ inline int fwd_queries(const FwdArgs& args) {
  return Tile::kFew ? args.few.queries : kConsumerRows;
}

// The first head of the pack `head` (of the order of tiles), within its group, and of all heads of q.
__device__ inline int fwd_first_in_group(const FwdArgs& args, int head) { return head % args.group * args.few.pack; }
template <typename Tile>
__device__ inline int fwd_first_head(const FwdArgs& args, int head) {
  return Tile::kFew ? head / args.group * args.few.group + fwd_first_in_group(args, head) : head;
}

// Row `r` of a consumer whose first row is of query `first` and the first head of pack `head`.
template <typename Tile>
__device__ inline FwdRow fwd_row(const FwdArgs& args, int head, int first, int r) {
  if constexpr (!Tile::kFew) {
    return {first + r, 0, first + r < args.seq_q};
  } else {
    const int query = r / args.few.pack, further_head = r % args.few.pack;
    return {first + query, further_head,
            query < args.few.queries && first + query < args.seq_q &&
                fwd_first_in_group(args, head) + further_head < args.few.group};
  }
}

// What one consumer does of a tile: its first query, the key blocks first <= n < last in which it has anything to do, and
// those of them, plain_from <= n < plain_until, of which all its rows see every key.
struct FwdRange {
  int row, first, last, plain_from, plain_until;
};

template <typename Tile>
__device__ inline FwdRange fwd_range(const FwdArgs& args, const FwdWork& work, int consumer) {
  constexpr int kBlockN = Tile::kBlockN;
  const int queries = fwd_queries<Tile>(args), row = work.row + consumer * queries, last_row = row + queries - 1;
  const auto limit = [&](int key) { return clamp_to(key, 0, args.seq_k); };
  FwdRange range{row, work.first, work.last, (limit(last_row + args.band_lo) + kBlockN - 1) / kBlockN,
                 limit(row + args.band_hi + 1) / kBlockN};
  // A mask's blocks are listed for the whole tile; one consumer is the whole tile. At least one block gives the rows their zeros.
  if constexpr (!Tile::kMasked && Tile::kConsumers > 1) {
    const int end = row < args.seq_q ? limit(min(last_row, args.seq_q - 1) + args.band_hi + 1) : 0;
    range.last = clamp_to((end + kBlockN - 1) / kBlockN, work.first + 1, work.last);
    range.first = clamp_to(limit(row + args.band_lo) / kBlockN, work.first, range.last - 1);
  }
  return range;
}

}  // namespace flashsdpa
