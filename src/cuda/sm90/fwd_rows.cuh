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

}  // namespace flashsdpa
