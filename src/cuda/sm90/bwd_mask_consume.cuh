// The consumers of the mask's gradient: each owns 64 queries of a tile and all its keys.
//
// For each visit: S = Q K^T and dP = dO V^T, P = exp2(S + mask - shift), and dS = P (dP - delta) is added up in registers. What
// the mask adds is the same in all visits of a tile, as they differ along the axes in which the mask has size 1: its values stay in
// shared memory, as TMA brings them, or, where it cannot, those of its own scores for each lane.
#pragma once

#include "../../ptx/wgmma.cuh"
#include "bwd_mask_sum.cuh"
#include "bwd_scores.cuh"
#include "bwd_terms.cuh"
#include "fwd_load.cuh"

namespace flashsdpa {

// The values of a lane's scores, for the visits of one tile. `row`, `column`: the lane's first, in the tile.
template <typename Tile, bool kBFloat16>
__device__ inline void bwd_mask_lay_values(const BwdMaskArgs& args, const BwdMaskShared<Tile>& shared, const BwdMaskPlace& tile,
                                           int row, int column, int thread) {
  const FwdMask& mask = args.bwd.mask;
  const bool wide = mask.dtype == DType::kFloat32;
  const int64_t plane = tile.batch * mask.stride_batch + tile.head * mask.stride_head;
  const int64_t rows[2] = {plane + min(tile.m * Tile::kBlockM + row, mask.queries - 1) * mask.stride_query,
                           plane + min(tile.m * Tile::kBlockM + row + 8, mask.queries - 1) * mask.stride_query};
  const int first_key = tile.n * Tile::kBlockN + column;
  // Pairs that lie together are all asked for at once: the registers of the scores are free yet.
  const auto lay_pairs = [&](auto type) {
    using Pair = decltype(type);
    Pair pairs[Tile::kBlockN / 4];
#pragma unroll
    for (int pair = 0; pair < Tile::kBlockN / 4; ++pair) {
      const int64_t at = rows[pair % 2] + min(first_key + score_column(2 * pair), mask.keys - 2);
      pairs[pair] = __ldg(reinterpret_cast<const Pair*>(static_cast<const char*>(mask.values) + at * (sizeof(Pair) / 2)));
    }
#pragma unroll
    for (int pair = 0; pair < Tile::kBlockN / 4; ++pair) {
      if constexpr (sizeof(Pair) == 8) {
        ptx::store_shared_8(shared.values(pair, thread), pairs[pair].x, pairs[pair].y);
      } else {
        float low, high;
        ptx::unpack<kBFloat16>(pairs[pair], low, high);
        ptx::store_shared_8(shared.values(pair, thread), __float_as_uint(low), __float_as_uint(high));
      }
    }
  };
  if (mask.vectors && mask.keys % 2 == 0) {
    if (wide) {
      lay_pairs(uint2());
    } else {
      lay_pairs(uint32_t());
    }
    return;
  }
#pragma unroll 8
  for (int pair = 0; pair < Tile::kBlockN / 4; ++pair) {
    const int key = first_key + score_column(2 * pair);
    const int64_t at = rows[pair % 2] + min(key, mask.keys - 1) * mask.stride_key;
    const int64_t step = key + 1 < mask.keys ? mask.stride_key : 0;
    float low, high;
    if (wide) {
      const float* values = static_cast<const float*>(mask.values) + at;
      low = __ldg(values);
      high = __ldg(values + step);
    } else {
      const uint16_t* values = static_cast<const uint16_t*>(mask.values) + at;
      low = ptx::unpack<kBFloat16>(__ldg(values));
      high = ptx::unpack<kBFloat16>(__ldg(values + step));
    }
    ptx::store_shared_8(shared.values(pair, thread), __float_as_uint(low), __float_as_uint(high));
  }
}

template <typename Tile, bool kBFloat16>
__device__ inline void bwd_mask_consume(const BwdMaskArgs& args, const BwdMaskShared<Tile>& shared) {
  constexpr int kScores = Tile::kBlockN / 2;
  const BwdArgs& bwd = args.bwd;
  // Anew each time, as registers are short. Rows are the tile's; each warp has 16.
  const auto own = [] { return int(threadIdx.x) - ptx::kWarpgroupThreads; };  // of the threads of all consumers
  const auto lane = [] { return int(threadIdx.x) % ptx::kWarpLanes; };
  const auto row = [&] { return own() / ptx::kWarpLanes * 16 + lane() / 4; };
  const auto column = [&] { return 2 * (lane() % 4); };
  const auto first_row = [&] { return int(__shfl_sync(0xffffffffu, own() / ptx::kWarpgroupThreads, 0)) * kConsumerRows; };
  const auto piece = [&] { return first_row() / Tile::kPieceRows; };
  const auto piece_row = [&] { return row() % Tile::kPieceRows; };

  const auto by_tma = [&] { return Tile::kValuesByTma && bwd.values.tma; };

  float sum[kScores], s[kScores], dp[kScores];
  BwdMaskHeard<Tile> visit{shared, {}};

  // Who leaves a stage is the last visit that has use for it.
  const auto free_stage = [&](BwdMaskVisit::Flag last, uint32_t barrier) {
    if (!visit.is(last)) return;
    fwd_delay(FwdPoint::kFree);
    if (lane() == 0) ptx::mbarrier_arrive(barrier);
  };
  // This consumer's queries x the keys, of Q and K or of dO and V.
  const auto issue_scores = [&](auto& d, auto columns, uint32_t queries, uint32_t keys) {
    const uint64_t a = ptx::wgmma_operand(queries + first_row() % Tile::kPieceRows * kBoxRowBytes), b = ptx::wgmma_operand(keys);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < decltype(columns)::value / 16; ++step) {
      const int box = step / 4, within = step % 4 * 32;  // 16 columns are 32 bytes, a box has four times 16
      ptx::Wgmma<Tile::kBlockN>::template ss<kBFloat16, 0>(d, ptx::wgmma_advance(a, box * Tile::kQueryBoxBytes + within),
                                                           ptx::wgmma_advance(b, box * Tile::kKeyBoxBytes + within), step > 0);
    }
    ptx::wgmma_commit();
  };
  // With terms: the lane's first query and key of the visit in turn, and which of its weights dropout keeps.
  const auto query = [&] { return visit.m() * Tile::kBlockM + row(); };
  const auto key = [&] { return visit.n() * Tile::kBlockN + column(); };
  uint32_t kept[kScores / 32];
  const auto draw = [&] {
    if constexpr (Tile::kTerms) {
#pragma unroll
      for (uint32_t& word : kept) word = ~0u;
      if (!bwd.terms.seed) return;
      DropoutStream(bwd.terms, visit.stream()).draw<false>(query(), key(), kept);
    }
  };
  // Scores as they are to be exponentiated: scaled, values added, -inf where removed, also over NaN.
  const auto mask = [&](const BwdStats<Tile::kPieceRows>& stats) {
    if constexpr (Tile::kTerms) {
      scale_and_cap(bwd.terms, s);
      if (bwd.terms.slopes.data) {
        take_slopes_off(s, value_of_head(bwd.terms.slopes, visit.batch(), visit.head()), query() + bwd.terms.diagonal - key());
      }
    }
    const auto add_values = [&](int i, const float (&value)[2]) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {  // in two steps: a choice of either makes the assembler keep both, and spill
        s[i + e] = fmaf(s[i + e], bwd.sign, value[e]);
        if (value[e] == kMinusInfinity) s[i + e] = kMinusInfinity;
      }
    };
    if (by_tma()) {
      // The four fragments of 16 rows and 16 columns; a lane names a line of 8 values.
      const int line = own() / ptx::kWarpLanes * 16 + lane() % 16;
      const uint32_t at = shared.values_stage(visit.values_stage()) + swizzled_offset<Tile::kBlockM>(line, lane() / 16);
#pragma unroll
      for (int i = 0; i < kScores; i += 8) {
        uint32_t pairs[4];
        ptx::ldmatrix_x4<false>((at ^ i / 8 % 4 * 32) + i / 32 * (Tile::kBlockM * kBoxRowBytes), pairs);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          float value[2];
          ptx::unpack<kBFloat16>(pairs[t], value[0], value[1]);
          add_values(i + 2 * t, value);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        float value[2];
        ptx::load_shared_floats(shared.values(i / 2, own()), value[0], value[1]);
        add_values(i, value);
      }
    }
    if (visit.is(BwdMaskVisit::kEdge)) {
      mask_band(bwd, s, query(), key());
    }
    if (any_coarse(stats.coarse(lane()))) {
      const float high[2] = {ptx::load_shared_float(stats.high(piece_row())), ptx::load_shared_float(stats.high(piece_row() + 8))};
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = coarse_score(bwd, s[i], high[score_row(i)]);
    }
  };
  const auto add_visit = [&] {
    // What the visit shares with the one before is waited for again: it is there.
    ptx::mbarrier_wait(shared.full_q(visit.q_stage()), visit.q_phase());
    ptx::mbarrier_wait(shared.full_k(visit.k_stage()), visit.k_phase());
    fwd_delay(FwdPoint::kKeyThere);
    issue_scores(s, std::integral_constant<int, Tile::kDim>(), shared.q(visit.q_stage()) + piece() * Tile::kQPieceBytes,
                 shared.k(visit.k_stage()));
    ptx::mbarrier_wait(shared.full_grad_out(visit.q_stage()), visit.q_phase());  // and the stats
    ptx::mbarrier_wait(shared.full_v(visit.v_stage()), visit.v_phase());
    const auto issue_grad_weights = [&] {
      issue_scores(dp, std::integral_constant<int, Tile::kDimV>(),
                   shared.grad_out(visit.q_stage()) + piece() * Tile::kGradOutPieceBytes, shared.v(visit.v_stage()));
    };
    if constexpr (Tile::kTerms) {
      draw();
    } else {
      issue_grad_weights();
    }
    ptx::wgmma_wait<Tile::kTerms ? 0 : 1>();
    ptx::wgmma_settle(s);
    free_stage(BwdMaskVisit::kLeaveQ, shared.empty_q(visit.q_stage()));
    free_stage(BwdMaskVisit::kLeaveK, shared.empty_k(visit.k_stage()));
    const BwdStats<Tile::kPieceRows> stats{shared.stats(visit.q_stage(), piece())};
    mask(stats);
    const float shift[2] = {ptx::load_shared_float(stats.shift(piece_row())), ptx::load_shared_float(stats.shift(piece_row() + 8))};
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = ptx::exp2_fast(fmaf(s[i], bwd.scale_log2, -shift[score_row(i)]));
    if constexpr (Tile::kTerms) issue_grad_weights();  // not earlier: what terms do needs its registers
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(dp);
    const float delta[2] = {ptx::load_shared_float(stats.delta(piece_row())), ptx::load_shared_float(stats.delta(piece_row() + 8))};
    __syncwarp();  // all lanes have read the stats
    free_stage(BwdMaskVisit::kLeaveQ, shared.empty_grad_out(visit.q_stage()));
    free_stage(BwdMaskVisit::kLeaveK, shared.empty_v(visit.v_stage()));
    if (visit.m() * Tile::kBlockM + first_row() >= bwd.seq_q) return;  // these rows have no stats
    if constexpr (Tile::kTerms) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) dp[i] *= is_kept<false>(kept, i) ? bwd.terms.rescale : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {  // a weight of 0 says nothing, whatever NaN V holds there
      sum[i] = s[i] == 0.f ? sum[i] : fmaf(s[i], dp[i] - delta[score_row(i)], sum[i]);
    }
  };

  while (true) {
    visit.wait();
    if (visit.is(BwdMaskVisit::kEnd)) break;
    if (visit.is(BwdMaskVisit::kFirst)) {
#pragma unroll
      for (float& value : sum) value = 0.f;
      if (visit.is(BwdMaskVisit::kAny) && by_tma()) {
        ptx::mbarrier_wait(shared.full_values(visit.values_stage()), visit.values_phase());
      } else if (visit.is(BwdMaskVisit::kAny)) {
        bwd_mask_lay_values<Tile, kBFloat16>(args, shared, bwd_mask_first(args, visit.unit() % args.tiles), row(), column(), own());
      }
    }
    if (visit.is(BwdMaskVisit::kAny)) add_visit();
    if (visit.is(BwdMaskVisit::kLast)) {
      const uint32_t staging = visit.is(BwdMaskVisit::kAny) && by_tma() ? shared.values_stage(visit.values_stage()) : 0;
      bwd_mask_store<Tile, kBFloat16>(args, shared, visit.unit(), sum, own(), staging);
      __syncwarp();
      if (visit.is(BwdMaskVisit::kAny)) free_stage(BwdMaskVisit::kLast, shared.empty_values(visit.values_stage()));
    }
    visit.leave(lane());
  }
}

}  // namespace flashsdpa
