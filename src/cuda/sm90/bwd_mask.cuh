// What a mask does to a consumer's scores of one block of queries: removes those whose bit of the mask plan is 0, or adds its
// values. For both arrangements: rows of a lane are keys and columns queries (by keys), or the other way round.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "bwd_blocks.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

// Without a mask: nothing.
template <typename Tile, bool kMasked = Tile::kMasked>
struct BwdBlockMask {
  __device__ BwdBlockMask(const BwdArgs&, int, int) {}
  __device__ bool plain() const { return true; }
  __device__ bool final() const { return true; }
  template <bool kBFloat16, int kCount>
  __device__ void apply(const BwdArgs&, float (&)[kCount]) const {}
};

template <typename Tile>
struct BwdBlockMask<Tile, true> {
  // By keys a warp has 16 keys, bits of one word of each query; a lane has the words of every 32nd query, and shuffles hand
  // them on. By columns a consumer has 32 keys, one word of each query; a lane has the words of its own two queries.
  static constexpr int kWords = Tile::kByKeys ? Tile::kBlockM / ptx::kWarpLanes : 2;
  static constexpr int kKeys = Tile::kBlockN / Tile::kConsumers;
  static_assert(Tile::kByKeys ? kKeys == kConsumerRows : kKeys == 32);

  const int lane, lane_row;  // of the consumer's 64 rows: the first of the lane's two
  const int consumer_key;    // the consumer's first key, of those of the tile
  int head, first_key, first_query;  // of the block
  BwdWord<true> told;
  GranuleClass kind;
  uint32_t bits[kWords];

  __device__ BwdBlockMask(const BwdArgs&, int key, int thread)
      : lane(thread % ptx::kWarpLanes), lane_row(thread / ptx::kWarpLanes * 16 + lane / 4), consumer_key(key) {}

  // What the loader told of the block, and its bits, to arrive under the product.
  __device__ void take(const BwdArgs& args, const BwdShared<Tile>& shared, int slot, const FwdWork& work) {
    told = bwd_visit(shared, slot);
    head = bwd_visit_head(shared, slot);
    kind = told.of(Tile::kByKeys ? consumer_key / kKeys : 0);
    if (kind == kMixed && !args.mask.values) kind = kBits;  // a plan alone: of values only what they remove is known
    first_key = work.row + consumer_key;
    first_query = told.m() * Tile::kBlockM;
    plane = work.batch * args.mask.stride_batch + head * args.mask.stride_head;
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits[w] = 0;
    if (kind != kBits) return;
    const int key = first_key + (Tile::kByKeys ? lane_row - lane / 4 : 0);
    const int32_t* plan = args.mask.plan + work.batch * args.mask.plan_batch + head * args.mask.plan_head +
                          args.mask.bits_offset + (args.mask.one_key ? 0 : key / 32);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int query = first_query + (Tile::kByKeys ? ptx::kWarpLanes * w + lane : lane_row + 8 * w);
      bits[w] = uint32_t(__ldg(plan + min(query, args.mask.queries - 1) * args.mask.bits_stride));
    }
  }

  __device__ bool plain() const { return kind == kFull; }
  __device__ bool final() const { return __shfl_sync(0xffffffffu, told.word >> 5 & 1, 0); }

  // s: scaled by now, as values are added to it.
  template <bool kBFloat16, int kCount>
  __device__ void apply(const BwdArgs& args, float (&s)[kCount]) const {
    if (kind == kFull) return;
    if (kind != kMixed) {
      keep(s);
    } else if (args.mask.dtype == DType::kFloat32) {
      add<float>(args.mask, s, [](float value) { return value; });
    } else {
      add<uint16_t>(args.mask, s, [](uint16_t value) { return ptx::unpack<kBFloat16>(value); });
    }
  }

 private:
  int64_t plane;  // of the values

  // kBits; kEmpty, all bits of which are 0.
  template <int kCount>
  __device__ void keep(float (&s)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {  // eight columns, of which the lane has two
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = score_column(i + e) + 2 * (lane % 4);
        uint32_t words[2];
        if constexpr (Tile::kByKeys) {
          const uint32_t word = __shfl_sync(0xffffffffu, bits[i / 4 * 8 / ptx::kWarpLanes], column % ptx::kWarpLanes);
          words[0] = word >> lane_row % 32;
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

  // Value: as it is in memory. -inf removes a score also where it is NaN.
  template <typename Value, int kCount, typename Convert>
  __device__ void add(const FwdMask& mask, float (&s)[kCount], const Convert& convert) const {
    const int first_row = (Tile::kByKeys ? first_key : first_query) + lane_row;
    const int first_column = (Tile::kByKeys ? first_query : first_key) + 2 * (lane % 4);
    const int rows = Tile::kByKeys ? mask.keys : mask.queries, columns = Tile::kByKeys ? mask.queries : mask.keys;
    const int64_t stride_row = Tile::kByKeys ? mask.stride_key : mask.stride_query;
    const int64_t stride_column = Tile::kByKeys ? mask.stride_query : mask.stride_key;
    const Value* row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = static_cast<const Value*>(mask.values) + plane + min(first_row + 8 * r, rows - 1) * stride_row;
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int64_t at = min(first_column + score_column(i + e), columns - 1) * stride_column;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float value = convert(__ldg(row[r] + at));
          float& score = s[i + e + 2 * r];
          score = value == kMinusInfinity ? kMinusInfinity : score + value;
        }
      }
    }
  }
};

}  // namespace flashsdpa
