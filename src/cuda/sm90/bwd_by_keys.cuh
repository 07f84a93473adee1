// The consumers of the backward kernel for up to 128 columns: each owns 64 keys, and their dK and dV.
//
// For each block of queries: S^T = K Q^T and dP^T = V dO^T (shared x shared), P = exp2(S - shift), dS = P (dP - delta),
// dV += P^T dO and dK += dS^T Q (registers x shared), and from the dS of all consumers, in shared memory, 64 queries x 64
// columns of dQ = dS K, which a warp of the producer adds to the sum in global memory.
#pragma once

#include <type_traits>

#include "../../ptx/wgmma.cuh"
#include "bwd_mask.cuh"
#include "bwd_scores.cuh"
#include "bwd_store.cuh"
#include "bwd_terms.cuh"

namespace flashsdpa {

// kPieceColumns: of this consumer's piece of dQ.
// Inlined whatever its size: the products of a function that is called are serialised.
template <typename Tile, bool kBFloat16, int kPieceColumns>
__device__ __forceinline__ void bwd_consume_by_keys(const BwdArgs& args, const BwdShared<Tile>& shared, int key, int thread) {
  constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kConsumers = Tile::kConsumers;
  constexpr int kConsumerThreads = kConsumers * ptx::kWarpgroupThreads;
  // Pieces of dQ: of 64 queries each if the block has as many as consumers, else of 64 columns each.
  constexpr bool kPieceByQueries = kBlockM == kConsumers * kBwdPiece;
  static_assert(kPieceByQueries || kBlockM == kBwdPiece);
  const int lane = thread % ptx::kWarpLanes, lane_row = thread / ptx::kWarpLanes * 16 + lane / 4;
  const int lane_column = 2 * (lane % 4);
  // With terms there is no register to keep it.
  const auto lane_again = [&] { return Tile::kTerms ? int(ptx::anew(uint32_t(thread))) % ptx::kWarpLanes : lane; };
  // Anew for each product, or addresses kept for the whole tile spill.
  const auto own_key = [&] { return __shfl_sync(0xffffffffu, key, 0); };
  const auto consumer = [&] { return key / kConsumerRows; };
  const auto elected = [&] { return key + thread == 0; };

  float dk[Tile::kDim / 2], dv[Tile::kDimV / 2], s[kBlockM / 2], own_dp[Tile::kTerms ? 1 : kBlockM / 2], dq[kPieceColumns / 2];
  uint32_t p[kBlockM / 16][4], ds[kBlockM / 16][4];
  BwdBlockMask<Tile> block_mask(shared, key, thread);
  BwdBlockTerms<Tile> block_terms;
  auto& dp = either<Tile::kTerms>(s, own_dp);  // with terms in the place of S (bwd_terms.cuh)
  Ring<2> ring;  // one block of queries: of Q, dO and dS, which go round together, and its phase is that of dQ
  Ring<kTileSlots> tile_ring;
  static_assert(Tile::kStages == 2 && Tile::kStagesGradOut == 2);

  const auto k_stage = [&] { return bwd_k_ring<Tile>(tile_ring).stage(); };
  const auto told_slot = [&] { return int(ring.count % Tile::kVisits); };  // of the block in turn
  const auto free_stage = [&](uint32_t barrier) {
    fwd_delay(FwdPoint::kFree);
    if (lane_again() == 0) ptx::mbarrier_arrive(barrier);
  };
  // S^T of the Q in turn, for the keys of this consumer.
  const auto issue_scores = [&] {
    const uint64_t a = ptx::wgmma_operand(shared.k(k_stage()) + own_key() * kBoxRowBytes);
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
    const uint64_t a = ptx::wgmma_operand(shared.v() + own_key() * kBoxRowBytes);
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
  // This consumer's piece of dQ, from the dS of all keys.
  const auto issue_piece = [&](const Ring<2>& at) {
    const uint32_t box = own_key() / kConsumerRows * Tile::kKeyBoxBytes;
    const uint32_t shared_a = shared.scores(at.stage()) + (kPieceByQueries ? box : 0);
    const uint32_t shared_b = shared.k(k_stage()) + (kPieceByQueries ? 0 : box);
    const uint64_t a = ptx::wgmma_operand(shared_a), b = ptx::wgmma_operand(shared_b);
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<kPieceColumns>::template ss<kBFloat16, 1, 1>(dq, ptx::wgmma_advance(a, step * 16 * kBoxRowBytes),
                                                              ptx::wgmma_advance(b, step * 16 * kBoxRowBytes), step > 0);
    }
    ptx::wgmma_commit();
  };

  // The gradients of the tile before, which lie where dS goes, and, where K is ahead, in its K, have been read.
  const auto settle_gradients = [&] {
    if (elected()) ptx::tma_store_wait_read();
    ptx::barrier_sync(int(BwdBarrier::kConsumers), kConsumerThreads);
    if (Tile::kKeysAhead && elected() && tile_ring.count > 0) {
      ptx::mbarrier_arrive(shared.empty_k(bwd_k_ring<Tile>(Ring<kTileSlots>{tile_ring.count - 1}).stage()));
    }
  };

  // Consumers begin their products in turn, so that one's run under the other's exponentials.
  static_assert(Tile::kConsumers == 2);
  const auto order = [](int its_consumer) { return int(BwdBarrier::kOrder) + its_consumer; };
  if (consumer() == 1) ptx::barrier_arrive(order(0), kConsumerThreads);
  while (true) {
    const FwdWork work = bwd_take_work(shared, tile_ring);
    if (work.end()) break;
    if (work.empty()) {
      store_zero_gradients<Tile>(args, work, consumer() * ptx::kWarpgroupThreads + thread);
      settle_gradients();
      bwd_wait_k(shared, tile_ring);
      bwd_wait_v(shared, tile_ring);
      free_stage(shared.empty_v());
      if constexpr (!Tile::kKeysAhead) free_stage(shared.empty_k(0));
      bwd_leave_work(shared, tile_ring, lane);
      continue;
    }
    const int first_key = work.row + key;

    // All that is not done to every block: scores of keys that a query does not see, of rows with a `high`.
    const auto mask = [&](const BwdWord<Tile::kMasked>& visit, const BwdStats<kBlockM>& stats, bool coarse) {
      const int m = visit.m();
      if (!Tile::kMasked && args.sign != 1.f) {
#pragma unroll
        for (float& score : s) score *= args.sign;
      }
      block_mask.remove(args, visit, s);
      if (!Tile::kMasked || visit.edge()) {
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
      }
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
    ptx::wgmma_settle(dk);
    ptx::wgmma_settle(dv);
    bwd_wait_k(shared, tile_ring);

    const auto wait_for_scores_place = [&] { ptx::mbarrier_wait(shared.empty_scores(ring.stage()), ring.phase() ^ 1); };
    // dS for all consumers: laid down, and, behind what is begun meanwhile, given (below).
    const auto lay_scores = [&] {
      wait_for_scores_place();
      fwd_delay(FwdPoint::kStore);
      const int its_lane = lane_again(), row = own_key() + thread / ptx::kWarpLanes * 16 + its_lane % 16;
#pragma unroll
      for (int j = 0; j < kBlockM / 16; ++j) {
        ptx::stmatrix_x4(shared.scores(ring.stage()) + swizzled_offset<kBlockN>(row, 2 * j + its_lane / 16), ds[j][0], ds[j][1],
                         ds[j][2], ds[j][3]);
      }
    };
    // The piece of dQ that is ready, for the adder: the same. One fence gives both, once the stores are long done.
    const auto lay_piece = [&](const Ring<2>& at) {
      constexpr int kParts = Tile::kPieceParts, kAll = kPieceColumns / 2;
      ptx::mbarrier_wait(shared.empty_piece(consumer()), at.count % 2 ^ 1);
      fwd_delay(FwdPoint::kStore);
      stage_piece<0, kAll / kParts>(shared.piece(consumer()), dq, thread);
      if constexpr (kParts == 2) {
        ptx::mbarrier_wait(shared.empty_piece(consumer(), 1), at.count % 2 ^ 1);
        stage_piece<kAll / 2, kAll>(shared.piece(consumer()), dq, thread);
      }
    };
    // What the mask has to say of the block in turn; before this consumer's turn, which is not to wait for it.
    const auto ask_mask = [&] {
      if constexpr (Tile::kMasked) {
        ptx::mbarrier_wait(shared.full_q(ring.stage()), ring.phase());  // with which the loader tells of the block
        block_mask.load(args, work, told_slot());
      }
    };
    const auto begin_scores = [&] {
      ptx::mbarrier_wait(shared.full_q(ring.stage()), ring.phase());
      fwd_delay(FwdPoint::kKeyThere);
      ptx::wgmma_fence();
      issue_scores();
    };
    const auto begin_sums = [&](const Ring<2>& at) {
      issue_sum(dv, p, shared.grad_out(at.stage()));
      issue_sum(dk, ds, shared.q(at.stage()));
    };
    // dV, dK and this consumer's piece of dQ of the block `at`, whose sums have been begun.
    const auto finish = [&](const Ring<2>& at) {
      const auto wait_for_scores = [&] { ptx::mbarrier_wait(shared.full_scores(at.stage()), at.phase()); };
      if constexpr (!Tile::kFreeEarly) wait_for_scores();
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(p);
      ptx::wgmma_keep(ds);
      __syncwarp();  // all lanes have read its stats
      free_stage(shared.empty_grad_out(at.stage()));
      free_stage(shared.empty_q(at.stage()));
      if constexpr (Tile::kFreeEarly) wait_for_scores();
      ptx::wgmma_fence();
      issue_piece(at);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(dq);
      free_stage(shared.empty_scores(at.stage()));
      lay_piece(at);
    };

    // With terms, a lane's words of 16 queries (bwd_terms.cuh) lie where its warp will lay dS.
    const auto words_place = [&](int i) {
      return shared.scores(ring.stage()) + i / 32 * Tile::kKeyBoxBytes +
             (own_key() + thread / ptx::kWarpLanes * 16) * kBoxRowBytes + i % 32 / 8 * 512 + lane * 16;
    };
    const auto store_words = [&](int i, const uint32_t (&words)[4]) {
      ptx::store_shared_16(words_place(i), words[0], words[1], words[2], words[3]);
    };
    const auto load_words = [&](int i, uint32_t (&words)[4]) {
      float four[4];
      ptx::load_shared_floats(words_place(i), four[0], four[1], four[2], four[3]);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = __float_as_uint(four[w]);
    };
    constexpr int kHere = kBlockM / 4;  // of the exponentials; the others are computed while the piece of dQ is laid down
    const auto make_probabilities = [&](const BwdStats<kBlockM>& stats) {
#pragma unroll
      for (int i = 0; i < kBlockM / 2; i += 8) {  // 16 queries, of which the lane has four
        float shift[4];
        ptx::load_shared_floats(stats.shift(score_column(i) + lane_column), shift[0], shift[1], shift[2], shift[3]);
#pragma unroll
        for (int r = 0; r < 8; ++r) s[i + r] = ptx::exp2_fast(fmaf(s[i + r], args.scale_log2, -shift[stat_of(r)]));
        if constexpr (Tile::kTerms) {
          uint32_t words[4];
          load_words(i, words);
          block_terms.template split<kBFloat16>(args, i, s, p[i / 8], words);
          store_words(i, words);
        }
      }
      if constexpr (!Tile::kTerms) ptx::wgmma_compute_here<kHere>(s, args.blocks_m == 0);
    };
    // What soft cap, slopes and dropout are told of the block in turn: act(batch, head, the lane's first query and key).
    const auto with_place = [&](const auto& act) {
      act(work.batch, bwd_visit_head(shared, told_slot()), bwd_visit(shared, told_slot()).m() * kBlockM + lane_column,
          first_key + lane_row);
    };
    // From the S of one block of queries, under way, to its P and dS; and what is left of the block before, whose sums are under
    // way behind it.
    const auto make_scores = [&](auto is_second) {
      constexpr bool kSecond = decltype(is_second)::value;  // or later
      const auto finish_before = [&] {
        if constexpr (kSecond) finish(Ring<2>{ring.count - 1});
      };
      const BwdStats<kBlockM> stats{shared.stats(ring.stage())};
      const float flag = Tile::kTerms ? 0.f : stats.coarse(lane);
      ptx::wgmma_wait<kSecond ? 2 : 0>();
      ptx::wgmma_settle(s);
      const BwdWord<Tile::kMasked> visit = bwd_visit(shared, told_slot());
      const bool coarse = any_coarse(flag);
      const auto add_values = [&] { block_mask.template add_values<kBFloat16>(args, work, told_slot(), s); };
      if constexpr (Tile::kValuesUnderSums) add_values();
      const bool values_left = !Tile::kValuesUnderSums && block_mask.adds(args, visit);
      if constexpr (Tile::kTerms) {
        finish_before();
        with_place([&](auto... place) {
          wait_for_scores_place();
          block_terms.apply(args, place..., s, store_words);
        });
        add_values();
        mask(visit, stats, any_coarse(stats.coarse(lane)));
        with_place([&](int, int, auto... place) { block_terms.draw(args, shared.stream(ring.stage()), place...); });
        make_probabilities(stats);
      } else if (visit.edge() || values_left || block_mask.removes(args, visit) || coarse) {
        finish_before();  // first: a mask needs registers that its products have
        if constexpr (!Tile::kValuesUnderSums) add_values();
        mask(visit, stats, coarse);
        make_probabilities(stats);
      } else {
        make_probabilities(stats);
        finish_before();
      }
      ptx::mbarrier_wait(shared.full_grad_out(ring.stage()), ring.phase());
      if constexpr (!kSecond) bwd_wait_v(shared, tile_ring);
      fwd_delay(FwdPoint::kKeyThere);
      ptx::wgmma_fence();
      issue_grad_probabilities();
      constexpr int kEarly = Tile::kTerms ? 1 : 3;  // of the deltas, of 16 queries each, read under dP
      float delta[kBlockM / 16][4];
      const auto load_delta = [&](int j) {
        auto& its = delta[j];
        ptx::load_shared_floats(stats.delta(16 * j + lane_column), its[0], its[1], its[2], its[3]);
      };
#pragma unroll
      for (int j = 0; j < kEarly; ++j) load_delta(j);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(dp);
      if constexpr (Tile::kTerms) {
        block_terms.settle();
#pragma unroll
        for (int i = 0; i < kBlockM / 2; i += 2) {
          if (i % 8 == 0 && i / 8 >= kEarly) load_delta(i / 8);
          if (i % 8 == 0) load_words(i, ds[i / 8]);
          const float* its = &delta[i / 8][stat_of(i % 8)];
          uint32_t& pair = ds[i / 8][i % 8 / 2];
          pair = block_terms.template gradient<kBFloat16>(args, i, pair, dp[i], dp[i + 1], its[0], its[1]);
        }
      } else {
#pragma unroll
        for (int j = kEarly; j < kBlockM / 16; ++j) load_delta(j);
#pragma unroll
        for (int i = 0; i < kBlockM / 2; i += 2) {
          const float* its = &delta[i / 8][stat_of(i % 8)];
          p[i / 8][i % 8 / 2] = ptx::pack<kBFloat16>(s[i], s[i + 1]);
          ds[i / 8][i % 8 / 2] = ptx::pack<kBFloat16>(s[i] * (dp[i] - its[0]), s[i + 1] * (dp[i + 1] - its[1]));
        }
      }
    };

    ask_mask();
    begin_scores();
    if constexpr (Tile::kTerms) settle_gradients();  // first: words of its own go there too
    make_scores(std::false_type());
    if constexpr (!Tile::kTerms) settle_gradients();
    const uint32_t first = ring.count;
    const auto give = [&](uint32_t at) {  // the dS of block `at`, the piece of the block before
      ptx::fence_proxy_shared();
      __syncwarp();
      free_stage(shared.full_scores(Ring<2>{at}.stage()));
      if (at != first) free_stage(shared.full_piece(consumer()));
    };
    int left = (work.last - work.first) * args.group - 1;
#pragma unroll 1
    while (Tile::kMasked ? !bwd_visit(shared, told_slot()).final() : left-- > 0) {  // with nothing under way from turn to turn
      lay_scores();
      const Ring<2> now = ring;
      ring.advance();
      ask_mask();
      ptx::barrier_sync(order(consumer()), kConsumerThreads);
      begin_scores();
      begin_sums(now);
      ptx::barrier_arrive(order(1 - consumer()), kConsumerThreads);
      give(now.count);
      make_scores(std::true_type());
    }
    free_stage(shared.empty_v());  // all of dP is computed
    lay_scores();
    ptx::wgmma_fence();
    begin_sums(ring);
    give(ring.count);
    finish(ring);
    ptx::fence_proxy_shared();
    __syncwarp();
    free_stage(shared.full_piece(consumer()));
    ring.advance();

    ptx::wgmma_settle(dv);
    ptx::wgmma_settle(dk);
    // Once all consumers are done with dS and K, or, with a mask, with dS, and the adders with dQ, dV and dK go there.
    if constexpr (!Tile::kKeysAhead) {
      free_stage(shared.empty_k(0));
      ptx::mbarrier_wait(shared.empty_piece(consumer(), Tile::kPieceParts - 1), ring.count % 2 ^ 1);
    }
    ptx::barrier_sync(int(BwdBarrier::kConsumers), kConsumerThreads);
    stage_rows<kBlockN, kBFloat16>(shared.dv(), dv, 1.f, key, thread);
    stage_rows<kBlockN, kBFloat16>(shared.dk(k_stage()), dk, args.grad_scale, key, thread);
    ptx::fence_proxy_shared();
    ptx::barrier_sync(int(BwdBarrier::kConsumers), kConsumerThreads);
    store_gradients(args, shared, k_stage(), bwd_take_work(shared, tile_ring), consumer() * ptx::kWarpgroupThreads + thread);
    bwd_leave_work(shared, tile_ring, lane);
  }
  if (consumer() == 0) ptx::barrier_sync(order(0), kConsumerThreads);  // the arrival that is left over
  if (elected()) ptx::tma_store_wait_read();  // shared memory must outlive the reads
}

}  // namespace flashsdpa
