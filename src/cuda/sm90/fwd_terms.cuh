// A consumer's view of the terms of its tile (score_terms.h): what happens to scores before the mask, to weights behind the
// softmax, and to its rows at their end. Without terms: nothing.
#pragma once

#include "dropout_bits.cuh"
#include "fwd_args.h"
#include "fwd_schedule.cuh"
#include "fwd_softmax.cuh"
#include "score_terms.cuh"

namespace flashsdpa {

template <typename Tile, bool kTerms = Tile::kTerms>
struct TileTerms {
  __device__ void start(const FwdArgs&, const FwdWork&, uint32_t, int) {}
  __device__ void draw(const FwdArgs&, int, int) {}
  template <int kCount>
  __device__ void apply(const FwdArgs&, float (&)[kCount], int) const {}
  __device__ uint32_t keep(int, uint32_t pair) const { return pair; }
  __device__ void keep_again(const FwdArgs&) {}
  __device__ void finish(const FwdArgs&, const FwdWork&, OnlineSoftmax&) {}
  __device__ float factor(const FwdArgs&, const OnlineSoftmax& softmax, int row) const { return softmax.inverse(row); }
};

template <typename Tile>
struct TileTerms<Tile, true> {
  static_assert(!Tile::kFew, "rows are queries");
  static constexpr int kWords = Tile::kBlockN / 64;

  int batch, head;
  float shrunk[2];  // what a sink leaves of a row's output
  DropoutStream stream;
  uint32_t kept[kWords], ahead[kWords];  // of the block in turn, and of the one before an odd one

  // `memory`: this warp's, of kDropoutStreamBytes.
  __device__ void start(const FwdArgs& args, const FwdWork& work, uint32_t memory, int lane) {
    batch = work.batch;
    head = work.head;
    if (args.terms.seed) stream = DropoutStream(args.terms, batch, head, lane, memory);
  }
  // Which weights of block n stay, where n is odd with those of the block before it, which mostly comes next: then `follows`. Only
  // every second block is there a meet(). The lane's first query, and its first key counted from the block's.
  template <typename Meet>
  __device__ void draw(const FwdArgs& args, int n, bool follows, int query, int key, const Meet& meet) {
    if (!args.terms.seed) {
#pragma unroll
      for (uint32_t& word : kept) word = 0xffffffffu;
    } else if (follows && n % 2 == 0) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) kept[w] = ahead[w];
    } else {
      meet();
      uint32_t both[2 * kWords] = {};
      stream.template draw<false, 4, kWords>(query, n / 2 * 2 * Tile::kBlockN + key, both, n % 2 ? 2 * kWords : kWords);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        ahead[w] = both[w];
        kept[w] = both[kWords + w];
      }
    }
    ptx::wgmma_compute_here(kept, args.seq_q == 0);
  }
  // Products to scores. `place`: of the lane's first row among the keys, counted from its first column.
  template <int kCount>
  __device__ void apply(const FwdArgs& args, float (&s)[kCount], int place) const {
    scale_and_cap(args.terms, s);
    if (args.terms.slopes.data) {
      take_slopes_off(s, value_of_head(args.terms.slopes, batch, head), place + args.terms.diagonal);
    }
  }
  // Of weights i and i + 1.
  __device__ uint32_t keep(int i, uint32_t pair) const { return keep_pair(kept, i, pair); }

  // Before the weights of a block are made once more: the compiler would keep what it found out about each of them till then.
  __device__ void keep_again(const FwdArgs& args) {
    const uint32_t nothing = args.seq_q == 0 ? ~0u : 0u;  // which is known at run time alone
#pragma unroll
    for (uint32_t& word : kept) word ^= nothing;
  }

  // The sums are reduced.
  __device__ void finish(const FwdArgs& args, const FwdWork& work, OnlineSoftmax& softmax) {
    shrunk[0] = shrunk[1] = args.terms.rescale;
    if (!args.terms.sinks.data) return;
    const float sink = value_of_head(args.terms.sinks, work.batch, work.head);
#pragma unroll
    for (int row = 0; row < 2; ++row) shrunk[row] *= softmax.add(row, sink);
  }
  __device__ float factor(const FwdArgs&, const OnlineSoftmax& softmax, int row) const {
    return softmax.inverse(row) * shrunk[row];
  }
};

}  // namespace flashsdpa
