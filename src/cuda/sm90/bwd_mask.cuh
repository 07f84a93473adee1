// What a mask does to a consumer's scores of one block of queries: removes those whose bit of the mask plan is 0, or adds its
// values. For both arrangements: rows of a lane are keys and columns queries (by keys), or the other way round.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "bwd_values.cuh"

namespace flashsdpa {

// Without a mask: nothing.
template <typename Tile, bool kMasked = Tile::kMasked>
struct BwdBlockMask {
  __device__ BwdBlockMask(const BwdShared<Tile>&, int, int) {}
  template <bool kBFloat16, int kCount>
  __device__ void add_values(const BwdArgs&, const FwdWork&, int, float (&)[kCount]) const {}
  __device__ bool adds(const BwdArgs&, const BwdWord<false>&) const { return false; }
  __device__ bool removes(const BwdArgs&, const BwdWord<false>&) const { return false; }
  template <int kCount>
  __device__ void remove(const BwdArgs&, const BwdWord<false>&, float (&)[kCount]) const {}
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
  __device__ int warp_row() const { return thread / ptx::kWarpLanes * 16; }  // of the consumer's 64
  __device__ GranuleClass kind(const BwdArgs& args, const BwdWord<true>& told) const {
    const GranuleClass its_kind = told.of(Tile::kByKeys ? consumer_key / kKeys : 0);
    return its_kind == kMixed && !(Tile::kValues && args.mask.values) ? kBits : its_kind;  // a plan alone: only what is removed is known
  }

  // What the mask has to say of a block, to arrive under the product. `slot`: of what the loader told of it.
  __device__ void load(const BwdArgs& args, const FwdWork& work, int slot) {
    const GranuleClass its_kind = kind(args, bwd_visit(shared, slot));
#pragma unroll
    for (int w = 0; w < kWords; ++w) bits[w] = 0;
    if (its_kind == kBits) load_bits(args, work, slot);
    if constexpr (Tile::kValues) {
      if (its_kind == kMixed && !(Tile::kValuesWithQ && args.values.tma)) {
        __syncwarp();  // the values of the block before have been read
        with_values(args.mask, slot, [&](const auto& values) { values.load(args.mask, origin(args.mask, work, slot)); });
      }
    }
  }

  // Whether add_values has anything to do.
  __device__ bool adds(const BwdArgs& args, const BwdWord<true>& told) const {
    return args.sign != 1.f || (Tile::kValues && kind(args, told) == kMixed);
  }
  // Scores scaled, where that comes before values, and the values added.
  template <bool kBFloat16, int kCount>
  __device__ void add_values(const BwdArgs& args, const FwdWork& work, int slot, float (&s)[kCount]) const {
    const bool mixed = Tile::kValues && kind(args, bwd_visit(shared, slot)) == kMixed;
    if (args.sign != 1.f && (Tile::kTerms || !mixed)) {  // else with the values, rounded once; with terms `pre` rounds twice
#pragma unroll
      for (float& score : s) score *= args.sign;
    }
    if constexpr (Tile::kValues) {
      if (!mixed) return;
      with_values(args.mask, slot, [&](const auto& values) {
        values.template add<kBFloat16>(args.mask, [&] { return origin(args.mask, work, slot); }, Tile::kTerms ? 1.f : args.sign, s);
      });
    }
  }

  // Whether `remove` has anything to do.
  __device__ bool removes(const BwdArgs& args, const BwdWord<true>& told) const {
    const GranuleClass its_kind = kind(args, told);
    return its_kind == kBits || its_kind == kEmpty;
  }
  // Scores whose bit is 0; of a granule that keeps nothing, all bits are.
  template <int kCount>
  __device__ void remove(const BwdArgs& args, const BwdWord<true>& told, float (&s)[kCount]) const {
    if (!removes(args, told)) return;
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

 private:
  // act(values of the type that the mask has)
  template <typename Act>
  __device__ void with_values(const FwdMask& mask, int slot, const Act& act) const {
    const uint32_t own = shared.values(consumer_key / kKeys, thread / ptx::kWarpLanes);
    if (mask.dtype == DType::kFloat32) {
      act(BwdValues<Tile, 4>{own, lane(), 0});
    } else if constexpr (!Tile::kValuesWithQ) {
      act(BwdValues<Tile, 2>{own, lane(), 0});
    } else if constexpr (Tile::kByKeys) {
      act(BwdValues<Tile, 2>{shared.values_box(slot % Tile::kStages, consumer_key / kKeys), lane(), warp_row()});
    } else {
      act(BwdValues<Tile, 2>{shared.values_box(slot % Tile::kStages, 0) + warp_row() * kBoxRowBytes, lane(), consumer_key});
    }
  }
  __device__ BwdValuesOrigin origin(const FwdMask& mask, const FwdWork& work, int slot) const {
    return {work.batch * mask.stride_batch + bwd_visit_head(shared, slot) * mask.stride_head,
            bwd_visit(shared, slot).m() * Tile::kBlockM + (Tile::kByKeys ? 0 : warp_row()),
            work.row + consumer_key + (Tile::kByKeys ? warp_row() : 0)};
  }

  __device__ void load_bits(const BwdArgs& args, const FwdWork& work, int slot) {
    const int head = bwd_visit_head(shared, slot);
    const int key = work.row + consumer_key + (Tile::kByKeys ? warp_row() : 0);
    const int first_query = bwd_visit(shared, slot).m() * Tile::kBlockM + (Tile::kByKeys ? lane() : warp_row() + lane() / 4);
    const int32_t* plan = args.mask.plan + work.batch * args.mask.plan_batch + head * args.mask.plan_head +
                          args.mask.bits_offset + (args.mask.one_key ? 0 : key / 32);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int query = first_query + (Tile::kByKeys ? ptx::kWarpLanes : 8) * w;
      bits[w] = uint32_t(__ldg(plan + min(query, args.mask.queries - 1) * args.mask.bits_stride));
    }
  }
};

}  // namespace flashsdpa
