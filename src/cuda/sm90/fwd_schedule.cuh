// Which tile comes next, and which key blocks a tile needs.
#pragma once

#include "fwd_args.h"

namespace flashsdpa {

// A tile: kBlockM queries from `row` on of one head of one batch, against key blocks first <= n < last.
struct FwdWork {
  int row, head, batch;
  int first, last;
  __device__ bool empty() const { return first >= last; }
};

__device__ inline int clamp_to(int x, int low, int high) { return min(max(x, low), high); }

// The tile after `tile` for this block: the next that no block has taken, or, without a counter, in equal steps.
__device__ inline uint32_t fwd_next_tile(const FwdArgs& args, uint32_t tile) {
  return gridDim.x + (args.counter ? atomicAdd(args.counter, 1u) : tile);
}

template <int kBlockM, int kBlockN>
__device__ inline FwdWork fwd_work(const FwdArgs& args, uint32_t tile) {
  const FwdOrder& order = args.order;
  uint32_t top = order.blocks_m, low = 0, section = order.section;  // this pass: blocks low <= m < top
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
  const uint32_t in_section = tile / ((top - low) * section), first_head = in_section * section;
  const uint32_t within = tile - first_head * (top - low), heads = min(section, order.heads - first_head);
  const uint32_t block = top - 1 - within / heads, head = first_head + within % heads;

  FwdWork work;
  work.row = int(block) * kBlockM;
  work.batch = int(head / args.heads_q);
  work.head = int(head % args.heads_q);
  const int last_row = min(work.row + kBlockM, args.seq_q) - 1;
  const int begin = clamp_to(work.row + args.band_lo, 0, args.seq_k);
  const int end = clamp_to(last_row + args.band_hi + 1, 0, args.seq_k);
  work.first = begin / kBlockN;
  work.last = begin < end ? (end + kBlockN - 1) / kBlockN : work.first;
  return work;
}

}  // namespace flashsdpa
