// Masked attention: which key blocks a tile visits, from the mask plan, and what the mask does to a block of scores.
//
// The producer walks the plan and tells the consumers, with each block of K, its number and what there is to do to it.
#pragma once

#include "../../mask_plan.h"
#include "../../ptx/warpgroup.cuh"
#include "fwd_args.h"
#include "fwd_rows.cuh"
#include "fwd_schedule.cuh"
#include "fwd_softmax.cuh"
#include "fwd_tiles.h"

namespace flashsdpa {

// A block of keys and, for each consumer, the class of its granules together: kFull, all kept; kEmpty, none; kBits, as the
// bits say; kMixed, values to add. In one word of shared memory.
struct FwdBlock {
  int n;             // key block; -1: there is none
  uint32_t classes;  // 2 bits a consumer
  bool final;        // the last one of its tile

  __device__ bool none() const { return n < 0; }
  __device__ GranuleClass of(int consumer) const { return GranuleClass(classes >> 2 * consumer & 3); }
  __device__ uint32_t word() const { return uint32_t(n) << 8 | classes << 1 | uint32_t(final); }
  __device__ static FwdBlock from(uint32_t word) { return {int(word >> 8), word >> 1 & 0x3f, bool(word & 1)}; }
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
  __device__ FwdBlock step() { return {next >= first ? next-- : -1, 0, false}; }
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
        next[c] = mask.one_key || whole ? count - 1 : last_before(entries[c], count, work.last);
      }
      any |= next[c] >= 0;
    }
    first = work.first;
    one_key = mask.one_key;
    alike = any ? work.last - 1 : -1;
  }

  // The last of `count` entries, keys ascending, whose granule lies before block `end`; -1 if there is none.
  __device__ static int last_before(const int32_t* entries, int count, int end) {
    int low = 0;  // entries before `low` lie before `end`, those from `count` on do not
    while (low < count) {
      const int middle = (low + count) / 2;
      if ((__ldg(entries + middle) >> 2) / kGranules < end) {
        low = middle + 1;
      } else {
        count = middle;
      }
    }
    return low - 1;
  }

  __device__ static int join(int a, int b) { return a == b ? a : a == kMixed || b == kMixed ? kMixed : kBits; }

  __device__ FwdBlock step() {
    FwdBlock block{-1, 0, false};
    if (one_key) {
      if (alike < first) return block;
      block.n = alike--;
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
    if (block.n < first) return {-1, 0, false};
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
      for (int g = 1; g < kGranules; ++g) all = join(all, found[g]);
      block.classes |= uint32_t(all) << 2 * c;
    }
    return block;
  }
};

// The bits of a lane's two rows for one block of keys.
template <typename Tile>
struct FwdBits {
  static constexpr int kWords = Tile::kBlockN / 32;
  uint32_t words[2][kWords];

  // Only a kBits block has any.
  __device__ void load(const FwdMask& mask, const int32_t* plan, GranuleClass kind, const int (&query)[2], int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kind == kBits) {
        const int32_t* row = plan + mask.bits_offset + min(query[half], mask.queries - 1) * mask.bits_stride;
        load_row(row + (mask.one_key ? 0 : n * kWords), words[half]);
        if (mask.one_key) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) words[half][w] = words[half][0];
        }
      } else {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[half][w] = 0;
      }
    }
  }

  // Scores whose bit is 0 are removed.
  template <int kCount>
  __device__ void apply(float (&s)[kCount], int lane) const {
    const int shift = 2 * (lane % 4);  // the lane's first column
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = score_column(i);
      const uint32_t word = words[score_row(i)][column / 32] >> shift;
      s[i] = word >> column % 32 & 1 ? s[i] : kMinusInfinity;
    }
  }

 private:
  __device__ static void load_row(const int32_t* row, uint32_t (&out)[2]) {
    const uint2 pair = __ldg(reinterpret_cast<const uint2*>(row));
    out[0] = pair.x;
    out[1] = pair.y;
  }
  __device__ static void load_row(const int32_t* row, uint32_t (&out)[4]) {
    const uint4 quad = __ldg(reinterpret_cast<const uint4*>(row));
    out[0] = quad.x;
    out[1] = quad.y;
    out[2] = quad.z;
    out[3] = quad.w;
  }
};

// An element of an additive mask as float32.
__device__ inline float mask_value(const FwdMask& mask, int64_t at) {
  switch (mask.dtype) {
    case DType::kBFloat16: return ptx::unpack<true>(__ldg(static_cast<const uint16_t*>(mask.values) + at));
    case DType::kFloat16: return ptx::unpack<false>(__ldg(static_cast<const uint16_t*>(mask.values) + at));
    case DType::kFloat32: return __ldg(static_cast<const float*>(mask.values) + at);
    default: return float(__ldg(static_cast<const double*>(mask.values) + at));
  }
}

// Adds the mask to the scores, which are scaled already; -inf removes a score, also one that is NaN.
template <int kCount>
__device__ inline void add_values(const FwdMask& mask, int head, int batch, const int (&query)[2], int first_column,
                                  float (&s)[kCount]) {
  const int64_t plane = batch * mask.stride_batch + head * mask.stride_head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = plane + min(query[half], mask.queries - 1) * mask.stride_query;
#pragma unroll
    for (int i = 2 * half; i < kCount; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = min(first_column + score_column(i) + e, mask.keys - 1);  // past the end: removed later
        const float value = mask_value(mask, row + column * mask.stride_key);
        s[i + e] = value == kMinusInfinity ? kMinusInfinity : s[i + e] + value;
      }
    }
  }
}

// A consumer's view of the blocks it gets.
template <typename Tile, bool kMasked = Tile::kMasked>
struct BlockMask {  // without a mask: all there is to know is the number, which the consumer counts down itself
  __device__ void start(const FwdArgs&, const FwdWork&, const int (&)[2]) {}
  __device__ void take(const FwdArgs&, uint32_t, int, int&) {}
  __device__ bool more(int n, int first) const { return n >= first; }
  template <int kCount>
  __device__ void apply(const FwdArgs&, const FwdWork&, int, int, float (&)[kCount]) const {}
};

template <typename Tile>
struct BlockMask<Tile, true> {
  const int32_t* plan;
  int query[2];  // of the lane's rows
  FwdBlock block;
  GranuleClass kind;
  FwdBits<Tile> bits;

  __device__ void start(const FwdArgs& args, const FwdWork& work, const int (&rows)[2]) {
    plan = plan_of<Tile>(args, work);
    query[0] = rows[0];
    query[1] = rows[1];
    block.final = false;
  }
  // The word that came with the block of K; its bits are asked for at once, so that they arrive under the product.
  __device__ void take(const FwdArgs& args, uint32_t slot, int consumer, int& n) {
    block = FwdBlock::from(__shfl_sync(0xffffffffu, ptx::load_shared_4(slot), 0));
    kind = block.of(consumer);
    n = block.n;
    bits.load(args.mask, plan, kind, query, n);
  }
  __device__ bool more(int, int) const { return !block.final; }

  template <int kCount>
  __device__ void apply(const FwdArgs& args, const FwdWork& work, int n, int lane, float (&s)[kCount]) const {
    if (args.sign != 1.f) {
#pragma unroll
      for (float& score : s) score *= args.sign;
    }
    if (kind == kMixed) {
      add_values(args.mask, fwd_first_head<Tile>(args, work.head), work.batch, query,
                 n * Tile::kBlockN + 2 * (lane % 4), s);
    } else if (kind != kFull) {
      bits.apply(s, lane);
    }
  }
};

}  // namespace flashsdpa
