// What a mask does to a consumer's scores of one block of queries: removes those whose bit of the mask plan is 0, or adds its
// values. For both arrangements: rows of a lane are keys and columns queries (by keys), or the other way round.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "bwd_blocks.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

// Where a warp lays down 16 rows x 32 columns of values, as floats, for its lanes to take as their accumulators are laid out.
// Neither the rows of one column, nor the rows of a fragment, share a bank.
__device__ inline uint32_t bwd_value_offset(int row, int column) {
  return 4 * (row * kBwdMaskColumns + (column ^ (8 * (row % 4) + 2 * (row / 4))));
}

// Without a mask: nothing.
template <typename Tile, bool kMasked = Tile::kMasked>
struct BwdBlockMask {
  __device__ BwdBlockMask(const BwdShared<Tile>&, int, int) {}
  template <bool kBFloat16, int kCount>
  __device__ void apply(const BwdArgs&, const FwdWork&, int, float (&)[kCount]) const {}
};

template <typename Tile>
struct BwdBlockMask<Tile, true> {
  // By keys a warp has 16 keys, bits of one word of each query; a lane has the words of every 32nd query, and shuffles hand
  // them on. By columns a consumer has 32 keys, one word of each query; a lane has the words of its own two queries.
  static constexpr int kWords = Tile::kByKeys ? Tile::kBlockM / ptx::kWarpLanes : 2;
  static constexpr int kKeys = Tile::kBlockN / Tile::kConsumers;
  static_assert(Tile::kByKeys ? kKeys == kConsumerRows : kKeys == 32);

  // Little is kept: the registers are those of the products.
  const BwdShared<Tile>& shared;
  const int consumer_key, thread;  // consumer_key: of the tile's keys, the first of this consumer
  uint32_t bits[kWords];

  __device__ BwdBlockMask(const BwdShared<Tile>& its_shared, int key, int its_thread)
      : shared(its_shared), consumer_key(key), thread(its_thread) {}
  __device__ int lane() const { return thread % ptx::kWarpLanes; }
  __device__ int warp_row() const { return thread / ptx::kWarpLanes * kBwdMaskRows; }  // of the consumer's 64
  __device__ GranuleClass kind(const BwdArgs& args, const BwdWord<true>& told) const {
    const GranuleClass its_kind = told.of(Tile::kByKeys ? consumer_key / kKeys : 0);
    return its_kind == kMixed && !args.mask.values ? kBits : its_kind;  // a plan alone: only what is removed is known
  }

  // The bits of a block, to arrive under the product. `slot`: of what the loader told of it.
  __device__ void load_bits(const BwdArgs& args, const FwdWork& work, int slot) {
    const BwdWord<true> told = bwd_visit(shared, slot);
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits[w] = 0;
    if (kind(args, told) != kBits) return;
    const int head = bwd_visit_head(shared, slot);
    const int key = work.row + consumer_key + (Tile::kByKeys ? warp_row() : 0);
    const int first_query = told.m() * Tile::kBlockM + (Tile::kByKeys ? lane() : warp_row() + lane() / 4);
    const int32_t* plan = args.mask.plan + work.batch * args.mask.plan_batch + head * args.mask.plan_head +
                          args.mask.bits_offset + (args.mask.one_key ? 0 : key / 32);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int query = first_query + (Tile::kByKeys ? ptx::kWarpLanes : 8) * w;
      bits[w] = uint32_t(__ldg(plan + min(query, args.mask.queries - 1) * args.mask.bits_stride));
    }
  }

  // s: scaled by now, as values are added to it.
  template <bool kBFloat16, int kCount>
  __device__ void apply(const BwdArgs& args, const FwdWork& work, int slot, float (&s)[kCount]) const {
    const GranuleClass its_kind = kind(args, bwd_visit(shared, slot));
    if (its_kind == kMixed) {
      add<kBFloat16>(args.mask, work, slot, s);
    } else if (its_kind != kFull) {
      keep(s);
    }
  }

 private:
  // kBits; kEmpty, all bits of which are 0.
  template <int kCount>
  __device__ void keep(float (&s)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {  // eight columns, of which the lane has two
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = score_column(i + e) + 2 * (lane() % 4);
        uint32_t words[2];
        if constexpr (Tile::kByKeys) {
          const uint32_t word = __shfl_sync(0xffffffffu, bits[i / 4 * 8 / ptx::kWarpLanes], column % ptx::kWarpLanes);
          words[0] = word >> (warp_row() % 32 + lane() / 4);
          words[1] = words[0] >> 8;
        } else {
          words[0] = bits[0] >> column;
          words[1] = bits[1] >> column;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) s[i + e + 2 * r] = words[r] & 1 ? s[i + e + 2 * r] : kMinusInfinity;
      }
    }
  }

  // Through shared memory, 32 columns at a time. -inf removes a score also where it is NaN.
  template <bool kBFloat16, int kCount>
  __device__ void add(const FwdMask& mask, const FwdWork& work, int slot, float (&s)[kCount]) const {
    constexpr int kPart = kBwdMaskColumns / 2;  // of a lane's scores
    const int row = lane() / 4;
    const uint32_t values = shared.values(consumer_key / kKeys, thread / ptx::kWarpLanes);
#pragma unroll
    for (int part = 0; part < kCount / kPart; ++part) {
      __syncwarp();  // what was there before has been read
      lay_down<kBFloat16>(mask, work, slot, part, values);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPart; i += 2) {
        float value[2];
        const int column = score_column(i) + 2 * (lane() % 4);
        ptx::load_shared_floats(values + bwd_value_offset(row + 8 * score_row(i), column), value[0], value[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[part * kPart + i + e];
          score = value[e] == kMinusInfinity ? kMinusInfinity : score + value[e];
        }
      }
    }
  }

  // The values of 32 columns, neighbouring lanes taking neighbouring keys.
  template <bool kBFloat16>
  __device__ void lay_down(const FwdMask& mask, const FwdWork& work, int slot, int part, uint32_t values) const {
    const int head = bwd_visit_head(shared, slot);
    constexpr int kRowLanes = Tile::kByKeys ? kBwdMaskRows : ptx::kWarpLanes;  // by keys: 16 keys of two queries at a time
    const int key = lane() % kRowLanes, first_key = work.row + consumer_key + (Tile::kByKeys ? warp_row() : 0);
    const int first_query = bwd_visit(shared, slot).m() * Tile::kBlockM + (Tile::kByKeys ? part * kBwdMaskColumns : warp_row());
    const bool wide = mask.dtype == DType::kFloat32;
    const int64_t origin = work.batch * mask.stride_batch + head * mask.stride_head + min(first_key + key, mask.keys - 1) * mask.stride_key;
#pragma unroll 4
    for (int t = 0; t < kBwdMaskRows; ++t) {
      const int query = Tile::kByKeys ? 2 * t + lane() / kRowLanes : t;
      const int64_t at = origin + min(first_query + query, mask.queries - 1) * mask.stride_query;
      const float value = wide ? __ldg(static_cast<const float*>(mask.values) + at)
                               : ptx::unpack<kBFloat16>(__ldg(static_cast<const uint16_t*>(mask.values) + at));
      ptx::store_shared_4(values + (Tile::kByKeys ? bwd_value_offset(key, query) : bwd_value_offset(query, key)),
                          __float_as_uint(value));
    }
  }
};

}  // namespace flashsdpa
