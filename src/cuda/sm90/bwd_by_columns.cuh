// The consumers of the backward kernel for more than 128 columns: each owns boxes of 64 columns of dK, dV and dQ.
//
// For each block of 64 queries: S = Q K^T and dP = dO V^T (shared x shared), each consumer for its share of the keys;
// P = exp2(S - shift) and dS = P (dP - delta) go to shared memory; then, each for its columns and all keys, transposed,
// dV^T += dO^T P, dK^T += Q^T dS and dQ^T = K^T dS^T, which is added to the sum in global memory from registers.
#pragma once

#include "../../ptx/wgmma.cuh"
#include "bwd_mask.cuh"
#include "bwd_scores.cuh"
#include "bwd_store.cuh"
#include "bwd_terms.cuh"

namespace flashsdpa {

// Inlined whatever its size: the products of a function that is called are serialised.
template <typename Tile, bool kBFloat16>
__device__ __forceinline__ void bwd_consume_by_columns(const BwdArgs& args, const BwdShared<Tile>& shared, int consumer, int thread) {
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kConsumers = Tile::kConsumers;
  constexpr int kConsumerThreads = kConsumers * ptx::kWarpgroupThreads;
  constexpr int kKeys = kBlockN / kConsumers;  // of this consumer's scores
  // Boxes of this consumer. Those past the last are the last again, and not stored.
  constexpr int kOwn = Tile::kBoxes / kConsumers, kOwnV = (Tile::kBoxesV + kConsumers - 1) / kConsumers;
  static_assert(kBlockM == kBwdPiece && kKeys % 8 == 0 && Tile::kBoxes % kConsumers == 0);
  const int lane = thread % ptx::kWarpLanes, lane_row = thread / ptx::kWarpLanes * 16 + lane / 4;
  const int lane_column = 2 * (lane % 4), key = consumer * kKeys;
  const bool elected = consumer == 0 && thread == 0;
  const auto box = [&](int i) { return consumer * kOwn + i; };
  const auto box_v = [&](int i) { return min(consumer * kOwnV + i, Tile::kBoxesV - 1); };

  float dk[kOwn][kBlockN / 2], dv[kOwnV][kBlockN / 2], s[kKeys / 2], dp[kKeys / 2], dq[kBlockM / 2];
  BwdBlockMask<Tile> block_mask(shared, key, thread);
  BwdBlockTerms<Tile> block_terms;
  Ring<Tile::kStages> q_ring;
  Ring<Tile::kStagesGradOut> grad_out_ring;
  Ring<kTileSlots> tile_ring;

  const auto told_slot = [&] { return int(q_ring.count % Tile::kVisits); };  // of the block in turn
  const auto free_stage = [&](uint32_t barrier) {
    fwd_delay(FwdPoint::kFree);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  const auto meet = [] { ptx::barrier_sync(int(BwdBarrier::kConsumers), kConsumerThreads); };
  // Queries x this consumer's keys, of Q and K or of dO and V.
  const auto issue_scores = [&](auto& d, auto columns, uint32_t queries, uint32_t keys) {
    const uint64_t a = ptx::wgmma_operand(queries), b = ptx::wgmma_operand(keys + key * kBoxRowBytes);
#pragma unroll
    for (int step = 0; step < decltype(columns)::value / 16; ++step) {
      const int box = step / 4, within = step % 4 * 32;  // 16 columns are 32 bytes, a box has four times 16
      ptx::Wgmma<kKeys>::template ss<kBFloat16, 0>(d, ptx::wgmma_advance(a, box * Tile::kQueryBoxBytes + within),
                                                   ptx::wgmma_advance(b, box * Tile::kKeyBoxBytes + within), step > 0);
    }
    ptx::wgmma_commit();
  };
  // sum^T += A^T B: 64 columns x keys, from queries x 64 columns (a box of dO or Q) and queries x keys (P or dS).
  const auto issue_sum = [&](auto& sum, uint32_t shared_a, uint32_t shared_b) {
    const uint64_t a = ptx::wgmma_operand(shared_a), b = ptx::wgmma_operand(shared_b, Tile::kQueryBoxBytes);
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
      ptx::Wgmma<kBlockN>::template ss<kBFloat16, 1, 1>(sum, ptx::wgmma_advance(a, step * 16 * kBoxRowBytes),
                                                        ptx::wgmma_advance(b, step * 16 * kBoxRowBytes), 1);
    }
  };
  // dQ^T of one box: 64 columns x queries.
  const auto issue_piece = [&](int box) {
    const uint64_t a = ptx::wgmma_operand(shared.k(0) + box * Tile::kKeyBoxBytes), b = ptx::wgmma_operand(shared.scores(1));
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<kBlockM>::template ss<kBFloat16, 0, 1>(
          dq, ptx::wgmma_advance(a, step * 16 * kBoxRowBytes),
          ptx::wgmma_advance(b, step / 4 * Tile::kQueryBoxBytes + step % 4 * 32), step > 0);
    }
    ptx::wgmma_commit();
  };
  const auto add_piece = [&](float* sum) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; i += 4) {
      ptx::reduce_add_floats(sum + i * ptx::kWarpgroupThreads + 4 * thread, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
  };
  const auto store_scores = [&](uint32_t target, int i, uint32_t pair) {
    const int row = lane_row + 8 * score_row(i), chunk = key / 8 + i / 4;
    ptx::store_shared_4(target + swizzled_offset<kBlockM>(row, chunk) + lane % 4 * 4, pair);
  };

  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    if (work.end()) break;
    if (work.empty()) {
      store_zero_gradients<Tile>(args, work, consumer * ptx::kWarpgroupThreads + thread);
      if (elected) {
        bwd_wait_k(shared, tile_ring);
        bwd_wait_v(shared, tile_ring);
        ptx::mbarrier_arrive(shared.empty_k(0));
        ptx::mbarrier_arrive(shared.empty_v());
      }
      bwd_leave_work(shared, tile_ring, lane);
      continue;
    }
    const int first_key = work.row + key;

    // All that is not done to every block: scores of keys that a query does not see, of rows with a `high`.
    const auto mask = [&](const BwdWord<Tile::kMasked>& visit, const BwdStats<kBlockM>& stats) {
      const bool coarse = any_coarse(stats.coarse(lane));
      block_mask.template add_values<kBFloat16>(args, work, told_slot(), s);
      if (!visit.edge() && !block_mask.removes(args, visit) && !coarse) return;
      const int m = visit.m();
      if (!Tile::kMasked && args.sign != 1.f) {
#pragma unroll
        for (float& score : s) score *= args.sign;
      }
      block_mask.remove(args, visit, s);
      if (!Tile::kMasked || visit.edge()) {
        const int row = m * kBlockM + lane_row, first_column = first_key + lane_column;
        mask_band(args, s, row, first_column);
      }
      if (coarse) {
        const float high[2] = {ptx::load_shared_float(stats.high(lane_row)), ptx::load_shared_float(stats.high(lane_row + 8))};
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) s[i] = coarse_score(args, s[i], high[score_row(i)]);
      }
    };

#pragma unroll
    for (auto& box : dk) {
      for (float& value : box) value = 0.f;
    }
#pragma unroll
    for (auto& box : dv) {
      for (float& value : box) value = 0.f;
    }
    bwd_wait_k(shared, tile_ring);
    bwd_wait_v(shared, tile_ring);

#pragma unroll 1
    for (BwdFollower<Tile> at(args, work); at.left > 0; at.advance(args, work)) {
      const uint32_t q = shared.q(q_ring.stage()), grad_out = shared.grad_out(grad_out_ring.stage());
      ptx::mbarrier_wait(shared.full_q(q_ring.stage()), q_ring.phase());
      fwd_delay(FwdPoint::kKeyThere);
      if constexpr (Tile::kMasked) {
        block_mask.load(args, work, told_slot());
        at.hear(bwd_visit(shared, told_slot()), bwd_visit_head(shared, told_slot()));
      }
      ptx::wgmma_fence();
      issue_scores(s, std::integral_constant<int, Tile::kDim>(), q, shared.k(0));
      ptx::mbarrier_wait(shared.full_grad_out(grad_out_ring.stage()), grad_out_ring.phase());
      ptx::wgmma_fence();
      issue_scores(dp, std::integral_constant<int, Tile::kDimV>(), grad_out, shared.v());
      // What soft cap, slopes and dropout are told of the block: act(batch, head, the lane's first query and key).
      const auto with_place = [&](const auto& act) {
        act(work.batch, bwd_visit_head(shared, told_slot()), bwd_visit(shared, told_slot()).m() * kBlockM + lane_row,
            first_key + lane_column);
      };
      if constexpr (Tile::kTerms) {
        with_place([&](int, int, auto... place) { block_terms.draw(args, shared.stream(q_ring.stage()), place...); });
      }
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(s);
      uint32_t weights[kKeys / 16][4], shares[kKeys / 16][4];  // with terms: bwd_terms.cuh
      if constexpr (Tile::kTerms) {
        with_place([&](auto... place) {
          block_terms.apply(args, place..., s, [&](int i, const uint32_t (&words)[4]) {
#pragma unroll
            for (int w = 0; w < 4; ++w) shares[i / 8][w] = words[w];
          });
        });
      }
      const BwdStats<kBlockM> stats{shared.stats(q_ring.stage())};
      mask(bwd_visit(shared, told_slot()), stats);
      const float shift[2] = {ptx::load_shared_float(stats.shift(lane_row)), ptx::load_shared_float(stats.shift(lane_row + 8))};
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) s[i] = ptx::exp2_fast(fmaf(s[i], args.scale_log2, -shift[score_row(i)]));
      if constexpr (Tile::kTerms) {
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 8) block_terms.template split<kBFloat16>(args, i, s, weights[i / 8], shares[i / 8]);
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(dp);
      const float delta[2] = {ptx::load_shared_float(stats.delta(lane_row)), ptx::load_shared_float(stats.delta(lane_row + 8))};
      meet();  // all are done with the P and dS of the block before
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 2) {
        const int r = score_row(i);
        if constexpr (Tile::kTerms) {
          store_scores(shared.scores(0), i, weights[i / 8][i % 8 / 2]);
          const uint32_t share = shares[i / 8][i % 8 / 2];
          store_scores(shared.scores(1), i,
                       block_terms.template gradient<kBFloat16>(args, i, share, dp[i], dp[i + 1], delta[r], delta[r]));
          continue;
        }
        store_scores(shared.scores(0), i, ptx::pack<kBFloat16>(s[i], s[i + 1]));
        store_scores(shared.scores(1), i, ptx::pack<kBFloat16>(s[i] * (dp[i] - delta[r]), s[i + 1] * (dp[i + 1] - delta[r])));
      }
      ptx::fence_proxy_shared();
      meet();

      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kOwnV; ++i) issue_sum(dv[i], grad_out + box_v(i) * Tile::kQueryBoxBytes, shared.scores(0));
      ptx::wgmma_commit();
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        ptx::wgmma_fence();
        issue_piece(box(i));
        if (i == 0) {
#pragma unroll
          for (int j = 0; j < kOwn; ++j) issue_sum(dk[j], q + box(j) * Tile::kQueryBoxBytes, shared.scores(1));
          ptx::wgmma_commit();
          ptx::wgmma_wait<2>();  // dV: where dO has one stage, the next comes under dQ, dK and S
          free_stage(shared.empty_grad_out(grad_out_ring.stage()));
          grad_out_ring.advance();
          ptx::wgmma_wait<1>();
          if (!Tile::kStaged && args.turns) ptx::mbarrier_wait(shared.turn(), q_ring.count % 2);
        } else {
          ptx::wgmma_wait<0>();
        }
        ptx::wgmma_settle(dq);
        if constexpr (Tile::kStaged) {
          ptx::mbarrier_wait(shared.empty_piece(consumer), q_ring.count % 2 ^ 1);
          fwd_delay(FwdPoint::kStore);
          stage_piece<0, kBwdPiece / 2>(shared.piece(consumer), dq, thread);
          ptx::fence_proxy_shared();
          __syncwarp();
          free_stage(shared.full_piece(consumer));
          continue;
        }
        add_piece(args.dq + bwd_block(args, work, at) * Tile::kDqFloats + box(i) * kBwdPieceFloats);
      }
      if constexpr (kOwn == 1) ptx::wgmma_wait<0>();
      if (!Tile::kStaged && args.turns) {
        __syncwarp();
        free_stage(shared.added());
      }
      free_stage(shared.empty_q(q_ring.stage()));
      q_ring.advance();
    }

#pragma unroll
    for (auto& box : dk) ptx::wgmma_settle(box);
#pragma unroll
    for (auto& box : dv) ptx::wgmma_settle(box);
    meet();  // all are done with K and V: dK and dV go there
#pragma unroll
    for (int i = 0; i < kOwnV; ++i) {
      if (consumer * kOwnV + i < Tile::kBoxesV) {
        stage_columns<kBlockN, kBFloat16>(shared.dv() + box_v(i) * Tile::kKeyBoxBytes, dv[i], 1.f, thread);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      stage_columns<kBlockN, kBFloat16>(shared.dk(0) + box(i) * Tile::kKeyBoxBytes, dk[i], args.grad_scale, thread);
    }
    ptx::fence_proxy_shared();
    meet();
    store_gradients(args, shared, 0, work, consumer * ptx::kWarpgroupThreads + thread);
    bwd_leave_work(shared, tile_ring, lane);
    if (!(args.dk.tma && args.dv.tma)) meet();  // all have read their part
    if (elected) {
      ptx::tma_store_wait_read();
      fwd_delay(FwdPoint::kFree);
      ptx::mbarrier_arrive(shared.empty_k(0));
      ptx::mbarrier_arrive(shared.empty_v());
    }
  }
}

}  // namespace flashsdpa
