// What the producer warpgroup of the mask's gradient does: one warp or two take units, tell their visits, and load what a
// visit does not share with the one before.
#pragma once

#include "bwd_mask_visits.cuh"
#include "fwd_load.cuh"

namespace flashsdpa {

// kAlone: all tensors go by TMA, and loader 0 does it alone; else all loaders are here.
template <typename Tile, bool kAlone>
__device__ inline void bwd_mask_load(const BwdMaskArgs& args, const BwdMaskShared<Tile>& shared, int loader) {
  const BwdArgs& bwd = args.bwd;
  Ring<Tile::kVisits> visit_ring;
  DropoutStreamWriter streams;
  Ring<Tile::kStages> q_ring;
  Ring<Tile::kStagesK> k_ring;
  Ring<Tile::kValuesStages> values_ring;
  const int units = args.tiles * args.parts;
  const auto claim = [&] {
    int unit = 0;
    if (kAlone || loader == 0) unit = int(atomicAdd(args.counter, 1u));
    if constexpr (!kAlone) {
      ptx::barrier_sync(int(FwdBarrier::kProducer), Tile::kLoaders);  // all have read the unit before
      if (loader == 0) ptx::store_shared_4(shared.unit(), uint32_t(unit));
      ptx::barrier_sync(int(FwdBarrier::kProducer), Tile::kLoaders);
      unit = int(ptx::load_shared_4(shared.unit()));
    }
    return unit;
  };
  const auto tell = [&](const BwdMaskVisit& visit) {
    if (kAlone || loader == 0) bwd_mask_tell(bwd.terms, shared, visit_ring, streams, visit);
  };

  // A piece after the last of a head is zeros; the consumer whose rows it holds leaves the stats alone.
  const auto load_queries = [&](auto is_q, const BwdMaskPlace& at) {
    constexpr bool kQ = decltype(is_q)::value;
    const int stage = q_ring.stage();
    FwdSlot slot = kQ ? FwdSlot{shared.q(stage), shared.full_q(stage), shared.empty_q(stage), q_ring.phase() ^ 1}
                      : FwdSlot{shared.grad_out(stage), shared.full_grad_out(stage), shared.empty_grad_out(stage), q_ring.phase() ^ 1};
#pragma unroll 1
    for (int piece = 0; piece < Tile::kPieces; ++piece) {
      const int block = at.m * Tile::kPieces + piece, row = block * Tile::kPieceRows;
      load_rows<Tile::kPieceRows, kQ ? Tile::kBoxes : Tile::kBoxesV, ptx::Reuse::kSoon, kAlone, Tile::kLoaders, /*kWords=*/false>(
          slot, kQ ? bwd.q : bwd.grad_out, kQ ? &bwd.map_q : &bwd.map_grad_out, row, at.head, at.batch, loader,
          kQ ? 0 : Tile::kStatsBytes);
      if (!kQ && (kAlone || loader == 0)) {
        const int64_t first_block = (int64_t(at.batch) * bwd.heads_q + at.head) * bwd.blocks_m;
        ptx::bulk_load(shared.stats(stage, piece), bwd.stats + (first_block + min(block, bwd.blocks_m - 1)) * Tile::kStatsFloats,
                       Tile::kStatsBytes, shared.full_grad_out(stage));
      }
      slot.shared += kQ ? Tile::kQPieceBytes : Tile::kGradOutPieceBytes;
    }
  };
  const auto load_k = [&](const BwdMaskPlace& at) {
    const int stage = k_ring.stage();
    load_rows<Tile::kBlockN, Tile::kBoxes, ptx::Reuse::kSoon, kAlone, Tile::kLoaders, /*kWords=*/false>(
        {shared.k(stage), shared.full_k(stage), shared.empty_k(stage), k_ring.phase() ^ 1}, bwd.k, &bwd.map_k,
        at.n * Tile::kBlockN, at.head / bwd.group, at.batch, loader);
  };
  const auto load_v = [&](const BwdMaskPlace& at) {
    const Ring<Tile::kStages> v_ring{k_ring.count};
    const int stage = v_ring.stage();
    load_rows<Tile::kBlockN, Tile::kBoxesV, ptx::Reuse::kSoon, kAlone, Tile::kLoaders, /*kWords=*/false>(
        {shared.v(stage), shared.full_v(stage), shared.empty_v(stage), v_ring.phase() ^ 1}, bwd.v, &bwd.map_v,
        at.n * Tile::kBlockN, at.head / bwd.group, at.batch, loader);
  };
  // Of a tile: while the visits of the one before are not done.
  const auto load_values = [&](const BwdMaskPlace& tile) {
    constexpr int kBoxBytes = int(kGranule) * kBoxRowBytes, kRows = Tile::kBlockM / int(kGranule);
    const int stage = values_ring.stage();
    ptx::mbarrier_wait(shared.empty_values(stage), values_ring.phase() ^ 1);
    fwd_delay(FwdPoint::kLoad);
    ptx::mbarrier_arrive_expect(shared.full_values(stage), Tile::kValuesBytes);
#pragma unroll 1
    for (int box = 0; box < Tile::kValuesBytes / kBoxBytes; ++box) {  // of the first 64 keys, then of the next
      ptx::tma_load(shared.values_stage(stage) + box * kBoxBytes, &bwd.map_values,
                    {tile.n * Tile::kBlockN + box / kRows * int(kGranule), tile.m * Tile::kBlockM + box % kRows * int(kGranule),
                     tile.head * bwd.values.map_head, tile.batch * bwd.values.map_batch},
                    shared.full_values(stage), ptx::cache_policy<ptx::Reuse::kNone>());
    }
  };

  for (int unit = claim(); unit < units; unit = claim()) {
    BwdMaskWalk<Tile> walk(args, unit);
    if (walk.left == 0) {
      tell({BwdMaskVisit::kFirst | BwdMaskVisit::kLast, 0, 0, unit, 0, 0});
      continue;
    }
    if (Tile::kValuesByTma && bwd.values.tma && (kAlone || loader == 0)) load_values(bwd_mask_first(args, unit % args.tiles));
    uint32_t first = BwdMaskVisit::kFirst;
    bool other_q = true, other_k = true;  // than the visit before
    while (walk.left > 0) {
      const BwdMaskPlace at = walk.at;
      walk.advance(args);
      const bool last = walk.left == 0, other_head = last || walk.at.batch != at.batch || walk.at.head != at.head;
      const bool leave_q = other_head || walk.at.m != at.m;
      const bool leave_k = last || walk.at.n != at.n || walk.at.batch != at.batch || walk.at.head / bwd.group != at.head / bwd.group;
      uint32_t flags = first | BwdMaskVisit::kAny;
      if (last) flags |= BwdMaskVisit::kLast;
      if (leave_q) flags |= BwdMaskVisit::kLeaveQ;
      if (leave_k) flags |= BwdMaskVisit::kLeaveK;
      if (bwd_mask_edge<Tile>(bwd, at)) flags |= BwdMaskVisit::kEdge;
      flags |= q_ring.stage() * BwdMaskVisit::kStageQ + q_ring.phase() * BwdMaskVisit::kPhaseQ;
      flags |= k_ring.stage() * BwdMaskVisit::kStageK + k_ring.phase() * BwdMaskVisit::kPhaseK;
      flags |= values_ring.stage() * BwdMaskVisit::kStageValues + values_ring.phase() * BwdMaskVisit::kPhaseValues;
      tell({flags, at.m, at.n, unit, at.batch, at.head});
      // In the order in which consumers wait, but that K does not wait for the memory of Q.
      if (other_k) load_k(at);
      if (other_q) load_queries(std::true_type(), at);
      if (other_q) load_queries(std::false_type(), at);
      if (other_k) load_v(at);
      if (leave_q) q_ring.advance();
      if (leave_k) k_ring.advance();
      other_q = leave_q;
      other_k = leave_k;
      first = 0;
    }
    values_ring.advance();
  }
  tell({BwdMaskVisit::kEnd, 0, 0, 0, 0, 0});
}

}  // namespace flashsdpa
