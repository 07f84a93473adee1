// The end of a unit of the mask's gradient: sums over axes in which the mask has size 1, then, part after part, into memory.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "../../ptx/global.cuh"
#include "bwd_mask_visits.cuh"
#include "bwd_store.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

enum class BwdMaskBarrier : int { kConsumers = 2 };  // beside the producers' (FwdBarrier::kProducer)

// Where the elements of one unit go. The last part of a tile rounds; the parts before add in their order, which is fixed.
template <bool kBFloat16>
struct BwdMaskSink {
  const BwdMaskArgs& args;
  const int64_t plane;  // the first element of the tile's (batch, head)
  const int part;

  // By one warp: its 16 rows of a tile, from (query, key) on, as stage_rows has laid them down from row `row` on, and whole
  // 16-byte vectors at a time.
  template <typename Tile>
  __device__ void put_staged(uint32_t staged, int row, int query, int key, int lane) const {
    struct alignas(16) Vector {
      float words[4];
    };
    constexpr int kChunks = Tile::kBlockN / 8;
    const FwdMask& mask = args.bwd.mask;
#pragma unroll 4
    for (int pass = 0; pass < 16 * kChunks / ptx::kWarpLanes; ++pass) {
      const int i = pass * ptx::kWarpLanes + lane, r = i / kChunks, chunk = i % kChunks;
      if (query + r >= mask.queries || key + 8 * chunk >= mask.keys) continue;
      Vector v;
      ptx::load_shared_floats(staged + swizzled_offset<Tile::kBlockM>(row + r, chunk), v.words[0], v.words[1], v.words[2], v.words[3]);
      *reinterpret_cast<Vector*>(static_cast<uint16_t*>(args.grad) + plane + int64_t(query + r) * mask.keys + key + 8 * chunk) = v;
    }
  }
  __device__ void put(int query, int key, float x) const {
    const FwdMask& mask = args.bwd.mask;
    if (query >= mask.queries || key >= mask.keys) return;
    const int64_t at = plane + int64_t(query) * mask.keys + key;
    if (part > 0) x += args.sum[at];
    if (part < args.parts - 1) {
      args.sum[at] = x;
    } else if (mask.dtype == DType::kFloat32) {
      static_cast<float*>(args.grad)[at] = x;
    } else {
      static_cast<uint16_t*>(args.grad)[at] = uint16_t(ptx::pack<kBFloat16>(x, 0.f));
    }
  }
  // Keys `key`, which is even, and key + 1: together where rows of the gradient start at even elements.
  __device__ void put_pair(int query, int key, float x, float y) const {
    const FwdMask& mask = args.bwd.mask;
    if (args.parts > 1 || mask.keys % 2 != 0) {
      put(query, key, x);
      put(query, key + 1, y);
      return;
    }
    if (query >= mask.queries || key >= mask.keys) return;
    const int64_t at = (plane + int64_t(query) * mask.keys + key) / 2;
    if (mask.dtype == DType::kFloat32) {
      static_cast<uint2*>(args.grad)[at] = uint2{__float_as_uint(x), __float_as_uint(y)};
    } else {
      static_cast<uint32_t*>(args.grad)[at] = ptx::pack<kBFloat16>(x, y);
    }
  }
};

__device__ inline float bwd_mask_sum_lanes(float x, int from, int to) {  // over lanes that differ in bits from .. to / 2
  for (int bit = from; bit < to; bit *= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
  return x;
}

// `sum`: a consumer's 64 queries x the tile's keys; `own`: the thread, of those of all consumers. `staging`: where values of 16 bits
// were, to which TMA writes next; or 0.
template <typename Tile, bool kBFloat16, int kCount>
__device__ inline void bwd_mask_store(const BwdMaskArgs& args, const BwdMaskShared<Tile>& shared, int unit, const float (&sum)[kCount],
                                      int own, uint32_t staging) {
  constexpr int kThreads = Tile::kConsumers * ptx::kWarpgroupThreads, kWarps = kThreads / ptx::kWarpLanes;
  const FwdMask& mask = args.bwd.mask;
  const int part = unit / args.tiles, tile = unit % args.tiles;
  const BwdMaskPlace at = bwd_mask_first(args, tile);
  const BwdMaskSink<kBFloat16> sink{args, (int64_t(at.batch) * args.grad_heads + at.head) * mask.queries * mask.keys, part};
  const int lane = own % ptx::kWarpLanes, row = at.m * Tile::kBlockM + own / ptx::kWarpLanes * 16 + lane / 4;
  const auto meet = [] { ptx::barrier_sync(int(BwdMaskBarrier::kConsumers), kThreads); };

  if (args.parts > 1) {
    if (own == 0) {
      while (ptx::load_acquire(args.turns + tile) != uint32_t(part)) {
      }
    }
    meet();
  }
  if (staging && args.parts == 1 && mask.keys % 8 == 0) {
    const int thread = int(ptx::anew(uint32_t(own)));  // else places are kept from tile to tile, and spill
    const int warp_row = thread / ptx::kWarpLanes * 16;
    stage_rows<Tile::kBlockM, kBFloat16>(staging, sum, 1.f, thread / ptx::kWarpgroupThreads * kConsumerRows,
                                         thread % ptx::kWarpgroupThreads);
    __syncwarp();
    sink.template put_staged<Tile>(staging, warp_row, at.m * Tile::kBlockM + warp_row, at.n * Tile::kBlockN, thread % ptx::kWarpLanes);
    ptx::fence_proxy_shared();
  } else if (mask.queries > 1 && mask.keys > 1) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      sink.put_pair(row + 8 * score_row(i), at.n * Tile::kBlockN + score_column(i) + 2 * (lane % 4), sum[i], sum[i + 1]);
    }
  } else if (mask.queries > 1) {
    float total[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[score_row(i)] += sum[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = bwd_mask_sum_lanes(total[r], 1, 4);
      if (lane % 4 == 0) sink.put(row + 8 * r, 0, total[r]);
    }
  } else {
    // All queries: each warp's sums go where its values were, eight columns from each place for a pair, and then over the
    // warps. All keys too: one sum a warp.
    float all = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float low = bwd_mask_sum_lanes(sum[i] + sum[i + 2], 4, ptx::kWarpLanes);
      const float high = bwd_mask_sum_lanes(sum[i + 1] + sum[i + 3], 4, ptx::kWarpLanes);
      if (mask.keys > 1 && lane < 4) ptx::store_shared_8(shared.values(i / 4, own), __float_as_uint(low), __float_as_uint(high));
      all += low + high;
    }
    all = bwd_mask_sum_lanes(all, 1, 4);
    if (mask.keys == 1 && lane == 0) ptx::store_shared_8(shared.values(0, own), __float_as_uint(all), 0);
    meet();
    if (own < (mask.keys > 1 ? Tile::kBlockN / 2 : 1)) {
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        float x, y;
        ptx::load_shared_floats(shared.values(own / 4, warp * ptx::kWarpLanes + own % 4), x, y);
        low += x;
        high += y;
      }
      if (mask.keys > 1) {
        sink.put_pair(0, at.n * Tile::kBlockN + 2 * own, low, high);
      } else {
        sink.put(0, 0, low);
      }
    }
    meet();  // before the values of the next tile are laid down
  }
  if (args.parts > 1) {
    meet();  // the release below covers what all of these threads have stored
    if (own == 0) ptx::add_release(args.turns + tile, 1);
  }
}

}  // namespace flashsdpa
