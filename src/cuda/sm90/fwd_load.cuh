// The producer's copies from global memory into swizzled tiles: by TMA, or by ordinary loads where the tensor's base
// or strides do not suit it. Both leave the same bytes and complete the same barrier by one arrival.
#pragma once

#include "../../ptx/copy_async.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "fwd_args.h"
#include "fwd_delays.cuh"
#include "fwd_rows.cuh"
#include "fwd_tiles.h"

namespace flashsdpa {

enum class FwdBarrier : int { kBlock = 0, kProducer = 1, kTurn = 2 /* + consumer */, kOut = 5 /* + consumer */, kDraw = 8 };

// Where element (row, 8 * chunk) of a tile of `kRows` rows lies: boxes of 64 columns, and in each row of 128 bytes the
// 16-byte chunks permuted by the row.
template <int kRows>
__device__ inline uint32_t swizzled_offset(int row, int chunk) {
  return (chunk / 8) * (kRows * kBoxRowBytes) + row * kBoxRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
}

// line(r): where row r of the tile starts, or null if there is no such row.
//
// By asynchronous copies of 4 bytes, which take no registers, so that the whole tile is under way at once: a warp takes
// a row, a lane two columns of each box.
template <int kRows, int kBoxes, int kThreads, typename Line>
__device__ inline void load_tile_words(uint32_t shared, const FwdTensor& tensor, const Line& line, int thread) {
  constexpr int kWarps = kThreads / ptx::kWarpLanes;
  const int lane = thread % ptx::kWarpLanes;
#pragma unroll 1
  for (int r = thread / ptx::kWarpLanes; r < kRows; r += kWarps) {
    const uint16_t* row = line(r);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int column = box * kBoxColumns + 2 * lane;
      const int elements = row ? clamp_to(tensor.columns - column, 0, 2) : 0;
      const uint16_t* source = elements > 0 ? row + column : tensor.data;
      ptx::copy_async<4>(shared + swizzled_offset<kRows>(r, box * 8 + lane / 4) + lane % 4 * 4, source,
                        elements * kElementBytes);
    }
  }
  ptx::copy_async_wait();
}

// By elements, where rows start anywhere.
template <int kRows, int kBoxes, int kThreads, typename Line>
__device__ inline void load_tile_elements(uint32_t shared, const FwdTensor& tensor, const Line& line, int thread) {
  constexpr int kQuads = kBoxes * 16;  // of 4 elements: more loads in flight do not fit the producer's registers
#pragma unroll 1
  for (int i = thread; i < kRows * kQuads; i += kThreads) {
    const int r = i / kQuads, quad = i % kQuads;
    const uint16_t* source = line(r);
    const int columns = source ? tensor.columns - 4 * quad : 0;
    source += 4 * quad;
    uint32_t pair[2];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const uint32_t low = 2 * p < columns ? source[2 * p] : 0, high = 2 * p + 1 < columns ? source[2 * p + 1] : 0;
      pair[p] = low | high << 16;
    }
    ptx::store_shared_8(shared + swizzled_offset<kRows>(r, quad / 2) + quad % 2 * 8, pair[0], pair[1]);
  }
}

// Memory for a tile, the barrier that its arrival completes, and the one that says that it may be written.
struct FwdSlot {
  uint32_t shared, full, empty, empty_parity;
};

// Called by thread 0 of the producers alone if all tensors go by TMA, else by all kThreads of them. `rows`: of a box of
// the map, at most kRows; `line` as above; `more_bytes`: what else bulk copies bring before the slot is full; `kWords`:
// whether the producers have registers for load_tile_words.
//
// Only who writes waits for the slot: a warp that has nothing to do with a copy could find that the slot has been
// filled and emptied once more meanwhile, and would wait for a parity that does not come again.
template <int kRows, int kBoxes, ptx::Reuse kReuse, bool kAlone, int kThreads, bool kWords, typename Origin, typename Line>
__device__ inline void load_tile(const FwdSlot& slot, const FwdTensor& tensor, const CUtensorMap* map, Origin at,
                                 int rows, const Line& line, int thread, uint32_t more_bytes = 0) {
  if (kAlone || tensor.tma) {
    if (kAlone || thread == 0) {
      ptx::mbarrier_wait(slot.empty, slot.empty_parity);
      fwd_delay(FwdPoint::kLoad);
      ptx::mbarrier_arrive_expect(slot.full, kBoxes * rows * kBoxRowBytes + more_bytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        at.column = box * kBoxColumns;
        ptx::tma_load(slot.shared + box * kRows * kBoxRowBytes, map, at, slot.full, ptx::cache_policy<kReuse>());
      }
    }
  } else {
    ptx::mbarrier_wait(slot.empty, slot.empty_parity);
    fwd_delay(FwdPoint::kLoad);
    if (kWords && tensor.words) {
      load_tile_words<kRows, kBoxes, kThreads>(slot.shared, tensor, line, thread);
    } else {
      load_tile_elements<kRows, kBoxes, kThreads>(slot.shared, tensor, line, thread);
    }
    ptx::fence_proxy_shared();
    ptx::barrier_sync(int(FwdBarrier::kProducer), kThreads);
    if (thread == 0) ptx::mbarrier_arrive_expect(slot.full, more_bytes);
  }
}

// kRows rows of one head, from `row` on.
template <int kRows, int kBoxes, ptx::Reuse kReuse, bool kAlone, int kThreads = ptx::kWarpgroupThreads, bool kWords = true>
__device__ inline void load_rows(const FwdSlot& slot, const FwdTensor& tensor, const CUtensorMap* map, int row,
                                 int head, int batch, int thread, uint32_t more_bytes = 0) {
  const uint16_t* base = tensor.data + batch * tensor.stride_batch + head * tensor.stride_head;
  const auto line = [&](int r) { return row + r < tensor.rows ? base + (row + r) * tensor.stride_row : nullptr; };
  const ptx::BoxOrigin at{0, row, head * tensor.map_head, batch * tensor.map_batch};
  load_tile<kRows, kBoxes, kReuse, kAlone, kThreads, kWords>(slot, tensor, map, at, kRows, line, thread, more_bytes);
}

// Q of one consumer: its rows from query `row` on, of a head or a pack of heads.
template <typename Tile, bool kAlone>
__device__ inline void load_queries(const FwdSlot& slot, const FwdArgs& args, int row, int head, int batch,
                                    int thread) {
  if constexpr (!Tile::kFew) {
    load_rows<kConsumerRows, Tile::kBoxes, ptx::Reuse::kNone, kAlone>(slot, args.q, &args.map_q, row, head, batch,
                                                                      thread);
  } else {
    const FwdTensor& q = args.q;
    const uint16_t* base = q.data + batch * q.stride_batch + fwd_first_head<Tile>(args, head) * q.stride_head;
    const auto line = [&](int r) {
      const FwdRow at = fwd_row<Tile>(args, head, row, r);
      return at.used ? base + at.further_head * q.stride_head + at.query * q.stride_row : nullptr;
    };
    const ptx::PackedBoxOrigin at{0, fwd_first_in_group(args, head), row, head / args.group, batch * q.map_batch};
    load_tile<kConsumerRows, Tile::kBoxes, ptx::Reuse::kNone, kAlone, ptx::kWarpgroupThreads, true>(slot, q, &args.map_q, at,
                                                                      args.few.pack * args.few.queries, line, thread);
  }
}

}  // namespace flashsdpa
