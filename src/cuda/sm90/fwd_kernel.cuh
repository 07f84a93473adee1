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
  Ring<Tile::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_phase = 0, next = blockIdx.x;
  while (true) {
    FwdWork work;
    if (kAlone || thread == 0) {
      ptx::mbarrier_wait(shared.empty_tile(tile_ring.stage()), tile_ring.phase() ^ 1);
      work = fwd_work<Tile::kBlockM, Tile::kBlockN>(args, next);
      fwd_put_work(shared.tile(tile_ring.stage()), work);
      ptx::mbarrier_arrive(shared.full_tile(tile_ring.stage()));
    }
    if constexpr (!kAlone) {
      ptx::barrier_sync(int(FwdBarrier::kProducer), ptx::kWarpgroupThreads);
      work = fwd_get_work(shared.tile(tile_ring.stage()));
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

    const auto load_k = [&](int n) {
      ptx::mbarrier_wait(shared.empty_k(k_ring.stage()), k_ring.phase() ^ 1);
      load_tile<Tile::kBlockN, Tile::kBoxes, ptx::Reuse::kSoon, kAlone>(
          shared.k(k_ring.stage()), shared.full_k(k_ring.stage()), args.k, &args.map_k,
          {n * Tile::kBlockN, head_kv, work.batch}, thread);
      k_ring.advance();
    };
    const auto load_v = [&](int n) {
      ptx::mbarrier_wait(shared.empty_v(v_ring.stage()), v_ring.phase() ^ 1);
      load_tile<Tile::kBlockN, Tile::kBoxesV, ptx::Reuse::kSoon, kAlone>(
          shared.v(v_ring.stage()), shared.full_v(v_ring.stage()), args.v, &args.map_v,
          {n * Tile::kBlockN, head_kv, work.batch}, thread);
      v_ring.advance();
    };

    // In the order in which consumers wait: S runs one block ahead of P V. The first K does not wait for Q's memory.
    load_k(work.last - 1);
#pragma unroll 1
    for (int c = 0; c < Tile::kConsumers; ++c) {
      ptx::mbarrier_wait(shared.empty_q(c), q_phase ^ 1);
      load_tile<kConsumerRows, Tile::kBoxes, ptx::Reuse::kNone, kAlone>(
          shared.q(c), shared.full_q(c), args.q, &args.map_q,
          {work.row + c * kConsumerRows, work.head, work.batch}, thread);
    }
    q_phase ^= 1;
#pragma unroll 1
    for (int n = work.last - 2; n >= work.first; --n) {
      load_k(n);
      load_v(n + 1);
    }
    claim();
    load_v(work.first);
  }
}

// The consumers take turns in issuing products, in a ring.
template <int kConsumers>
struct Turn {
  int consumer;
  static constexpr int kThreads = 2 * ptx::kWarpgroupThreads;  // the one that waits and the one that passes
  __device__ static int id(int c) { return int(FwdBarrier::kTurn) + c; }
  __device__ void begin() const {
    if (consumer == kConsumers - 1) ptx::barrier_arrive(id(0), kThreads);
  }
  __device__ void wait() const { ptx::barrier_sync(id(consumer), kThreads); }
  __device__ void pass() const { ptx::barrier_arrive(id(consumer + 1 == kConsumers ? 0 : consumer + 1), kThreads); }
};

template <typename Tile, bool kBFloat16>
__device__ inline void fwd_consume(const FwdArgs& args, const FwdShared<Tile>& shared, int consumer, int thread) {
  constexpr int kBlockN = Tile::kBlockN;
  const int lane = thread % ptx::kWarpLanes, lane_row = thread / ptx::kWarpLanes * 16 + lane / 4;
  const bool elected = thread == 0;
  const float scale_log2 = args.scale * 1.4426950408889634f;
  const int out_barrier = int(FwdBarrier::kOut) + consumer;
  const Turn<Tile::kConsumers> turn{consumer};
  Ring<Tile::kStages> k_ring, v_ring;
  Ring<kTileSlots> tile_ring;
  uint32_t q_phase = 0;
  float s[kBlockN / 2], o[Tile::kDimV / 2];
  uint32_t p[kBlockN / 16][4];

  const auto free_stage = [&](uint32_t barrier) {
    fwd_delay(FwdPoint::kFree);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
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

  turn.begin();
  while (true) {
    ptx::mbarrier_wait(shared.full_tile(tile_ring.stage()), tile_ring.phase());
    const FwdWork work = fwd_get_work(shared.tile(tile_ring.stage()));
    __syncwarp();
    free_stage(shared.empty_tile(tile_ring.stage()));
    tile_ring.advance();
    if (work.end()) break;
    const int row = work.row + consumer * kConsumerRows;
    // Key blocks from `plain_until` on, and before `plain_from`, hold keys that some row here does not see.
    const int plain_until = args.sign == 1.f ? clamp_to(row + args.band_hi + 1, 0, args.seq_k) / kBlockN : 0;
    const int plain_from = (clamp_to(row + kConsumerRows - 1 + args.band_lo, 0, args.seq_k) + kBlockN - 1) / kBlockN;
    OnlineSoftmax softmax;

    // All that is not done to every block; a scale that is not positive makes every block one of these.
    const auto mask = [&](int n) {
      if (n < plain_until && n >= plain_from) return;
      if (args.sign != 1.f) {
#pragma unroll
        for (float& score : s) score *= args.sign;
      }
      const int first_column = n * kBlockN + 2 * (lane % 4), first_row = row + lane_row;
      const int last[2] = {min(first_row + args.band_hi, args.seq_k - 1) - first_column,
                           min(first_row + 8 + args.band_hi, args.seq_k - 1) - first_column};
      mask_after(s, last);
      if (n < plain_from) {
        const int first[2] = {first_row + args.band_lo - first_column, first_row + 8 + args.band_lo - first_column};
        mask_before(s, first);
      }
    };
#pragma unroll
    for (float& value : o) value = 0.f;
    if (!work.empty()) {
      ptx::mbarrier_wait(shared.full_q(consumer), q_phase);
      ptx::mbarrier_wait(shared.full_k(k_ring.stage()), k_ring.phase());
      fwd_delay(FwdPoint::kKeyThere);
      ptx::wgmma_fence();
      issue_scores();
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(s);
      free_stage(shared.empty_k(k_ring.stage()));
      k_ring.advance();
      mask(work.last - 1);
      float factor[2];  // no reference yet, nothing to shrink
#pragma unroll
      for (int r = 0; r < 2; ++r) softmax.sum[r] = softmax.template raise<kBFloat16>(r, s, scale_log2, p, factor[r]);

#pragma unroll 1
      for (int n = work.last - 2; n >= work.first; --n) {
        ptx::mbarrier_wait(shared.full_k(k_ring.stage()), k_ring.phase());
        fwd_delay(FwdPoint::kKeyThere);
        turn.wait();
        ptx::wgmma_fence();
        issue_scores();
        ptx::mbarrier_wait(shared.full_v(v_ring.stage()), v_ring.phase());
        ptx::wgmma_fence();
        issue_output();
        turn.pass();
        ptx::wgmma_wait<1>();
        ptx::wgmma_settle(s);
        free_stage(shared.empty_k(k_ring.stage()));
        k_ring.advance();
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
      if constexpr (Tile::kOwnOut) free_stage(shared.empty_q(consumer));
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
    if (lane % 4 == 0) {
      float* lse = args.lse + (int64_t(work.batch) * args.heads_q + work.head) * args.seq_q;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + lane_row + 8 * half;
        if (r < args.seq_q) lse[r] = softmax.log_sum_exp(half, args.scale);
      }
    }
    // The output of a tile without keys cannot go through Q's memory: Q of the next tile may be there already.
    if (args.out.tma && (Tile::kOwnOut || !work.empty())) {
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
      store_plain<Tile, kBFloat16>(args.out, o, factor, row, work.head, work.batch, thread);
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

template <DType kType, int kDim, int kDimV, int kConsumers>
__global__ void __launch_bounds__((FwdTile<kDim, kDimV, kConsumers>::kThreads), 1)
    flashsdpa_fwd_sm90(const __grid_constant__ FwdArgs args) {
  using Tile = FwdTile<kDim, kDimV, kConsumers>;
  extern __shared__ uint8_t memory[];
  const FwdShared<Tile> shared{(ptx::shared_address(memory) + 1023) & ~1023u};
  // The same for all threads of a warp, and told so to the compiler.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / ptx::kWarpgroupThreads, 0);
  const int thread = threadIdx.x % ptx::kWarpgroupThreads;
  fwd_poison<Tile::kSharedBytes>(ptx::shared_address(memory));
  if (threadIdx.x == 0) fwd_init_barriers(shared);
  __syncthreads();

  if (warpgroup == 0) {
    ptx::registers_give<Tile::kProducerRegisters>();
    if (!(args.q.tma && args.k.tma && args.v.tma)) {
      fwd_produce<Tile, false>(args, shared, thread);
    } else if (thread == 0) {
      fwd_produce<Tile, true>(args, shared, thread);
    }
  } else {
    ptx::registers_take<Tile::kConsumerRegisters>();
    fwd_consume<Tile, kType == DType::kBFloat16>(args, shared, warpgroup - 1, thread);
  }
}

}  // namespace flashsdpa
