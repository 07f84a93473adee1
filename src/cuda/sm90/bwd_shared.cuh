// The backward kernel's shared memory: addresses, barriers, and the tile that a block works on.
#pragma once

#include "../../ptx/global.cuh"
#include "../../ptx/mbarrier.cuh"
#include "bwd_tiles.h"
#include "fwd_schedule.cuh"
#include "ring.cuh"

namespace flashsdpa {

// Named barriers beside the producers' (FwdBarrier::kProducer, which load_tile uses).
enum class BwdBarrier : int { kConsumers = 2, kOrder = 3 /* + consumer */ };

template <typename Tile>
struct BwdShared {
  uint32_t base;
  __device__ uint32_t k(int stage) const { return base + Tile::kKOffset + stage * Tile::kKBytes; }
  __device__ uint32_t v() const { return base + Tile::kVOffset; }
  __device__ uint32_t q(int stage) const { return base + Tile::kQOffset + stage * Tile::kQBytes; }
  __device__ uint32_t grad_out(int stage) const { return base + Tile::kGradOutOffset + stage * Tile::kGradOutBytes; }
  __device__ uint32_t scores(int buffer) const { return base + Tile::kScoreOffset + buffer * Tile::kScoreBytes; }
  __device__ uint32_t piece(int consumer) const { return base + Tile::kPieceOffset + consumer * Tile::kPieceBytes; }
  __device__ uint32_t stats(int stage) const { return base + Tile::kStatsOffset + stage * Tile::kStatsBytes; }
  __device__ uint32_t visit(int slot) const { return base + Tile::kVisitOffset + 8 * slot; }
  // Values of a mask: a warp's own, or a box of 64 keys.
  __device__ uint32_t values(int consumer, int warp) const {
    return base + Tile::kValuesOffset + (consumer * kWarpsPerGroup + warp) * Tile::kValuesBytes;
  }
  __device__ uint32_t values_box(int stage, int box) const {
    return base + Tile::kValuesOffset + (stage * Tile::kValuesBoxes + box) * Tile::kValuesBoxBytes;
  }
  __device__ uint32_t dk(int stage) const { return base + Tile::kDkOffset + stage * Tile::kKBytes; }
  __device__ uint32_t dv() const { return base + Tile::kDvOffset; }
  __device__ uint32_t tile(int slot) const { return base + Tile::kTileOffset + kTileSlotBytes * slot; }
  __device__ uint32_t stream(int stage) const { return base + Tile::kStreamOffset + Tile::kStreamBytes * stage; }

  // K and V go round with the tiles; of one without blocks nothing is loaded.
  __device__ uint32_t full_v() const { return barrier(0); }
  __device__ uint32_t empty_v() const { return barrier(1); }
  __device__ uint32_t full_k(int stage) const { return barrier(2 + stage); }
  __device__ uint32_t empty_k(int stage) const { return barrier(2 + Tile::kStagesK + stage); }
  __device__ uint32_t full_q(int stage) const { return barrier(kQ + stage); }  // Q and the stats
  __device__ uint32_t empty_q(int stage) const { return barrier(kQ + Tile::kStages + stage); }
  __device__ uint32_t full_grad_out(int stage) const { return barrier(kGradOut + stage); }
  __device__ uint32_t empty_grad_out(int stage) const { return barrier(kGradOut + Tile::kStagesGradOut + stage); }
  __device__ uint32_t full_scores(int buffer) const { return barrier(kScores + buffer); }
  __device__ uint32_t empty_scores(int buffer) const { return barrier(kScores + 2 + buffer); }
  // What an adder adds at once is there; is read.
  __device__ uint32_t full_piece(int adder) const { return barrier(kScores + 4 + adder); }
  __device__ uint32_t empty_piece(int adder, int part = 0) const { return barrier(kScores + 7 + 3 * part + adder); }
  // Where dQ is not staged, in a fixed order: this block's turn has come; all consumers have added to it.
  __device__ uint32_t turn() const { return barrier(kScores + 4); }
  __device__ uint32_t added() const { return barrier(kScores + 5); }
  __device__ uint32_t full_tile(int slot) const { return barrier(kTiles + slot); }
  __device__ uint32_t empty_tile(int slot) const { return barrier(kTiles + kTileSlots + slot); }

 private:
  static constexpr int kQ = 2 + 2 * Tile::kStagesK, kGradOut = kQ + 2 * Tile::kStages, kScores = kGradOut + 2 * Tile::kStagesGradOut;
  static constexpr int kTiles = kScores + 13;
  static_assert(kTiles + 2 * kTileSlots == Tile::kBarriers);
  __device__ uint32_t barrier(int i) const { return base + Tile::kBarrierOffset + 8 * i; }
};

template <typename Tile>
__device__ inline void bwd_init_barriers(const BwdShared<Tile>& shared) {
  constexpr int kConsumerWarps = Tile::kConsumers * kWarpsPerGroup;
  ptx::mbarrier_init(shared.full_v(), 1);
  ptx::mbarrier_init(shared.empty_v(), Tile::kByKeys ? kConsumerWarps : 1);
  for (int s = 0; s < Tile::kStagesK; ++s) {
    ptx::mbarrier_init(shared.full_k(s), 1);
    ptx::mbarrier_init(shared.empty_k(s), Tile::kByKeys && !Tile::kKeysAhead ? kConsumerWarps : 1);
  }
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
  if constexpr (Tile::kStaged) {
    for (int a = 0; a < Tile::kAdders; ++a) {
      ptx::mbarrier_init(shared.full_piece(a), kWarpsPerGroup);
      for (int part = 0; part < Tile::kPieceParts; ++part) ptx::mbarrier_init(shared.empty_piece(a, part), 1);
    }
  } else {
    ptx::mbarrier_init(shared.turn(), 1);
    ptx::mbarrier_init(shared.added(), kConsumerWarps);
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
  // First keys first, under causal the longest tiles; in a fixed order of additions, last keys first (bwd_turn).
  work.row = int(args.turns ? place.block : args.order.blocks_m - 1 - place.block) * Tile::kBlockN;
  work.batch = int(place.head / args.heads_kv);
  work.head = int(place.head % args.heads_kv);
  if (Tile::kMasked && args.mask.stride_batch == 0 && args.mask.stride_head != 0) {
    // A head's values are those of all batches: these next to each other, so that memory is read once.
    const uint32_t batches = args.order.heads / args.heads_kv;
    work.batch = int(place.head % batches);
    work.head = int(place.head / batches);
  }
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
// Where K and V of the tile in turn are: they go round with the tiles.
template <typename Tile>
__device__ inline Ring<Tile::kStagesK> bwd_k_ring(const Ring<kTileSlots>& ring) {
  return {ring.count};
}
__device__ inline Ring<1> bwd_v_ring(const Ring<kTileSlots>& ring) { return {ring.count}; }
// Until both have come; also of a tile without blocks, whose places would else be freed before they are taken.
template <typename Tile>
__device__ inline void bwd_wait_k(const BwdShared<Tile>& shared, const Ring<kTileSlots>& ring) {
  const auto k_ring = bwd_k_ring<Tile>(ring);
  ptx::mbarrier_wait(shared.full_k(k_ring.stage()), k_ring.phase());
}
template <typename Tile>
__device__ inline void bwd_wait_v(const BwdShared<Tile>& shared, const Ring<kTileSlots>& ring) {
  ptx::mbarrier_wait(shared.full_v(), bwd_v_ring(ring).phase());
}
template <typename Tile>
__device__ inline void bwd_leave_work(const BwdShared<Tile>& shared, Ring<kTileSlots>& ring, int lane) {
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(shared.empty_tile(ring.stage()));
  ring.advance();
}

}  // namespace flashsdpa
