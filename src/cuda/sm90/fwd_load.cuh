// The producer's copies from global memory into swizzled tiles: by TMA, or by ordinary loads where the tensor's base
// or strides do not suit it. Both leave the same bytes and complete the same barrier by one arrival.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "fwd_args.h"
#include "fwd_delays.cuh"
#include "fwd_tiles.h"

namespace flashsdpa {

enum class FwdBarrier : int { kBlock = 0, kProducer = 1, kTurn = 2 /* + consumer */, kOut = 5 /* + consumer */ };

// Where a tile starts in its tensor.
struct FwdOrigin {
  int row, head, batch;
};

// Where element (row, 8 * chunk) of a tile of `kRows` rows lies: boxes of 64 columns, and in each row of 128 bytes the
// 16-byte chunks permuted by the row.
template <int kRows>
__device__ inline uint32_t swizzled_offset(int row, int chunk) {
  return (chunk / 8) * (kRows * kBoxRowBytes) + row * kBoxRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
}

template <int kRows, int kBoxes, int kThreads>
__device__ inline void load_tile_plain(uint32_t shared, const FwdTensor& tensor, FwdOrigin at, int thread) {
  constexpr int kQuads = kBoxes * 16;  // of 4 elements: more loads in flight do not fit the producer's registers
  const uint16_t* base = tensor.data + at.batch * tensor.stride_batch + at.head * tensor.stride_head;
#pragma unroll 1
  for (int i = thread; i < kRows * kQuads; i += kThreads) {
    const int r = i / kQuads, quad = i % kQuads;
    const int columns = at.row + r < tensor.rows ? tensor.columns - 4 * quad : 0;
    const uint16_t* source = base + (at.row + r) * tensor.stride_row + 4 * quad;
    uint32_t pair[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const uint32_t low = 2 * p < columns ? source[2 * p] : 0, high = 2 * p + 1 < columns ? source[2 * p + 1] : 0;
      pair[p] = low | high << 16;
    }
    ptx::store_shared_8(shared + swizzled_offset<kRows>(r, quad / 2) + quad % 2 * 8, pair[0], pair[1]);
  }
}

// Called by thread 0 of the producers alone if all tensors go by TMA, else by all kThreads of them. `more_bytes`: what else
// bulk copies bring before the barrier's phase ends.
template <int kRows, int kBoxes, ptx::Reuse kReuse, bool kAlone, int kThreads = ptx::kWarpgroupThreads>
__device__ inline void load_tile(uint32_t shared, uint32_t barrier, const FwdTensor& tensor, const CUtensorMap* map,
                                 FwdOrigin at, int thread, uint32_t more_bytes = 0) {
  fwd_delay(FwdPoint::kLoad);
  if (kAlone || tensor.tma) {
    if (kAlone || thread == 0) {
      ptx::mbarrier_arrive_expect(barrier, kBoxes * kRows * kBoxRowBytes + more_bytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const ptx::BoxOrigin box_at{box * kBoxColumns, at.row, at.head * tensor.map_head, at.batch * tensor.map_batch};
        ptx::tma_load(shared + box * kRows * kBoxRowBytes, map, box_at, barrier, ptx::cache_policy<kReuse>());
      }
    }
  } else {
    load_tile_plain<kRows, kBoxes, kThreads>(shared, tensor, at, thread);
    ptx::fence_proxy_shared();
    ptx::barrier_sync(int(FwdBarrier::kProducer), kThreads);
    if (thread == 0) ptx::mbarrier_arrive_expect(barrier, more_bytes);
  }
}

}  // namespace flashsdpa
