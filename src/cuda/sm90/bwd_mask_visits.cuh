// Which visits a tile of the mask's gradient has (bwd_mask_gradient.h), and what the producer tells the consumers of them.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "bwd_mask_gradient.h"
#include "dropout_bits.cuh"
#include "fwd_schedule.cuh"
#include "plan_lists.cuh"
#include "ring.cuh"

namespace flashsdpa {

template <typename Tile>
struct BwdMaskShared {
  uint32_t base;
  __device__ uint32_t q(int stage) const { return base + Tile::kQOffset + stage * Tile::kQBytes; }
  __device__ uint32_t k(int stage) const { return base + Tile::kKOffset + stage * Tile::kKBytes; }
  __device__ uint32_t grad_out(int stage) const { return base + Tile::kGradOutOffset + stage * Tile::kGradOutBytes; }
  __device__ uint32_t v(int stage) const { return base + Tile::kVOffset + stage * Tile::kVBytes; }
  __device__ uint32_t stats(int stage, int piece) const {
    return base + Tile::kStatsOffset + (stage * Tile::kPieces + piece) * Tile::kStatsBytes;
  }
  // Two floats for each pair of a lane's scores, and for each thread of the consumers: its own, but at the end of a tile.
  __device__ uint32_t values(int pair, int thread) const {
    return base + Tile::kValuesOffset + (pair * (Tile::kConsumers * ptx::kWarpgroupThreads) + thread) * 8;
  }
  __device__ uint32_t values_stage(int stage) const { return base + Tile::kValuesOffset + stage * Tile::kValuesBytes; }
  __device__ uint32_t visit(int slot) const { return base + Tile::kSlotOffset + slot * Tile::kSlotBytes; }
  __device__ uint32_t unit() const { return base + Tile::kUnitOffset; }

  __device__ uint32_t full_q(int stage) const { return barrier(stage); }
  __device__ uint32_t empty_q(int stage) const { return barrier(Tile::kStages + stage); }
  __device__ uint32_t full_grad_out(int stage) const { return barrier(2 * Tile::kStages + stage); }  // dO and the stats
  __device__ uint32_t empty_grad_out(int stage) const { return barrier(3 * Tile::kStages + stage); }
  __device__ uint32_t full_v(int stage) const { return barrier(4 * Tile::kStages + stage); }
  __device__ uint32_t empty_v(int stage) const { return barrier(5 * Tile::kStages + stage); }
  __device__ uint32_t full_k(int stage) const { return barrier(kK + stage); }
  __device__ uint32_t empty_k(int stage) const { return barrier(kK + Tile::kStagesK + stage); }
  __device__ uint32_t full_visit(int slot) const { return barrier(kVisit + slot); }
  __device__ uint32_t empty_visit(int slot) const { return barrier(kVisit + Tile::kVisits + slot); }
  __device__ uint32_t full_values(int stage) const { return barrier(kValues + stage); }
  __device__ uint32_t empty_values(int stage) const { return barrier(kValues + Tile::kValuesStages + stage); }

 private:
  static constexpr int kK = 6 * Tile::kStages, kVisit = kK + 2 * Tile::kStagesK, kValues = kVisit + 2 * Tile::kVisits;
  static_assert(kValues + 2 * Tile::kValuesStages == Tile::kBarriers);
  __device__ uint32_t barrier(int i) const { return base + Tile::kBarrierOffset + 8 * i; }
};

template <typename Tile>
__device__ inline void bwd_mask_init_barriers(const BwdMaskShared<Tile>& shared) {
  constexpr int kConsumerWarps = Tile::kConsumers * kWarpsPerGroup;
  for (int s = 0; s < Tile::kStages; ++s) {
    ptx::mbarrier_init(shared.full_q(s), Tile::kPieces);
    ptx::mbarrier_init(shared.full_grad_out(s), Tile::kPieces);
    ptx::mbarrier_init(shared.full_v(s), 1);
    ptx::mbarrier_init(shared.empty_q(s), kConsumerWarps);
    ptx::mbarrier_init(shared.empty_grad_out(s), kConsumerWarps);
    ptx::mbarrier_init(shared.empty_v(s), kConsumerWarps);
  }
  for (int s = 0; s < Tile::kStagesK; ++s) {
    ptx::mbarrier_init(shared.full_k(s), 1);
    ptx::mbarrier_init(shared.empty_k(s), kConsumerWarps);
  }
  for (int slot = 0; slot < Tile::kVisits; ++slot) {
    ptx::mbarrier_init(shared.full_visit(slot), 1);
    ptx::mbarrier_init(shared.empty_visit(slot), kConsumerWarps);
  }
  for (int stage = 0; stage < Tile::kValuesStages; ++stage) {
    ptx::mbarrier_init(shared.full_values(stage), 1);
    ptx::mbarrier_init(shared.empty_values(stage), kConsumerWarps);
  }
  ptx::mbarrier_init_fence();
}

struct BwdMaskPlace {
  int batch, head, m, n;  // m, n: blocks of the tile's size
};

// The first visit of a tile. Along an axis in which the mask has size 1 it is 0, which is the mask's own place too.
template <typename Args>
__device__ inline BwdMaskPlace bwd_mask_first(const Args& args, int tile) {
  const int n = tile % args.tiles_n, rest = tile / args.tiles_n, plane = rest / args.tiles_m;
  return {plane / args.grad_heads, plane % args.grad_heads, rest % args.tiles_m, n};
}

// Whether the plan leaves any score of a tile.
template <typename Tile>
__device__ inline bool bwd_mask_kept(const FwdMask& mask, const BwdMaskPlace& tile) {
  constexpr int kRows = Tile::kBlockM / int(kGranule), kCols = Tile::kBlockN < kGranule ? 1 : Tile::kBlockN / int(kGranule);
  const int col = tile.n * Tile::kBlockN / int(kGranule);
  const int32_t* plan = mask.plan + tile.batch * mask.plan_batch + tile.head * mask.plan_head;
  for (int row = tile.m * kRows; row < min(tile.m * kRows + kRows, mask.rows); ++row) {
    const int32_t* list = plan + plan_row_offset(row, mask.cols);
    const int count = __ldg(list), before = entries_before(list + 1, count, col);
    if (before < count && (__ldg(list + 1 + before) >> 2) < col + kCols) return true;
  }
  return false;
}

// A unit's walk through those of its visits that hold a score within the band; keys fastest, then queries, heads, batches.
// Args: BwdMaskArgs, or their like for another family of kernels.
template <typename Tile>
struct BwdMaskWalk {
  BwdMaskPlace at;
  int64_t left;  // `at` included; 0: there is no visit

  template <typename Args>
  __device__ BwdMaskWalk(const Args& args, int unit) : first(bwd_mask_first(args, unit % args.tiles)) {
    const int part = unit / args.tiles;
    int64_t visits = int64_t(args.batches) * args.heads * args.blocks_m * args.blocks_n;
    if (!bwd_mask_kept<Tile>(args.bwd.mask, first)) visits = 0;
    int64_t from = visits * part / args.parts;
    left = visits * (part + 1) / args.parts - from;
    at.n = first.n + int(from % args.blocks_n);
    at.m = first.m + int((from /= args.blocks_n) % args.blocks_m);
    at.head = first.head + int((from /= args.blocks_m) % args.heads);
    at.batch = first.batch + int(from / args.heads);
    if (left > 0 && !visible(args)) advance(args);
  }
  template <typename Args>
  __device__ void advance(const Args& args) {
    do {
      if (++at.n < first.n + args.blocks_n) continue;
      at.n = first.n;
      if (++at.m < first.m + args.blocks_m) continue;
      at.m = first.m;
      if (++at.head < first.head + args.heads) continue;
      at.head = first.head;
      ++at.batch;
    } while (--left > 0 && !visible(args));
  }

 private:
  BwdMaskPlace first;

  template <typename Args>
  __device__ bool visible(const Args& args) const {
    const int query = at.m * Tile::kBlockM, key = at.n * Tile::kBlockN;
    const int end_query = min(query + Tile::kBlockM, args.bwd.seq_q), end_key = min(key + Tile::kBlockN, args.bwd.seq_k);
    return key <= end_query - 1 + args.bwd.band_hi && end_key - 1 >= query + args.bwd.band_lo;
  }
};

// What the producer tells of a visit, or of a unit without any.
struct BwdMaskVisit {
  enum Flag : uint32_t {
    kEnd = 1,      // no unit is left
    kFirst = 2,    // of its unit
    kLast = 4,     // of its unit
    kAny = 8,      // there is a visit
    kEdge = 16,    // there are scores that band or length remove
    kLeaveQ = 32,  // the next visit has another Q and dO
    kLeaveK = 64,  // the next visit has another K and V
    // Stage and phase of the barriers of Q and dO, of K and V, and of values: counted by the producer alone.
    kStageQ = 128,
    kPhaseQ = 256,
    kStageK = 512,
    kPhaseK = 1024,
    kStageValues = 2048,
    kPhaseValues = 4096,
  };
  uint32_t flags;
  int m, n, unit;
  int batch, head;  // with terms
};

template <typename Tile>
__device__ inline bool bwd_mask_edge(const BwdArgs& args, const BwdMaskPlace& at) {
  const int query = at.m * Tile::kBlockM, last_query = query + Tile::kBlockM - 1;
  const int key = at.n * Tile::kBlockN, last_key = key + Tile::kBlockN - 1;
  return last_key >= args.seq_k || last_key > query + args.band_hi || key < last_query + args.band_lo;
}

// By the one loader that tells.
template <typename Tile>
__device__ inline void bwd_mask_tell(const ScoreTerms& terms, const BwdMaskShared<Tile>& shared, Ring<Tile::kVisits>& ring,
                                     DropoutStreamWriter& streams, const BwdMaskVisit& visit) {
  const int slot = ring.stage();
  ptx::mbarrier_wait(shared.empty_visit(slot), ring.phase() ^ 1);
  ptx::store_shared_16(shared.visit(slot), visit.flags, uint32_t(visit.m), uint32_t(visit.n), uint32_t(visit.unit));
  if constexpr (Tile::kTerms) {
    ptx::store_shared_8(shared.visit(slot) + 16, uint32_t(visit.batch), uint32_t(visit.head));
    if (terms.seed) streams.lay(terms, visit.batch, visit.head, shared.visit(slot) + Tile::kSlotStream);
  }
  ptx::mbarrier_arrive(shared.full_visit(slot));
  ring.advance();
}

// What a consumer knows of the visit in turn: where it was told, for it has no registers to keep it. By whole warps; each word
// from one lane, so that the compiler knows it to be the same for all.
template <typename Tile>
struct BwdMaskHeard {
  const BwdMaskShared<Tile>& shared;
  Ring<Tile::kVisits> ring;

  __device__ void wait() const { ptx::mbarrier_wait(shared.full_visit(ring.stage()), ring.phase()); }
  __device__ void leave(int lane) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared.empty_visit(ring.stage()));
    ring.advance();
  }
  __device__ bool is(BwdMaskVisit::Flag flag) const { return word(0) & flag; }
  __device__ int q_stage() const { return is(BwdMaskVisit::kStageQ); }
  __device__ uint32_t q_phase() const { return is(BwdMaskVisit::kPhaseQ); }
  __device__ int k_stage() const { return is(BwdMaskVisit::kStageK); }
  __device__ uint32_t k_phase() const { return is(BwdMaskVisit::kPhaseK); }
  // V goes round with K; where it has one stage, its phase changes as K's stage does.
  static constexpr bool kLikeK = Tile::kStages == Tile::kStagesK;
  static_assert(kLikeK || (Tile::kStages == 1 && Tile::kStagesK == 2));
  __device__ int v_stage() const { return kLikeK ? k_stage() : 0; }
  __device__ uint32_t v_phase() const { return kLikeK ? k_phase() : uint32_t(k_stage()); }
  __device__ int values_stage() const { return is(BwdMaskVisit::kStageValues); }
  __device__ uint32_t values_phase() const { return is(BwdMaskVisit::kPhaseValues); }
  __device__ int m() const { return int(word(1)); }
  __device__ int n() const { return int(word(2)); }
  __device__ int unit() const { return int(word(3)); }
  __device__ int batch() const { return int(word(4)); }
  __device__ int head() const { return int(word(5)); }
  __device__ uint32_t stream() const { return shared.visit(ring.stage()) + Tile::kSlotStream; }

 private:
  __device__ uint32_t word(int i) const {
    return __shfl_sync(0xffffffffu, ptx::load_shared_4(shared.visit(ring.stage()) + 4 * i), 0);
  }
};

}  // namespace flashsdpa
