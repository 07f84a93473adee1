// The backward kernel's shared memory: addresses, barriers, and the tile that a block works on.
#pragma once

#include "../../ptx/global.cuh"
#include "../../ptx/mbarrier.cuh"
#include "bwd_tiles.h"
#include "fwd_schedule.cuh"
#include "ring.cuh"

namespace flashsdpa {

// Named barriers beside the producers' (FwdBarrier::kProducer, which load_tile uses).
enum class BwdBarrier : int { kConsumers = 2, kConsumer = 3 /* + consumer */ };

template <typename Tile>
struct BwdShared {
  uint32_t base;
  __device__ uint32_t k() const { return base + Tile::kKOffset; }
  __device__ uint32_t v() const { return base + Tile::kVOffset; }
  __device__ uint32_t q(int stage) const { return base + Tile::kQOffset + stage * Tile::kQBytes; }
  __device__ uint32_t grad_out(int stage) const { return base + Tile::kGradOutOffset + stage * Tile::kGradOutBytes; }
  __device__ uint32_t scores(int buffer) const { return base + Tile::kScoreOffset + buffer * Tile::kScoreBytes; }
  __device__ uint32_t piece(int consumer) const { return base + Tile::kPieceOffset + consumer * Tile::kPieceBytes; }
  __device__ uint32_t stats(int stage) const { return base + Tile::kStatsOffset + stage * Tile::kStatsBytes; }
  __device__ uint32_t visit(int stage) const { return base + Tile::kVisitOffset + 8 * stage; }
  __device__ uint32_t dk() const { return base + Tile::kDkOffset; }
  __device__ uint32_t dv() const { return base + Tile::kDvOffset; }
  __device__ uint32_t tile(int slot) const { return base + Tile::kTileOffset + kTileSlotBytes * slot; }

  __device__ uint32_t full_k() const { return barrier(0); }
  __device__ uint32_t full_v() const { return barrier(1); }
  __device__ uint32_t empty_kv() const { return barrier(2); }
  __device__ uint32_t full_q(int stage) const { return barrier(3 + stage); }  // Q and the stats
  __device__ uint32_t empty_q(int stage) const { return barrier(3 + Tile::kStages + stage); }
  __device__ uint32_t full_grad_out(int stage) const { return barrier(kGradOut + stage); }
  __device__ uint32_t empty_grad_out(int stage) const { return barrier(kGradOut + Tile::kStagesGradOut + stage); }
  __device__ uint32_t full_scores(int buffer) const { return barrier(kScores + buffer); }
  __device__ uint32_t empty_scores(int buffer) const { return barrier(kScores + 2 + buffer); }
  __device__ uint32_t full_piece(int consumer) const { return barrier(kScores + 4 + consumer); }
  __device__ uint32_t empty_piece(int consumer) const { return barrier(kScores + 4 + Tile::kAdders + consumer); }
  __device__ uint32_t full_tile(int slot) const { return barrier(kTiles + slot); }
  __device__ uint32_t empty_tile(int slot) const { return barrier(kTiles + kTileSlots + slot); }

 private:
  static constexpr int kGradOut = 3 + 2 * Tile::kStages, kScores = kGradOut + 2 * Tile::kStagesGradOut;
  static constexpr int kTiles = kScores + 4 + 2 * Tile::kAdders;
  static_assert(kTiles + 2 * kTileSlots == Tile::kBarriers);
  __device__ uint32_t barrier(int i) const { return base + Tile::kBarrierOffset + 8 * i; }
};

template <typename Tile>
__device__ inline void bwd_init_barriers(const BwdShared<Tile>& shared) {
  constexpr int kConsumerWarps = Tile::kConsumers * kWarpsPerGroup;
  ptx::mbarrier_init(shared.full_k(), 1);
  ptx::mbarrier_init(shared.full_v(), 1);
  ptx::mbarrier_init(shared.empty_kv(), Tile::kByKeys ? kConsumerWarps : 1);
  for (int s = 0; s < Tile::kStages; ++s) {
    ptx::mbarrier_init(shared.full_q(s), 1);
    ptx::mbarrier_init(shared.empty_q(s), kConsumerWarps);
  }
  for (int s = 0; s < Tile::kStagesGradOut; ++s) {
    ptx::mbarrier_init(shared.full_grad_out(s), 1);
    ptx::mbarrier_init(shared.empty_grad_out(s), kConsumerWarps);
  }
  for (int b = 0; b < 2; ++b) {
    ptx::mbarrier_init(shared.full_scores(b), kConsumerWarps);
    ptx::mbarrier_init(shared.empty_scores(b), kConsumerWarps);
  }
  for (int a = 0; a < Tile::kAdders; ++a) {
    ptx::mbarrier_init(shared.full_piece(a), kWarpsPerGroup);
    ptx::mbarrier_init(shared.empty_piece(a), 1);
  }
  for (int slot = 0; slot < kTileSlots; ++slot) {
    ptx::mbarrier_init(shared.full_tile(slot), 1);
    ptx::mbarrier_init(shared.empty_tile(slot), kConsumerWarps + Tile::kAdders);
  }
  ptx::mbarrier_init_fence();
}

// Tile number `tile`: kBlockN keys from `row` on of one head of k and v, against query blocks first <= m < last of
// each query head of its group.
template <typename Tile>
__device__ inline FwdWork bwd_work(const BwdArgs& args, uint32_t tile) {
  if (tile >= args.order.tiles) return {-1, 0, 0, 0, 0};
  const TilePlace place = place_of(args.order, tile);
  FwdWork work;
  const bool rising = place.head >= args.rising_from;
  work.row = int(rising ? args.order.blocks_m - 1 - place.block : place.block) * Tile::kBlockN;
  work.batch = int(place.head / args.heads_kv);
  work.head = int(place.head % args.heads_kv);
  const int end_key = min(work.row + Tile::kBlockN, args.seq_k);
  const int begin = clamp_to(work.row - args.band_hi, 0, args.seq_q);
  const int end = clamp_to(end_key - args.band_lo, 0, args.seq_q);
  work.first = begin / Tile::kBlockM;
  work.last = begin < end ? (end + Tile::kBlockM - 1) / Tile::kBlockM : work.first;
  return work;
}

// The tile in turn, by whole warps; it stays there until they leave it.
template <typename Tile>
__device__ inline FwdWork bwd_take_work(const BwdShared<Tile>& shared, const Ring<kTileSlots>& ring) {
  ptx::mbarrier_wait(shared.full_tile(ring.stage()), ring.phase());
  return fwd_get_work<false>(shared.tile(ring.stage()));
}
// Behind it, the phase of the barriers of K and V, which consumers need not keep then.
constexpr int kKvPhaseOffset = 20;
template <typename Tile>
__device__ inline uint32_t bwd_kv_phase(const BwdShared<Tile>& shared, const Ring<kTileSlots>& ring) {
  return ptx::load_shared_4(shared.tile(ring.stage()) + kKvPhaseOffset);
}
template <typename Tile>
__device__ inline void bwd_leave_work(const BwdShared<Tile>& shared, Ring<kTileSlots>& ring, int lane) {
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(shared.empty_tile(ring.stage()));
  ring.advance();
}

// The query blocks of a tile in the order in which all roles visit them: heads of the group, in each its blocks.
struct BwdVisit {
  int head, m, first, last, left;
  __device__ BwdVisit(const FwdWork& work, int group)
      : head(work.head * group), m(work.first), first(work.first), last(work.last), left((work.last - work.first) * group) {}
  __device__ void advance() {
    --left;
    if (++m == last) m = first, ++head;
  }
};

// What the loader tells the consumers of a stage of Q: the block's number, and whether there are scores in it that do not
// take part, or scores to be multiplied by the sign.
template <typename Tile>
__device__ inline uint32_t bwd_visit_word(const BwdArgs& args, const FwdWork& work, int m) {
  const int first_query = m * Tile::kBlockM, last_query = first_query + Tile::kBlockM - 1;
  const int last_key = work.row + Tile::kBlockN - 1;
  const bool plain = args.sign == 1.f && last_key < args.seq_k && last_key <= first_query + args.band_hi &&
                     work.row >= last_query + args.band_lo;
  return uint32_t(m) << 1 | uint32_t(!plain);
}
// By whole warps; told to the compiler to be the same for all lanes.
template <typename Tile>
__device__ inline uint32_t bwd_visit(const BwdShared<Tile>& shared, int stage) {
  return __shfl_sync(0xffffffffu, ptx::load_shared_4(shared.visit(stage)), 0);
}

// Query block m of one head, counted through all heads and batches.
__device__ inline int64_t bwd_block(const BwdArgs& args, const FwdWork& work, const BwdVisit& at) {
  return (int64_t(work.batch) * args.heads_q + at.head) * args.blocks_m + at.m;
}

// In a fixed order of additions to dQ, how many key blocks add to query block m before this one. It is the order in which
// the head's tiles are handed out, so what a tile waits for is never behind it. With falling keys, and a band that moves
// with the queries, as causal does, the block before is at query block m just one step earlier; with rising keys a tile
// has to start one step after the one before.
template <typename Tile>
__device__ inline uint32_t bwd_turn(const BwdArgs& args, const FwdWork& work, int m) {
  if (uint32_t(work.batch * args.heads_kv + work.head) >= args.rising_from) {
    const int lowest = max(m * Tile::kBlockM + args.band_lo, 0);  // the first key that a query here sees
    return uint32_t(work.row / Tile::kBlockN - lowest / Tile::kBlockN);
  }
  const int end_query = min((m + 1) * Tile::kBlockM, args.seq_q);
  const int highest = min(end_query + args.band_hi, args.seq_k) - 1;  // the last key that a query here sees
  return uint32_t(highest / Tile::kBlockN - work.row / Tile::kBlockN);
}

__device__ inline void bwd_wait_turn(const uint32_t* turn, uint32_t mine) {
  while (ptx::load_acquire(turn) != mine) {
  }
}

}  // namespace flashsdpa
