// A consumer's epilogue: 64 rows of output, scaled and rounded, to global memory.
#pragma once

#include "fwd_delays.cuh"
#include "fwd_load.cuh"
#include "fwd_shared.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

struct alignas(8) FloatPair {
  float low, high;
};

// The rows of q's memory that no load writes: zeros, so that their scores are finite.
template <typename Tile>
__device__ inline void zero_unused_rows(uint32_t shared, int used_rows, int thread) {
  for (int i = thread; i < (kConsumerRows - used_rows) * Tile::kBoxes * 8; i += ptx::kWarpgroupThreads) {
    const int chunk = i % (Tile::kBoxes * 8), row = used_rows + i / (Tile::kBoxes * 8);
    ptx::store_shared_16(shared + swizzled_offset<kConsumerRows>(row, chunk), 0, 0, 0, 0);
  }
}

// Through shared memory: the tile in the layout of a TMA box, one thread issues the store. The caller has made sure
// that the previous store has read this memory.
template <typename Tile, bool kBFloat16>
__device__ inline void stage_out(uint32_t shared, const float (&o)[Tile::kDimV / 2], const float (&factor)[2],
                                 int thread) {
  const int lane = thread % ptx::kWarpLanes, warp = thread / ptx::kWarpLanes;
  const int row = warp * 16 + lane % 16, half = lane / 16;  // whose address this lane gives: of 8 columns, or 8 more
#pragma unroll
  for (int j = 0; j < Tile::kDimV / 16; ++j) {
    uint32_t r[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int i = 8 * j + 2 * t;
      r[t] = ptx::pack<kBFloat16>(o[i] * factor[t % 2], o[i + 1] * factor[t % 2]);
    }
    ptx::stmatrix_x4(shared + swizzled_offset<kConsumerRows>(row, 2 * j + half), r[0], r[1], r[2], r[3]);
  }
}

template <typename Tile>
__device__ inline void store_staged(uint32_t shared, const FwdArgs& args, int row, int head, int batch) {
#pragma unroll
  for (int box = 0; box < Tile::kBoxesV; ++box) {
    const uint32_t from = shared + box * Tile::kQueryBoxBytes;
    if constexpr (Tile::kFew) {
      const int in_group = fwd_first_in_group(args, head), group = head / args.group;
      ptx::tma_store(&args.map_out, from, ptx::PackedBoxOrigin{box * kBoxColumns, in_group, row, group, batch});
    } else {
      ptx::tma_store(&args.map_out, from, ptx::BoxOrigin{box * kBoxColumns, row, head, batch});
    }
  }
  ptx::tma_store_commit();
}

// Straight from the accumulators, for outputs that TMA cannot write.
template <typename Tile, bool kBFloat16>
__device__ inline void store_plain(const FwdArgs& args, const float (&o)[Tile::kDimV / 2], const float (&factor)[2],
                                   int first_query, int head, int batch, int thread) {
  const FwdTensor& out = args.out;
  const int lane = thread % ptx::kWarpLanes, warp = thread / ptx::kWarpLanes;
  uint16_t* base = out.data + batch * out.stride_batch + fwd_first_head<Tile>(args, head) * out.stride_head;
#pragma unroll
  for (int i = 0; i < Tile::kDimV / 2; i += 2) {
    const FwdRow at = fwd_row<Tile>(args, head, first_query, warp * 16 + lane / 4 + 8 * score_row(i));
    const int column = score_column(i) + 2 * (lane % 4);
    const uint32_t pair = ptx::pack<kBFloat16>(o[i] * factor[score_row(i)], o[i + 1] * factor[score_row(i)]);
    uint16_t* target = base + at.further_head * out.stride_head + at.query * out.stride_row + column;
    if (at.used && column < out.columns) target[0] = uint16_t(pair);
    if (at.used && column + 1 < out.columns) target[1] = uint16_t(pair >> 16);
  }
}

// The sums over a part of the keys, as they are.
template <typename Tile>
__device__ inline void store_partial(const FwdArgs& args, const float (&o)[Tile::kDimV / 2],
                                     const OnlineSoftmax& softmax, const FwdWork& work, int first_query, int thread) {
  const FwdPartial& partial = args.few.partial;
  const int lane = thread % ptx::kWarpLanes, warp = thread / ptx::kWarpLanes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const FwdRow at = fwd_row<Tile>(args, work.head, first_query, warp * 16 + lane / 4 + 8 * half);
    if (!at.used) continue;
    const int head = fwd_first_head<Tile>(args, work.head) + at.further_head;
    const int64_t row = (int64_t(work.batch) * args.few.heads_q + head) * args.seq_q + at.query;
    const int64_t line = int64_t(work.split) * partial.rows + row;
    if (lane % 4 == 0) {
      partial.weight[2 * line] = softmax.max[half];
      partial.weight[2 * line + 1] = softmax.sum[half];
    }
    float* out = partial.out + line * partial.row_floats;
#pragma unroll
    for (int i = 2 * half; i < Tile::kDimV / 2; i += 4) {
      const int column = score_column(i) + 2 * (lane % 4);
      if (column < partial.row_floats) *reinterpret_cast<FloatPair*>(out + column) = {o[i], o[i + 1]};
    }
  }
}

// Log-sum-exp of a consumer's rows; if the tile has all their keys.
template <typename Tile>
__device__ inline void store_lse(const FwdArgs& args, const OnlineSoftmax& softmax, const FwdWork& work, int consumer,
                                 int thread) {
  if (Tile::kFew && args.few.splits > 1) return;
  const int first_query = work.row + consumer * fwd_queries<Tile>(args);
  const int lane = thread % ptx::kWarpLanes, lane_row = thread / ptx::kWarpLanes * 16 + lane / 4;
  if (lane % 4 != 0) return;
  const int heads_q = Tile::kFew ? args.few.heads_q : args.heads_q;
  float* lse = args.lse + (int64_t(work.batch) * heads_q + fwd_first_head<Tile>(args, work.head)) * args.seq_q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const FwdRow at = fwd_row<Tile>(args, work.head, first_query, lane_row + 8 * half);
    if (at.used) lse[at.further_head * args.seq_q + at.query] = softmax.log_sum_exp(half, args.scale);
  }
}

// A consumer's rows of a tile that is done, times `factor` if the tile has all their keys. The sums are reduced and the
// log-sum-exp is stored already.
template <typename Tile, bool kBFloat16, typename Terms>
__device__ inline void store_rows(const FwdArgs& args, const FwdShared<Tile>& shared, const FwdWork& work,
                                  const OnlineSoftmax& softmax, const Terms& terms, const float (&o)[Tile::kDimV / 2],
                                  int consumer, int thread) {
  const int first_query = work.row + consumer * fwd_queries<Tile>(args), barrier = int(FwdBarrier::kOut) + consumer;
  const bool elected = thread == 0;
  const float factor[2] = {terms.factor(args, softmax, 0), terms.factor(args, softmax, 1)};
  const bool partial = Tile::kFew && args.few.splits > 1;
  if (!partial && args.out.tma) {
    // Own staging memory: the store of the tile before must have read it. Q's memory: all warps must be done with Q.
    fwd_delay(FwdPoint::kStore);
    if (elected) ptx::tma_store_wait_read();
    ptx::barrier_sync(barrier, ptx::kWarpgroupThreads);
    stage_out<Tile, kBFloat16>(shared.out(consumer), o, factor, thread);
    ptx::fence_proxy_shared();
    ptx::barrier_sync(barrier, ptx::kWarpgroupThreads);
    fwd_delay(FwdPoint::kStore);
    if (elected && first_query < args.seq_q) {
      store_staged<Tile>(shared.out(consumer), args, first_query, work.head, work.batch);
    }
  } else {
    if (partial) {
      store_partial<Tile>(args, o, softmax, work, first_query, thread);
    } else {
      store_plain<Tile, kBFloat16>(args, o, factor, first_query, work.head, work.batch, thread);
    }
    if constexpr (!Tile::kOwnOut) ptx::barrier_sync(barrier, ptx::kWarpgroupThreads);
  }
  if constexpr (!Tile::kOwnOut) {
    if (elected) {
      ptx::tma_store_wait_read();
      fwd_delay(FwdPoint::kFree);
      ptx::mbarrier_arrive(shared.empty_q(consumer));
    }
  }
}

}  // namespace flashsdpa
