// The consumers of the backward kernel for up to 128 columns: each owns 64 keys, and their dK and dV.
//
// For each block of queries: S^T = K Q^T and dP^T = V dO^T (shared x shared), P = exp2(S - shift), dS = P (dP - delta),
// dV += P^T dO and dK += dS^T Q (registers x shared), and from the dS of all consumers, in shared memory, 64 queries x 64
// columns of dQ = dS K, which a warp of the producer adds to the sum in global memory.
#pragma once

#include <type_traits>

#include "../../ptx/wgmma.cuh"
#include "bwd_scores.cuh"
#include "bwd_store.cuh"

namespace flashsdpa {

// kPieceColumns: of this consumer's piece of dQ.
template <typename Tile, bool kBFloat16, int kPieceColumns>
__device__ inline void bwd_consume_by_keys(const BwdArgs& args, const BwdShared<Tile>& shared, int consumer, int thread) {
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kConsumers = Tile::kConsumers;
  constexpr int kConsumerThreads = kConsumers * ptx::kWarpgroupThreads;
  // Pieces of dQ: of 64 queries each if the block has as many as consumers, else of 64 columns each.
  constexpr bool kPieceByQueries = kBlockM == kConsumers * kBwdPiece;
  static_assert(kPieceByQueries || kBlockM == kBwdPiece);
  const int lane = thread % ptx::kWarpLanes, lane_row = thread / ptx::kWarpLanes * 16 + lane / 4;
  const int lane_column = 2 * (lane % 4), key = consumer * kConsumerRows;
  const bool elected = consumer == 0 && thread == 0;

  float dk[Tile::kDim / 2], dv[Tile::kDimV / 2], s[kBlockM / 2], dp[kBlockM / 2], dq[kPieceColumns / 2];
  uint32_t p[kBlockM / 16][4], ds[kBlockM / 16][4];
  Ring<2> ring;  // one block of queries: of Q, dO and dS, which go round together, and its phase is that of dQ
  Ring<kTileSlots> tile_ring;
  uint32_t kv_phase = 0;
  static_assert(Tile::kStages == 2 && Tile::kStagesGradOut == 2);

  const auto free_stage = [&](uint32_t barrier) {
    fwd_delay(FwdPoint::kFree);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  // S^T of the Q in turn, for the keys of this consumer.
  const auto issue_scores = [&] {
    const uint64_t a = ptx::wgmma_operand(shared.k() + key * kBoxRowBytes);
    const uint64_t b = ptx::wgmma_operand(shared.q(ring.stage()));
#pragma unroll
    for (int step = 0; step < Tile::kDim / 16; ++step) {
      const int box = step / 4, within = step % 4 * 32;  // 16 columns are 32 bytes, a box has four times 16
      ptx::Wgmma<kBlockM>::template ss<kBFloat16, 0>(s, ptx::wgmma_advance(a, box * Tile::kKeyBoxBytes + within),
                                                     ptx::wgmma_advance(b, box * Tile::kQueryBoxBytes + within), step > 0);
    }
    ptx::wgmma_commit();
  };
  const auto issue_grad_probabilities = [&] {
    const uint64_t a = ptx::wgmma_operand(shared.v() + key * kBoxRowBytes);
    const uint64_t b = ptx::wgmma_operand(shared.grad_out(ring.stage()));
#pragma unroll
    for (int step = 0; step < Tile::kDimV / 16; ++step) {
      const int box = step / 4, within = step % 4 * 32;
      ptx::Wgmma<kBlockM>::template ss<kBFloat16, 0>(dp, ptx::wgmma_advance(a, box * Tile::kKeyBoxBytes + within),
                                                     ptx::wgmma_advance(b, box * Tile::kQueryBoxBytes + within), step > 0);
    }
    ptx::wgmma_commit();
  };
  // sum += A^T B of 64 keys, queries, and the columns of B: P and dO, or dS and Q.
  const auto issue_sum = [&](auto& sum, const auto& a, uint32_t shared_b) {
    constexpr int kColumns = std::extent_v<std::remove_reference_t<decltype(sum)>> * 2;
    const uint64_t b = ptx::wgmma_operand(shared_b, Tile::kQueryBoxBytes);
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
      ptx::Wgmma<kColumns>::template rs<kBFloat16, 1>(sum, a[step], ptx::wgmma_advance(b, step * 16 * kBoxRowBytes), 1);
    }
    ptx::wgmma_commit();
  };
  // This consumer's piece of dQ, from the dS in turn of all keys.
  const auto issue_piece = [&] {
    const uint32_t shared_a = shared.scores(ring.stage()) + (kPieceByQueries ? consumer * Tile::kKeyBoxBytes : 0);
    const uint32_t shared_b = shared.k() + (kPieceByQueries ? 0 : consumer * Tile::kKeyBoxBytes);
    const uint64_t a = ptx::wgmma_operand(shared_a), b = ptx::wgmma_operand(shared_b);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<kPieceColumns>::template ss<kBFloat16, 1, 1>(dq, ptx::wgmma_advance(a, step * 16 * kBoxRowBytes),
                                                              ptx::wgmma_advance(b, step * 16 * kBoxRowBytes), step > 0);
    }
    ptx::wgmma_commit();
  };

  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    if (work.end()) break;
    // The gradients of the tile before lie where dS and dQ go.
    if (elected) ptx::tma_store_wait_read();
    ptx::barrier_sync(int(BwdBarrier::kConsumers), kConsumerThreads);
    if (work.empty()) {
      store_zero_gradients<Tile>(args, work, consumer * ptx::kWarpgroupThreads + thread);
      bwd_leave_work(shared, tile_ring, lane);
      continue;
    }
    const int first_key = work.row + key;
    // Query blocks before `plain_from` and from `plain_until` on hold queries that do not see all keys here.
    const bool all_plain = args.sign == 1.f && first_key + kConsumerRows <= args.seq_k;
    const int plain_from =
        all_plain ? (max(first_key + kConsumerRows - 1 - args.band_hi, 0) + kBlockM - 1) / kBlockM : args.blocks_m;
    const int plain_until = max(first_key - args.band_lo + 1, 0) / kBlockM;

    // All that is not done to every block: scores of keys that a query does not see, of rows with a `high`.
    const auto mask = [&](const BwdStats<kBlockM>& stats) {
      const int m = stats.block();
      const bool coarse = stats.coarse(lane);
      if (m >= plain_from && m < plain_until && !coarse) return;
      if (args.sign != 1.f) {
#pragma unroll
        for (float& score : s) score *= args.sign;
      }
      const int first_column = m * kBlockM + lane_column, row = first_key + lane_row;
      int first[2], last[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int j = row + 8 * r;
        first[r] = j < args.seq_k ? j - args.band_hi - first_column : kBlockM;
        last[r] = j - args.band_lo - first_column;
      }
      mask_before(s, first);
      mask_after(s, last);
      if (coarse) {
#pragma unroll
        for (int i = 0; i < kBlockM / 2; ++i) {
          s[i] = coarse_score(args, s[i], ptx::load_shared_float(stats.high(score_column(i) + lane_column)));
        }
      }
    };

#pragma unroll
    for (float& value : dk) value = 0.f;
#pragma unroll
    for (float& value : dv) value = 0.f;
    ptx::mbarrier_wait(shared.full_k(), kv_phase);
    ptx::mbarrier_wait(shared.full_q(ring.stage()), ring.phase());
    fwd_delay(FwdPoint::kKeyThere);
    ptx::wgmma_fence();
    issue_scores();
    ptx::mbarrier_wait(shared.full_v(), kv_phase);
    kv_phase ^= 1;

    // P and dS of one block of queries, whose S is under way.
    const auto make_scores = [&] {
      ptx::mbarrier_wait(shared.full_grad_out(ring.stage()), ring.phase());
      fwd_delay(FwdPoint::kKeyThere);
      ptx::wgmma_fence();
      issue_grad_probabilities();
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(s);
      const BwdStats<kBlockM> stats{shared.stats(ring.stage())};
      mask(stats);
#pragma unroll
      for (int i = 0; i < kBlockM / 2; i += 4) {
        float low, high;
        ptx::load_shared_floats(stats.shift(score_column(i) + lane_column), low, high);
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          s[i + r] = ptx::exp2_fast(fmaf(s[i + r], args.scale_log2, -low));
          s[i + r + 1] = ptx::exp2_fast(fmaf(s[i + r + 1], args.scale_log2, -high));
        }
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(dp);
#pragma unroll
      for (int i = 0; i < kBlockM / 2; i += 4) {
        float low, high;
        ptx::load_shared_floats(stats.delta(score_column(i) + lane_column), low, high);
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          p[i / 8][(i + r) % 8 / 2] = ptx::pack<kBFloat16>(s[i + r], s[i + r + 1]);
          ds[i / 8][(i + r) % 8 / 2] =
              ptx::pack<kBFloat16>(s[i + r] * (dp[i + r] - low), s[i + r + 1] * (dp[i + r + 1] - high));
        }
      }
    };
    // What follows from them. With `more`, S of the next block is issued before this one's dQ is taken up.
    const auto add_products = [&](auto more) {
      constexpr bool kMore = decltype(more)::value;
      // Of the two buffers this one is free: whoever has written the other has read this.
      const uint32_t target = shared.scores(ring.stage());
#pragma unroll
      for (int j = 0; j < kBlockM / 16; ++j) {
        ptx::stmatrix_x4(target + swizzled_offset<kBlockN>(key + thread / ptx::kWarpLanes * 16 + lane % 16, 2 * j + lane / 16),
                         ds[j][0], ds[j][1], ds[j][2], ds[j][3]);
      }
      ptx::fence_proxy_shared();
      __syncwarp();
      free_stage(shared.full_scores(ring.stage()));

      ptx::wgmma_fence();
      issue_sum(dv, p, shared.grad_out(ring.stage()));
      issue_sum(dk, ds, shared.q(ring.stage()));
      ptx::mbarrier_wait(shared.full_scores(ring.stage()), ring.phase());
      ptx::wgmma_fence();
      issue_piece();
      ptx::wgmma_wait<1>();
      free_stage(shared.empty_grad_out(ring.stage()));
      free_stage(shared.empty_q(ring.stage()));
      const uint32_t piece_phase = ring.count % 2;
      ring.advance();
      if constexpr (kMore) {
        ptx::mbarrier_wait(shared.full_q(ring.stage()), ring.phase());
        fwd_delay(FwdPoint::kKeyThere);
        ptx::wgmma_fence();
        issue_scores();
      }
      ptx::wgmma_wait<kMore ? 1 : 0>();
      ptx::wgmma_settle(dq);
      ptx::mbarrier_wait(shared.empty_piece(consumer), piece_phase ^ 1);
      fwd_delay(FwdPoint::kStore);
#pragma unroll
      for (int i = 0; i < kPieceColumns / 2; i += 4) {
        ptx::store_shared_floats(shared.piece(consumer) + i / 4 * (ptx::kWarpgroupThreads * 16) + thread * 16, dq[i], dq[i + 1],
                                 dq[i + 2], dq[i + 3]);
      }
      ptx::fence_proxy_shared();
      __syncwarp();
      free_stage(shared.full_piece(consumer));
    };

    make_scores();
#pragma unroll 1
    for (int left = (work.last - work.first) * args.group; left > 1; --left) {  // with nothing under way from turn to turn
      add_products(std::true_type());
      make_scores();
    }
    add_products(std::false_type());

    free_stage(shared.empty_kv());
    ptx::wgmma_settle(dv);
    ptx::wgmma_settle(dk);
    // Once all consumers are done with dS, and the adders with dQ, dV and dK go there.
    ptx::mbarrier_wait(shared.empty_piece(consumer), ring.count % 2 ^ 1);
    ptx::barrier_sync(int(BwdBarrier::kConsumers), kConsumerThreads);
    stage_rows<kBlockN, kBFloat16>(shared.dv(), dv, 1.f, key, thread);
    stage_rows<kBlockN, kBFloat16>(shared.dk(), dk, args.grad_scale, key, thread);
    ptx::fence_proxy_shared();
    ptx::barrier_sync(int(BwdBarrier::kConsumers), kConsumerThreads);
    store_gradients(args, shared, bwd_take_work(shared, tile_ring), consumer * ptx::kWarpgroupThreads + thread);
    bwd_leave_work(shared, tile_ring, lane);
  }
  if (elected) ptx::tma_store_wait_read();  // shared memory must outlive the reads
}

}  // namespace flashsdpa
