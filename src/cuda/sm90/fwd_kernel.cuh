// Forward attention on Hopper: out = softmax(q k^T * scale) v and its log-sum-exp, for bfloat16 and float16.
//
//   warpgroup 0         producer: keeps the stages of K and V, and Q of the next tile, filled
//   warpgroups 1..      consumers, 64 queries each: S = Q K^T (shared x shared), softmax, O += P V (registers x shared)
//
// Two things hide the softmax behind the tensor cores (NOTES.md has the picture and the numbers). Within a consumer, S
// of the next key block is under way with P V of the last one. Between consumers, named barriers let one issue its
// products at a time, so that the softmax of one runs under the products of another.
#pragma once

#include "../../params.h"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/wgmma.cuh"
#include "fwd_delays.cuh"
#include "fwd_load.cuh"
#include "fwd_mask.cuh"
#include "fwd_schedule.cuh"
#include "fwd_softmax.cuh"
#include "fwd_store.cuh"
#include "ring.cuh"

namespace flashsdpa {

// Addresses of everything in shared memory.
template <typename Tile>
struct FwdShared {
  uint32_t base;
  __device__ uint32_t q(int consumer) const { return base + Tile::kQOffset + consumer * Tile::kQBytes; }
  __device__ uint32_t k(int stage) const { return base + Tile::kKOffset + stage * Tile::kKBytes; }
  __device__ uint32_t v(int stage) const { return base + Tile::kVOffset + stage * Tile::kVBytes; }
  __device__ uint32_t out(int consumer) const { return base + Tile::kOutOffset + consumer * Tile::kOutStride; }
  __device__ uint32_t full_q(int consumer) const { return barrier(consumer); }
  __device__ uint32_t empty_q(int consumer) const { return barrier(Tile::kConsumers + consumer); }
  __device__ uint32_t full_k(int stage) const { return barrier(2 * Tile::kConsumers + stage); }
  __device__ uint32_t empty_k(int stage) const { return barrier(2 * Tile::kConsumers + Tile::kStages + stage); }
  __device__ uint32_t full_v(int stage) const { return barrier(2 * Tile::kConsumers + 2 * Tile::kStages + stage); }
  __device__ uint32_t empty_v(int stage) const { return barrier(2 * Tile::kConsumers + 3 * Tile::kStages + stage); }
  __device__ uint32_t full_tile(int slot) const { return barrier(2 * Tile::kConsumers + 4 * Tile::kStages + slot); }
  __device__ uint32_t empty_tile(int slot) const { return full_tile(kTileSlots + slot); }
  __device__ uint32_t tile(int slot) const { return base + Tile::kTileOffset + kTileSlotBytes * slot; }
  __device__ uint32_t block(int stage) const { return base + Tile::kBlockOffset + 4 * stage; }
  __device__ uint32_t values(int consumer) const { return base + Tile::kValuesOffset + consumer * Tile::kValuesBytes; }
  __device__ uint32_t barrier(int i) const { return base + Tile::kBarrierOffset + 8 * i; }
};

template <typename Tile>
__device__ inline void fwd_init_barriers(const FwdShared<Tile>& shared) {
  for (int c = 0; c < Tile::kConsumers; ++c) {
    ptx::mbarrier_init(shared.full_q(c), 1);
    ptx::mbarrier_init(shared.empty_q(c), Tile::kOwnOut ? kWarpsPerGroup : 1);
  }
  for (int s = 0; s < Tile::kStages; ++s) {
    ptx::mbarrier_init(shared.full_k(s), 1);
    ptx::mbarrier_init(shared.full_v(s), 1);
    ptx::mbarrier_init(shared.empty_k(s), Tile::kConsumers * kWarpsPerGroup);
    ptx::mbarrier_init(shared.empty_v(s), Tile::kConsumers * kWarpsPerGroup);
  }
  for (int slot = 0; slot < kTileSlots; ++slot) {
    ptx::mbarrier_init(shared.full_tile(slot), 1);
    ptx::mbarrier_init(shared.empty_tile(slot), Tile::kConsumers * kWarpsPerGroup);
  }
  ptx::mbarrier_init_fence();
}

// kAlone: all tensors go by TMA, and thread 0 does it alone; else the whole warpgroup is here.
template <typename Tile, bool kAlone>
__device__ inline void fwd_produce(const FwdArgs& args, const FwdShared<Tile>& shared, int thread) {
  // One consumer: mostly decoding, which reads a key once.
  constexpr ptx::Reuse kKeyReuse = Tile::kConsumers > 1 ? ptx::Reuse::kSoon : ptx::Reuse::kNone;
  const int queries = fwd_queries<Tile>(args);
  Ring<Tile::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_phase = 0, next = blockIdx.x;
  while (true) {
    FwdWork work;
    std::conditional_t<Tile::kMasked, PlanWalk<Tile>, RangeWalk> walk;
    FwdBlock block{-1, 0, false};
    const auto first_block = [&] {
      if (work.end()) return;
      walk.start(args, work);
      block = walk.step();
      if (block.none()) work.last = work.first;  // of its blocks in the band, the plan leaves none
    };
    if (kAlone || thread == 0) {
      ptx::mbarrier_wait(shared.empty_tile(tile_ring.stage()), tile_ring.phase() ^ 1);
      work = fwd_work<Tile>(args, next);
      first_block();
      fwd_put_work<Tile::kFew>(shared.tile(tile_ring.stage()), work);
      ptx::mbarrier_arrive(shared.full_tile(tile_ring.stage()));
    }
    if constexpr (!kAlone) {
      ptx::barrier_sync(int(FwdBarrier::kProducer), ptx::kWarpgroupThreads);
      work = fwd_get_work<Tile::kFew>(shared.tile(tile_ring.stage()));
      first_block();
    }
    tile_ring.advance();
    if (work.end()) break;
    // Claimed as late as hides the latency of the claim: early claims deal out tiles before it is known who gets free.
    const auto claim = [&] {
      if (thread == 0) next = fwd_next_tile(args, next);
    };
    if (work.empty()) {
      claim();
      continue;
    }
    const int head_kv = work.head / args.group;

    const auto load_k = [&] {
      const int stage = k_ring.stage();
      const FwdSlot slot{shared.k(stage), shared.full_k(stage), shared.empty_k(stage), k_ring.phase() ^ 1};
      if constexpr (Tile::kMasked) {
        if (thread == 0) {  // who completes `full`, so that the slot cannot be filled and emptied meanwhile
          ptx::mbarrier_wait(slot.empty, slot.empty_parity);
          ptx::store_shared_4(shared.block(stage), block.word());
        }
      }
      load_rows<Tile::kBlockN, Tile::kBoxes, kKeyReuse, kAlone>(slot, args.k, &args.map_k, block.n * Tile::kBlockN, head_kv,
                                                                work.batch, thread);
      k_ring.advance();
    };
    const auto load_v = [&](int n) {
      const int stage = v_ring.stage();
      const FwdSlot slot{shared.v(stage), shared.full_v(stage), shared.empty_v(stage), v_ring.phase() ^ 1};
      load_rows<Tile::kBlockN, Tile::kBoxesV, kKeyReuse, kAlone>(slot, args.v, &args.map_v, n * Tile::kBlockN, head_kv,
                                                                 work.batch, thread);
      v_ring.advance();
    };

    // In the order in which consumers wait: S runs one block ahead of P V. The first K does not wait for Q's memory.
    FwdBlock ahead = walk.step();
    block.final = ahead.none();
    load_k();
#pragma unroll 1
    for (int c = 0; c < Tile::kConsumers; ++c) {
      const FwdSlot slot{shared.q(c), shared.full_q(c), shared.empty_q(c), q_phase ^ 1};
      load_queries<Tile, kAlone>(slot, args, work.row + c * queries, work.head, work.batch, thread);
    }
    q_phase ^= 1;
#pragma unroll 1
    while (!ahead.none()) {
      const int last = block.n;
      block = ahead;
      ahead = walk.step();
      block.final = ahead.none();
      load_k();
      load_v(last);
    }
    claim();
    load_v(block.n);
  }
}

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

template <typename Tile, bool kBFloat16>
__device__ inline void fwd_consume(const FwdArgs& args, const FwdShared<Tile>& shared, int consumer, int thread) {
  constexpr int kBlockN = Tile::kBlockN;
  const int lane = thread % ptx::kWarpLanes, lane_row = thread / ptx::kWarpLanes * 16 + lane / 4;
  const bool elected = thread == 0;
  const float scale_log2 = args.scale * 1.4426950408889634f;
  const int out_barrier = int(FwdBarrier::kOut) + consumer;
  const int queries = fwd_queries<Tile>(args);
  // The queries of this lane's two rows, counted from the consumer's first.
  const int lane_query = Tile::kFew ? lane_row / args.few.pack : lane_row;
  const int query_step = Tile::kFew ? (lane_row + 8) / args.few.pack - lane_query : 8;
  const Turn<Tile::kConsumers> turn{consumer};
  BlockMask<Tile> block_mask(args, shared.values(consumer), thread);
  Ring<Tile::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_phase = 0;
  float s[kBlockN / 2], o[Tile::kDimV / 2];
  uint32_t p[kBlockN / 16][4];

  const auto free_stage = [&](uint32_t barrier) {
    fwd_delay(FwdPoint::kFree);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  // After S of block n. Q of the next tile loads while the last softmax and P V of this one are under way.
  const auto free_scores = [&](const FwdWork& work, int n) {
    free_stage(shared.empty_k(k_ring.stage()));
    k_ring.advance();
    if (Tile::kOwnOut && !block_mask.more(n - 1, work.first)) free_stage(shared.empty_q(consumer));
  };
  // S = Q K^T of the stage in turn.
  const auto issue_scores = [&] {
    const uint64_t a = ptx::wgmma_operand(shared.q(consumer)), b = ptx::wgmma_operand(shared.k(k_ring.stage()));
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
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      ptx::Wgmma<Tile::kDimV>::template rs<kBFloat16, 1>(o, p[step],
                                                         ptx::wgmma_advance(b, step * 16 * kBoxRowBytes), 1);
    }
    ptx::wgmma_commit();
  };

  if constexpr (Tile::kFew) {
    zero_unused_rows<Tile>(shared.q(consumer), args.few.pack * args.few.queries, thread);
    ptx::fence_proxy_shared();
    ptx::barrier_sync(out_barrier, ptx::kWarpgroupThreads);
  }
  turn.begin();
  while (true) {
    ptx::mbarrier_wait(shared.full_tile(tile_ring.stage()), tile_ring.phase());
    const FwdWork work = fwd_get_work<Tile::kFew>(shared.tile(tile_ring.stage()));
    __syncwarp();
    free_stage(shared.empty_tile(tile_ring.stage()));
    tile_ring.advance();
    if (work.end()) break;
    const int row = work.row + consumer * queries;  // the first query
    // Key blocks from `plain_until` on, and before `plain_from`, hold keys that some row here does not see.
    const bool same_sign = Tile::kMasked || args.sign == 1.f;
    const int plain_until = same_sign ? clamp_to(row + args.band_hi + 1, 0, args.seq_k) / kBlockN : 0;
    const int plain_from = (clamp_to(row + queries - 1 + args.band_lo, 0, args.seq_k) + kBlockN - 1) / kBlockN;
    OnlineSoftmax softmax;
    block_mask.start(args, work, row);

    // All that is not done to every block; a scale that is not positive makes every block one of these.
    const auto mask = [&](int n) {
      block_mask.template apply<kBFloat16>(args, s);
      if (n < plain_until && n >= plain_from) return;
      if (!same_sign) {
#pragma unroll
        for (float& score : s) score *= args.sign;
      }
      const int first_column = n * kBlockN + 2 * (lane % 4), query = row + lane_query;
      const int last[2] = {min(query + args.band_hi, args.seq_k - 1) - first_column,
                           min(query + query_step + args.band_hi, args.seq_k - 1) - first_column};
      mask_after(s, last);
      if (n < plain_from) {
        const int first[2] = {query + args.band_lo - first_column, query + query_step + args.band_lo - first_column};
        mask_before(s, first);
      }
    };
#pragma unroll
    for (float& value : o) value = 0.f;
    if (!work.empty()) {
      ptx::mbarrier_wait(shared.full_q(consumer), q_phase);
      ptx::mbarrier_wait(shared.full_k(k_ring.stage()), k_ring.phase());
      fwd_delay(FwdPoint::kKeyThere);
      int n = work.last - 1;
      block_mask.take(args, shared.block(k_ring.stage()), consumer, n);
      ptx::wgmma_fence();
      issue_scores();
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(s);
      free_scores(work, n);
      mask(n);
      float factor[2];  // no reference yet, nothing to shrink
#pragma unroll
      for (int r = 0; r < 2; ++r) softmax.sum[r] = softmax.template raise<kBFloat16>(r, s, scale_log2, p, factor[r]);

#pragma unroll 1
      for (--n; block_mask.more(n, work.first); --n) {
        ptx::mbarrier_wait(shared.full_k(k_ring.stage()), k_ring.phase());
        fwd_delay(FwdPoint::kKeyThere);
        block_mask.take(args, shared.block(k_ring.stage()), consumer, n);
        turn.wait();
        ptx::wgmma_fence();
        issue_scores();
        ptx::mbarrier_wait(shared.full_v(v_ring.stage()), v_ring.phase());
        ptx::wgmma_fence();
        issue_output();
        turn.pass();
        ptx::wgmma_wait<1>();
        ptx::wgmma_settle(s);
        free_scores(work, n);
        mask(n);
        // P V of the last block still runs and reads `p`. The branch, hardly ever taken, is also what keeps the exponentials
        // before the wait for it: within a straight run of instructions the compiler moves the wait up.
        uint32_t next_p[kBlockN / 16][4];
        bool raised = false;  // for the whole warp; O, which P V still writes, shrinks after the wait
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          factor[r] = 1.f;
          float total = softmax.template exponentiate<kBFloat16>(r, s, scale_log2, next_p);
          if (!softmax.within_range(total)) {
            raised = true;
            total = softmax.template raise<kBFloat16>(r, s, scale_log2, next_p, factor[r]);
          }
          softmax.sum[r] += total;
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_settle(o);
        if (raised) {
#pragma unroll
          for (int i = 0; i < Tile::kDimV / 2; ++i) o[i] *= factor[score_row(i)];
        }
        free_stage(shared.empty_v(v_ring.stage()));
        v_ring.advance();
#pragma unroll
        for (int i = 0; i < kBlockN / 4; ++i) p[i / 4][i % 4] = ptx::wgmma_register_copy(next_p[i / 4][i % 4]);
      }
      q_phase ^= 1;
      ptx::mbarrier_wait(shared.full_v(v_ring.stage()), v_ring.phase());
      ptx::wgmma_fence();
      issue_output();
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(o);
      free_stage(shared.empty_v(v_ring.stage()));
      v_ring.advance();
    }

    softmax.reduce();
    const float factor[2] = {softmax.inverse(0), softmax.inverse(1)};
    const bool partial = Tile::kFew && args.few.splits > 1;
    if (!partial && lane % 4 == 0) {
      const int heads_q = Tile::kFew ? args.few.heads_q : args.heads_q;
      float* lse = args.lse + (int64_t(work.batch) * heads_q + fwd_first_head<Tile>(args, work.head)) * args.seq_q;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const FwdRow at = fwd_row<Tile>(args, work.head, row, lane_row + 8 * half);
        if (at.used) lse[at.further_head * args.seq_q + at.query] = softmax.log_sum_exp(half, args.scale);
      }
    }
    // The output of a tile without keys cannot go through Q's memory: Q of the next tile may be there already.
    if (!partial && args.out.tma && (Tile::kOwnOut || !work.empty())) {
      // Own staging memory: the store of the tile before must have read it. Q's memory: all warps must be done with Q.
      fwd_delay(FwdPoint::kStore);
      if (elected) ptx::tma_store_wait_read();
      ptx::barrier_sync(out_barrier, ptx::kWarpgroupThreads);
      stage_out<Tile, kBFloat16>(shared.out(consumer), o, factor, thread);
      ptx::fence_proxy_shared();
      ptx::barrier_sync(out_barrier, ptx::kWarpgroupThreads);
      fwd_delay(FwdPoint::kStore);
      if (elected && row < args.seq_q) store_staged<Tile>(shared.out(consumer), args, row, work.head, work.batch);
    } else {
      if (partial) {
        store_partial<Tile>(args, o, softmax, work, row, thread);
      } else {
        store_plain<Tile, kBFloat16>(args, o, factor, row, work.head, work.batch, thread);
      }
      if constexpr (!Tile::kOwnOut) ptx::barrier_sync(out_barrier, ptx::kWarpgroupThreads);
    }
    if constexpr (!Tile::kOwnOut) {
      if (elected && !work.empty()) {
        ptx::tma_store_wait_read();
        fwd_delay(FwdPoint::kFree);
        ptx::mbarrier_arrive(shared.empty_q(consumer));
      }
    }
  }
  if (elected) ptx::tma_store_wait_read();  // shared memory must outlive the reads
}

template <DType kType, int kDim, int kDimV, int kConsumers, bool kFew, bool kMasked>
__global__ void __launch_bounds__((FwdTile<kDim, kDimV, kConsumers, kFew, kMasked>::kThreads), 1)
    flashsdpa_fwd_sm90(const __grid_constant__ FwdArgs args) {
  using Tile = FwdTile<kDim, kDimV, kConsumers, kFew, kMasked>;
  extern __shared__ uint8_t memory[];
  const FwdShared<Tile> shared{(ptx::shared_address(memory) + 1023) & ~1023u};
  // The same for all threads of a warp, and told so to the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ptx::kWarpgroupThreads, 0);
  const int thread = threadIdx.x % ptx::kWarpgroupThreads;
  fwd_poison<Tile::kSharedBytes>(ptx::shared_address(memory));
  if (threadIdx.x == 0) fwd_init_barriers(shared);
  __syncthreads();

  if (warpgroup == 0) {
    if constexpr (Tile::kHandOver) ptx::registers_give<Tile::kProducerRegisters>();
    if (!(args.q.tma && args.k.tma && args.v.tma)) {
      fwd_produce<Tile, false>(args, shared, thread);
    } else if (thread == 0) {
      fwd_produce<Tile, true>(args, shared, thread);
    }
  } else {
    if constexpr (Tile::kHandOver) ptx::registers_take<Tile::kConsumerRegisters>();
    fwd_consume<Tile, kType == DType::kBFloat16>(args, shared, warpgroup - 1, thread);
  }
}

}  // namespace flashsdpa
