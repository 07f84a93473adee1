// A consumer of the forward kernel: 64 rows of a tile, from their scores to their output.
#pragma once

#include "../../ptx/wgmma.cuh"
#include "fwd_delays.cuh"
#include "fwd_mask.cuh"
#include "fwd_shared.cuh"
#include "fwd_softmax.cuh"
#include "fwd_store.cuh"
#include "fwd_terms.cuh"

namespace flashsdpa {

// The consumers take turns in issuing products, in a ring; one alone has nobody to wait for.
template <int kConsumers>
struct Turn {
  int consumer;
  static constexpr int kThreads = 2 * ptx::kWarpgroupThreads;  // the one that waits and the one that passes
  __device__ static int id(int c) { return int(FwdBarrier::kTurn) + c; }
  __device__ void begin() const {
    if (kConsumers > 1 && consumer == kConsumers - 1) ptx::barrier_arrive(id(0), kThreads);
  }
  __device__ void wait() const {
    if (kConsumers > 1) ptx::barrier_sync(id(consumer), kThreads);
  }
  __device__ void pass() const {
    if (kConsumers > 1) ptx::barrier_arrive(id(consumer + 1 == kConsumers ? 0 : consumer + 1), kThreads);
  }
};

// Inlined whatever its size: the products of a function that is called are serialised.
template <typename Tile, bool kBFloat16>
__device__ __forceinline__ void fwd_consume(const FwdArgs& args, const FwdShared<Tile>& shared, int consumer, int thread) {
  constexpr int kBlockN = Tile::kBlockN;
  const int lane = thread % ptx::kWarpLanes, lane_row = thread / ptx::kWarpLanes * 16 + lane / 4;
  const bool elected = thread == 0;
  const float scale_log2 = args.scale * 1.4426950408889634f;
  const int queries = fwd_queries<Tile>(args);
  // The queries of this lane's two rows, counted from the consumer's first.
  const int lane_query = Tile::kFew ? lane_row / args.few.pack : lane_row;
  const int query_step = Tile::kFew ? (lane_row + 8) / args.few.pack - lane_query : 8;
  const Turn<Tile::kConsumers> turn{consumer};
  BlockMask<Tile> block_mask(args, shared.mask(consumer), thread);
  TileTerms<Tile> terms;
  Ring<Tile::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_phase = 0;
  float s[kBlockN / 2], o[Tile::kDimV / 2];
  uint32_t p[kBlockN / 16][4];
  FwdRange range{};  // of the tile
  int n = 0;         // the key block whose scores are computed

  const auto free_stage = [&](uint32_t barrier) {
    fwd_delay(FwdPoint::kFree);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  const auto free_key = [&] {
    free_stage(shared.empty_k(k_ring.stage()));
    k_ring.advance();
  };
  // After S of block n. Q of the next tile loads while the last softmax and P V of this one are under way.
  const auto free_scores = [&] {
    free_key();
    if (Tile::kOwnOut && !block_mask.more(n - 1, range.first)) free_stage(shared.empty_q(consumer));
  };
  const auto free_value = [&] {
    free_stage(shared.empty_v(v_ring.stage()));
    v_ring.advance();
  };
  const auto wait_for_key = [&] {
    ptx::mbarrier_wait(shared.full_k(k_ring.stage()), k_ring.phase());
    fwd_delay(FwdPoint::kKeyThere);
  };
  // Before its K is freed.
  const auto take_block = [&] { block_mask.take(args, shared.block(k_ring.stage()), consumer, n); };
  const auto wait_for_value = [&] { ptx::mbarrier_wait(shared.full_v(v_ring.stage()), v_ring.phase()); };
  // S = Q K^T of the stage in turn.
  const auto issue_scores = [&] {
    const uint64_t a = ptx::wgmma_operand(shared.q(consumer)), b = ptx::wgmma_operand(shared.k(k_ring.stage()));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kDim / 16; ++step) {
      const int box = step / 4, within = step % 4 * 32;  // 16 columns are 32 bytes, a box has four times 16
      ptx::Wgmma<kBlockN>::template ss<kBFloat16, 0>(s, ptx::wgmma_advance(a, box * Tile::kQueryBoxBytes + within),
                                                     ptx::wgmma_advance(b, box * Tile::kKeyBoxBytes + within),
                                                     step > 0);
    }
    ptx::wgmma_commit();
  };
  // O += P V of the stage in turn.
  const auto issue_output = [&] {
    const uint64_t b = ptx::wgmma_operand(shared.v(v_ring.stage()), Tile::kKeyBoxBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<Tile::kDimV>::template rs<kBFloat16, 1>(o, p[step],
                                                         ptx::wgmma_advance(b, step * 16 * kBoxRowBytes), 1);
    }
    ptx::wgmma_commit();
  };

  // All that is not done to every block; a scale that is not positive makes every block one of these.
  const bool same_sign = Tile::kMasked || args.sign == 1.f;
  const auto mask = [&] {
    terms.apply(args, s, range.row + lane_row - n * kBlockN - 2 * (lane % 4));
    block_mask.template apply<kBFloat16>(args, s);
    if (same_sign && n < range.plain_until && n >= range.plain_from) return;
    if (!same_sign) {
#pragma unroll
      for (float& score : s) score *= args.sign;
    }
    const int first_column = n * kBlockN + 2 * (lane % 4), query = range.row + lane_query;
    const int last[2] = {min(query + args.band_hi, args.seq_k - 1) - first_column,
                         min(query + query_step + args.band_hi, args.seq_k - 1) - first_column};
    mask_after(s, last);
    if (n < range.plain_from) {
      const int first[2] = {query + args.band_lo - first_column, query + query_step + args.band_lo - first_column};
      mask_before(s, first);
    }
  };
  // With terms there are no registers to keep what follows from it.
  const auto thread_again = [&] {
    return Tile::kTerms ? int(ptx::anew(uint32_t(threadIdx.x))) % ptx::kWarpgroupThreads : thread;
  };
  // Which weights of the block to come stay: drawn before its products, by all consumers at once, while none of theirs are under way.
  // A product of two words takes three times as long beside the tensor cores, and holds these up too (NOTES_TERMS.md).
  const auto draw = [&](bool first) {
    if constexpr (Tile::kTerms) {
      const int again = thread_again(), its_lane = again % ptx::kWarpLanes, next = block_mask.to_come();
      terms.draw(args, next, !first && next == n, range.row + again / ptx::kWarpLanes * 16 + its_lane / 4, 2 * (its_lane % 4),
                 [] { ptx::barrier_sync(int(FwdBarrier::kDraw), Tile::kConsumers * ptx::kWarpgroupThreads); });
    }
  };
  const auto keep = [&](int i, uint32_t pair) { return terms.keep(i, pair); };
  const auto next_tile = [&] {
    ptx::mbarrier_wait(shared.full_tile(tile_ring.stage()), tile_ring.phase());
    const FwdWork next = fwd_get_work<Tile::kFew>(shared.tile(tile_ring.stage()));
    block_mask.expect(shared.tile_block(tile_ring.stage()));
    __syncwarp();
    free_stage(shared.empty_tile(tile_ring.stage()));
    tile_ring.advance();
    return next;
  };
  // Goes past blocks that hold nothing for this consumer, only for the others of the tile.
  const auto skip = [&](int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      wait_for_key();
      free_key();
      turn.wait();
      turn.pass();
      wait_for_value();
      free_value();
    }
  };

  if constexpr (Tile::kFew) {
    zero_unused_rows<Tile>(shared.q(consumer), args.few.pack * args.few.queries, thread);
    ptx::fence_proxy_shared();
    ptx::barrier_sync(int(FwdBarrier::kOut) + consumer, ptx::kWarpgroupThreads);
  }

  turn.begin();
  while (true) {
    const FwdWork work = next_tile();
    if (work.end()) break;
    range = fwd_range<Tile>(args, work, consumer);
    block_mask.start(args, work, range.row, consumer);
    terms.start(args, work, shared.stream(consumer) + thread / ptx::kWarpLanes * kDropoutStreamBytes, lane);
    n = range.last - 1;
    skip(work.last - range.last);
    ptx::mbarrier_wait(shared.full_q(consumer), q_phase);
    q_phase ^= 1;
    wait_for_key();
    draw(/*first=*/true);
    if (!Tile::kTakeUnderProducts) take_block();
    issue_scores();
    if (Tile::kTakeUnderProducts) take_block();
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(s);
    free_scores();
    mask();
    block_mask.template remove<kBFloat16>(args, s);
    OnlineSoftmax softmax;
    float factor[2];  // no reference yet, and nothing to shrink
#pragma unroll
    for (int r = 0; r < 2; ++r) softmax.sum[r] = softmax.template raise<kBFloat16>(r, s, scale_log2, p, keep, factor[r]);
#pragma unroll
    for (float& value : o) value = 0.f;
#pragma unroll 1
    for (--n; block_mask.more(n, range.first); --n) {
      wait_for_key();
      draw(/*first=*/false);
      if (!Tile::kTakeUnderProducts) take_block();
      turn.wait();
      issue_scores();
      wait_for_value();
      issue_output();
      turn.pass();
      if (Tile::kTakeUnderProducts) take_block();
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(s);
      free_scores();
      mask();
      // P V of the last block still runs and reads `p`. The branch, hardly ever taken, is also what keeps the exponentials
      // before the wait for it: within a straight run of instructions the compiler moves the wait up.
      uint32_t next_p[kBlockN / 16][4];
      bool raised = false;  // for the whole warp; O, which P V still writes, shrinks after the wait
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[r] = 1.f;
        float total = softmax.template exponentiate<kBFloat16>(r, s, scale_log2, next_p, keep);
        if (!softmax.within_range(total)) {
          block_mask.template remove<kBFloat16>(args, s);
          terms.keep_again(args);
          raised = true;
          total = softmax.template raise<kBFloat16>(r, s, scale_log2, next_p, keep, factor[r]);
        }
        softmax.sum[r] += total;
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(o);
      if (raised) {
#pragma unroll
        for (int i = 0; i < Tile::kDimV / 2; ++i) o[i] *= factor[score_row(i)];
      }
      free_value();
#pragma unroll
      for (int i = 0; i < kBlockN / 4; ++i) p[i / 4][i % 4] = ptx::wgmma_register_copy(next_p[i / 4][i % 4]);
    }
    wait_for_value();
    issue_output();
    softmax.reduce();
    terms.finish(args, work, softmax);
    store_lse<Tile>(args, softmax, work, consumer, thread_again());
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(o);
    free_value();
    skip(range.first - work.first);
    store_rows<Tile, kBFloat16>(args, shared, work, softmax, terms, o, consumer, thread_again());
  }
  if (elected) ptx::tma_store_wait_read();  // shared memory must outlive the reads
}

}  // namespace flashsdpa
