// Which blocks of queries a tile of keys visits, first head first, and what the roles tell each other of them: all of its band, or
// those that the mask plan leaves of it. With a mask only the loader walks the plan.
#pragma once

#include <type_traits>

#include "bwd_shared.cuh"
#include "plan_lists.cuh"

namespace flashsdpa {

// Without a mask: heads of the group, in each the blocks of the band. Every role counts them for itself. Tiles that all see the same
// blocks begin at different ones (BwdArgs::spread) and come round, as they would all add to the same block of dQ at a time.
struct BwdVisit {
  int head, m, first, last, begin, left;
  BwdVisit() = default;
  __device__ BwdVisit(const BwdArgs& args, const FwdWork& work)
      : head(work.head * args.group),
        first(work.first),
        last(work.last),
        begin(first + int(uint64_t(work.row) * args.spread >> 32)),
        left((last - first) * args.group) {
    m = begin;
  }
  __device__ void start(const BwdArgs& args, const FwdWork& work) { *this = BwdVisit(args, work); }
  __device__ void advance(const BwdArgs&, const FwdWork&) {
    --left;
    if (++m == last) m = first;
    if (m == begin) ++head;
  }
};

// The loader's walk through the plan's transposed lists: the blocks of each head of the group that hold a score which plan
// and band both keep; without a plan, which kernels with terms may be, those of the band. One block ahead, as it must tell which
// is the last.
template <typename Tile>
struct BwdPlanWalk {
  static constexpr int kLists = Tile::kBlockN / int(kGranule);  // granules of keys: one list each; by keys one a consumer
  static constexpr int kRows = Tile::kBlockM / int(kGranule);   // granules of queries in a block
  static_assert(!Tile::kMasked || (Tile::kBlockN % kGranule == 0 && Tile::kBlockM % kGranule == 0));
  struct Block {
    int head, m;
    uint32_t classes;  // 2 bits a list
  };

  int head, m;  // the block in turn
  uint32_t classes;
  int left;  // 0: there is none, 1: it is the last, else 2

  __device__ const Block& after() const { return ahead; }  // of the last one m is -1
  __device__ void start(const BwdArgs& args, const FwdWork& work) {
    left = 0;
    if (work.end() || work.empty()) return;
    ahead.head = work.head * args.group - 1;  // with nothing left
    ahead.m = Tile::kTerms ? work.last : 0;
#pragma unroll
    for (int c = 0; c < kLists; ++c) count[c] = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) advance(args, work);  // its code once: there is much of it
  }
  __device__ void advance(const BwdArgs& args, const FwdWork& work) {
    head = ahead.head;
    m = ahead.m;
    classes = ahead.classes;
    left = 0;
    if (m < 0) return;
    step(args, work);
    left = ahead.m < 0 ? 1 : 2;
  }

 private:
  int next[kLists];   // entry to come, from the start of the plan
  int count[kLists];  // of entries to come
  Block ahead;

  __device__ static int entry(const BwdArgs& args, const FwdWork& work, int head, int at) {
    return __ldg(args.mask.plan + work.batch * args.mask.plan_batch + head * args.mask.plan_head + at);
  }
  // The lists of a head, from the tile's first block on.
  __device__ void open_head(const BwdArgs& args, const FwdWork& work) {
    const FwdMask& mask = args.mask;
#pragma unroll
    for (int c = 0; c < kLists && !(Tile::kTerms && !mask.plan); ++c) {
      const int key = work.row + c * int(kGranule), column = mask.one_key ? 0 : key / int(kGranule);
      count[c] = 0;
      if (key < args.seq_k) {
        next[c] = plan_col_offset<int>(column, mask.rows, mask.cols) + 1;
        count[c] = entry(args, work, ahead.head, next[c] - 1);
        if (work.first > 0 && mask.queries > 1) {
          const int32_t* plan = mask.plan + work.batch * mask.plan_batch + ahead.head * mask.plan_head;
          const int before = entries_before(plan + next[c], count[c], work.first * kRows);
          next[c] += before;
          count[c] -= before;
        }
      }
    }
    ahead.m = work.first - 1;
  }
  // The block after `ahead` becomes `ahead`; -1 for its m if there is none.
  __device__ void step(const BwdArgs& args, const FwdWork& work) {
    while (!step_in_head(args, work)) {
      if (ahead.head == work.head * args.group + args.group - 1) {
        ahead.m = -1;
        return;
      }
      ++ahead.head;
      open_head(args, work);
    }
  }
  __device__ bool step_in_head(const BwdArgs& args, const FwdWork& work) {
    if (Tile::kTerms && !args.mask.plan) {
      static_assert(kFull == 1 && kLists <= 2);
      ahead.classes = kLists == 1 ? 1 : 5;
      return ++ahead.m < work.last;
    }
    int block = work.last;
#pragma unroll
    for (int c = 0; c < kLists; ++c) {
      if (count[c] > 0) {  // where all queries are alike, every block is in the list
        block = min(block, args.mask.queries == 1 ? ahead.m + 1 : (entry(args, work, ahead.head, next[c]) >> 2) / kRows);
      }
    }
    if (block >= work.last) return false;
    ahead.m = block;
    ahead.classes = 0;
#pragma unroll
    for (int c = 0; c < kLists; ++c) ahead.classes |= uint32_t(take(args, work, c)) << 2 * c;
    return true;
  }
  // The class of list c's granules of the block ahead together; takes their entries off the list.
  __device__ int take(const BwdArgs& args, const FwdWork& work, int c) {
    if (args.mask.queries == 1) return count[c] > 0 ? entry(args, work, ahead.head, next[c]) & 3 : kEmpty;
    int all = kEmpty;
#pragma unroll
    for (int g = 0; g < kRows; ++g) {
      const int granule = ahead.m * kRows + g;
      const int found = count[c] > 0 ? entry(args, work, ahead.head, next[c]) : -1;
      const bool here = found >> 2 == granule;
      next[c] += here;
      count[c] -= here;
      all = g == 0 ? (here ? found & 3 : kEmpty) : join_classes(all, here ? found & 3 : kEmpty);
    }
    return all;
  }
};

// What the loader tells of a block of queries, in one word: its number; whether there are scores in it that band or length
// remove, or, without a mask, scores to be multiplied by the sign; with a mask the classes of its granules and whether it is the
// tile's last, and in a second word its head.
template <bool kMasked>
struct BwdWord {
  static constexpr int kNumber = kMasked ? 6 : 1;
  uint32_t word;
  __device__ bool edge() const { return word % 2 != 0; }
  __device__ int m() const { return int(word >> kNumber); }
  __device__ GranuleClass of(int list) const { return GranuleClass(word >> (1 + 2 * list) & 3); }
  __device__ bool final() const { return word >> 5 & 1; }
};

// What the other roles know of the blocks of a tile with a mask: what the loader told of each.
struct BwdFollow {
  int head = 0, m = 0, left;
  bool final = false;
  __device__ BwdFollow(const BwdArgs&, const FwdWork& work) : left(!work.empty()) {}
  __device__ void hear(const BwdWord<true>& told, int its_head) {
    head = its_head;
    m = told.m();
    final = told.final();
  }
  __device__ void advance(const BwdArgs&, const FwdWork&) { left = !final; }
};
template <typename Tile>
using BwdFollower = std::conditional_t<Tile::kMasked, BwdFollow, BwdVisit>;

template <typename Tile>
__device__ inline uint32_t bwd_visit_word(const BwdArgs& args, const FwdWork& work, int m) {
  const int first_query = m * Tile::kBlockM, last_query = first_query + Tile::kBlockM - 1;
  const int last_key = work.row + Tile::kBlockN - 1;
  const bool plain = (Tile::kMasked || args.sign == 1.f) && last_key < args.seq_k && last_key <= first_query + args.band_hi &&
                     work.row >= last_query + args.band_lo;
  return uint32_t(m) << BwdWord<Tile::kMasked>::kNumber | uint32_t(!plain);
}
template <typename Tile, typename Visit>
__device__ inline void bwd_tell(const BwdArgs& args, const BwdShared<Tile>& shared, int slot, const FwdWork& work, const Visit& at) {
  uint32_t word = bwd_visit_word<Tile>(args, work, at.m);
  if constexpr (Tile::kMasked) {
    word |= at.classes << 1 | uint32_t(at.left == 1) << 5;
    ptx::store_shared_4(shared.visit(slot) + 4, uint32_t(at.head));
  }
  ptx::store_shared_4(shared.visit(slot), word);
}
// By whole warps; told to the compiler to be the same for all lanes.
template <typename Tile>
__device__ inline BwdWord<Tile::kMasked> bwd_visit(const BwdShared<Tile>& shared, int slot) {
  return {__shfl_sync(0xffffffffu, ptx::load_shared_4(shared.visit(slot)), 0)};
}
template <typename Tile>
__device__ inline int bwd_visit_head(const BwdShared<Tile>& shared, int slot) {
  return int(__shfl_sync(0xffffffffu, ptx::load_shared_4(shared.visit(slot) + 4), 0));
}

// By one thread.
template <typename Tile>
__device__ inline void bwd_hear(const BwdShared<Tile>& shared, int slot, BwdFollow& at) {
  at.hear(BwdWord<true>{ptx::load_shared_4(shared.visit(slot))}, int(ptx::load_shared_4(shared.visit(slot) + 4)));
}

// Query block m of one head, counted through all heads and batches.
template <typename Visit>
__device__ inline int64_t bwd_block(const BwdArgs& args, const FwdWork& work, const Visit& at) {
  return (int64_t(work.batch) * args.heads_q + at.head) * args.blocks_m + at.m;
}

// In a fixed order of additions to dQ, how many key blocks add to query block m before this one. It is the order in which
// the head's tiles are handed out, last keys first, so what a tile waits for is never behind it. Under causal the tile before is at
// query block m one step and more before this one. Without a band it would be there at the same time: tiles that are
// handed out together are then those of many heads.
template <typename Tile>
__device__ inline uint32_t bwd_turn_of_band(const BwdArgs& args, const FwdWork& work, int m) {
  const int end_query = min((m + 1) * Tile::kBlockM, args.seq_q);
  const int highest = min(end_query + args.band_hi, args.seq_k) - 1;  // the last key that a query here sees
  return uint32_t(highest / Tile::kBlockN - work.row / Tile::kBlockN);
}

// With a mask the tiles that visit a query block are those of its lists of granules of keys. There the turn is told by who
// was there last: the number of its key block and one more; 0, nobody.
template <typename Tile>
__device__ inline uint32_t bwd_turn_of_plan(const BwdArgs& args, const FwdWork& work, int head, int m) {
  constexpr int kKeys = Tile::kBlockN / int(kGranule), kRows = Tile::kBlockM / int(kGranule);
  const FwdMask& mask = args.mask;
  const int mine = work.row / Tile::kBlockN, first_query = m * Tile::kBlockM;
  const int end_query = min(first_query + Tile::kBlockM, args.seq_q);
  const int highest = (min(end_query + args.band_hi, args.seq_k) - 1) / Tile::kBlockN;
  if (mask.one_key || (Tile::kTerms && !mask.plan)) return mine == highest ? 0 : uint32_t(mine) + 2;
  const int32_t* plan = mask.plan + work.batch * mask.plan_batch + head * mask.plan_head;
  int before = highest + 1;
  for (int r = 0; r < kRows; ++r) {
    const int row = mask.queries == 1 ? 0 : m * kRows + r;
    if (row >= mask.rows) break;
    const int32_t* list = plan + plan_row_offset(row, mask.cols);
    const int count = __ldg(list), behind = entries_before(list + 1, count, (mine + 1) * kKeys);
    if (behind < count) before = min(before, (__ldg(list + 1 + behind) >> 2) / kKeys);
  }
  return before > highest ? 0 : uint32_t(before) + 1;
}

// The value of BwdArgs::turns at which this tile adds to a query block, and by how much it goes up then.
template <typename Tile, typename Visit>
__device__ inline uint32_t bwd_turn(const BwdArgs& args, const FwdWork& work, const Visit& at) {
  if constexpr (Tile::kMasked) return bwd_turn_of_plan<Tile>(args, work, at.head, at.m);
  return bwd_turn_of_band<Tile>(args, work, at.m);
}
template <typename Tile>
__device__ inline uint32_t bwd_turn_step(const FwdWork& work, uint32_t turn) {
  return Tile::kMasked ? uint32_t(work.row / Tile::kBlockN) + 1 - turn : 1;
}

__device__ inline void bwd_wait_turn(const uint32_t* turn, uint32_t mine) {
  while (ptx::load_acquire(turn) != mine) {
  }
}

}  // namespace flashsdpa
