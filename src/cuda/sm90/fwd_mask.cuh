// What a mask does to a block of scores: keeps those whose bit of the mask plan is set, or adds its values.
#pragma once

#include "../../ptx/copy_async.cuh"
#include "../../ptx/warpgroup.cuh"
#include "fwd_blocks.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

// The bits of a lane's two rows for one block of keys. Nothing may be done with them where they are asked for: it would wait for
// them there.
template <typename Tile>
struct FwdBits {
  static constexpr int kWords = Tile::kBlockN / 32;
  uint32_t words[2][kWords];

  // Only a kBits block has any; none is kept of others.
  __device__ void load(const FwdMask& mask, const int32_t* plan, GranuleClass kind, const int (&query)[2], int n) {
    if (kind == kBits) {
      const int32_t* first = plan + mask.bits_offset + (mask.one_key ? 0 : n * kWords);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_row(first + min(query[half], mask.queries - 1) * mask.bits_stride, words[half]);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[half][w] = 0;
      }
    }
  }

  // The first word is for all keys.
  __device__ void repeat() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 1; w < kWords; ++w) words[half][w] = words[half][0];
    }
  }

  // Scores whose bit is 0 are removed.
  template <int kCount>
  __device__ void apply(float (&s)[kCount], int lane) const {
    const int shift = 2 * (lane % 4);  // the lane's first column
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = score_column(i);
      const uint32_t word = words[score_row(i)][column / 32] >> shift;
      s[i] = word >> column % 32 & 1 ? s[i] : kMinusInfinity;
    }
  }

 private:
  __device__ static void load_row(const int32_t* row, uint32_t (&out)[2]) {
    const uint2 pair = __ldg(reinterpret_cast<const uint2*>(row));
    out[0] = pair.x;
    out[1] = pair.y;
  }
  __device__ static void load_row(const int32_t* row, uint32_t (&out)[4]) {
    const uint4 quad = __ldg(reinterpret_cast<const uint4*>(row));
    out[0] = quad.x;
    out[1] = quad.y;
    out[2] = quad.z;
    out[3] = quad.w;
  }
};

constexpr int kMaskRows = 16;  // of a warp

// An additive mask of one block: 16 rows of each warp, as they are in memory, in shared memory. kSize: bytes of a value, 4 for
// float32, else 2 and q's type.
//
// The warp copies them while the block's product runs. Row r's 16-byte chunks are permuted, so that the 8 rows of a fragment, 128
// to 512 bytes apart, lie in different banks.
template <typename Tile, int kSize>
struct FwdValues {
  static constexpr int kRowBytes = Tile::kBlockN * kSize, kChunks = kRowBytes / 16;
  uint32_t shared;  // this warp's, a multiple of kRowBytes

  __device__ static int swizzle(int row) { return kSize == 4 ? row % 4 * 2 : row % 8; }
  __device__ uint32_t chunk_address(int row, int chunk) const {
    return shared + row * kRowBytes + (chunk ^ swizzle(row)) * 16;
  }

  // Starts the copy of block n. query(r): of the warp's row r. The lanes have read what was there before.
  template <typename Query>
  __device__ void load(const FwdMask& mask, int64_t plane, int n, int lane, const Query& query) const {
    const int first = n * Tile::kBlockN;
    const auto row_start = [&](int r) { return plane + min(query(r), mask.queries - 1) * mask.stride_query; };
    if (mask.vectors) {
      constexpr int kElements = 16 / kSize, kPassRows = ptx::kWarpLanes / kChunks;
      const int chunk = lane % kChunks, column = first + chunk * kElements;
      const int there = clamp_to(mask.keys - column, 0, kElements);
      const char* source = static_cast<const char*>(mask.values) + (there ? column * kSize : 0);
#pragma unroll 4
      for (int row = lane / kChunks; row < kMaskRows; row += kPassRows) {
        ptx::copy_async_16(chunk_address(row, chunk), source + row_start(row) * kSize, there * kSize);
      }
      return;
    }
    constexpr int kWords = kRowBytes / 4;
#pragma unroll 1
    for (int i = lane; i < kMaskRows * kWords; i += ptx::kWarpLanes) {
      const int row = i / kWords, column = first + i % kWords * 4 / kSize;
      const auto at = [&](int c) { return row_start(row) + min(c, mask.keys - 1) * mask.stride_key; };
      uint32_t word;
      if constexpr (kSize == 4) {
        word = __ldg(static_cast<const uint32_t*>(mask.values) + at(column));
      } else {
        const auto* values = static_cast<const uint16_t*>(mask.values);
        word = __ldg(values + at(column)) | uint32_t(__ldg(values + at(column + 1))) << 16;
      }
      ptx::store_shared_4(chunk_address(row, i % kWords / 4) + i % 4 * 4, word);
    }
  }

  // act(score, value) for all scores of the lane.
  template <bool kBFloat16, int kCount, typename Act>
  __device__ void for_each(int lane, float (&s)[kCount], const Act& act) const {
    ptx::copy_async_wait();
    __syncwarp();
    const int row = lane / 4;  // and 8 rows on, which are permuted alike
    const uint32_t address = shared + row * kRowBytes + swizzle(row) * 16 + lane % 4 * 2 * kSize;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      // Eight columns are 8 * kSize bytes; the chunk's number is all that the permutation changes.
      const uint32_t at = (address ^ i / 4 * 8 * kSize) + score_row(i) * 8 * kRowBytes;
      if constexpr (kSize == 4) {
        const uint2 pair = ptx::load_shared_8(at);
        act(s[i], __uint_as_float(pair.x));
        act(s[i + 1], __uint_as_float(pair.y));
      } else {
        const uint32_t pair = ptx::load_shared_4(at);
        act(s[i], ptx::unpack<kBFloat16>(uint16_t(pair)));
        act(s[i + 1], ptx::unpack<kBFloat16>(uint16_t(pair >> 16)));
      }
    }
  }
};

// A consumer's view of the blocks it gets.
template <typename Tile, bool kMasked = Tile::kMasked>
struct BlockMask {  // without a mask: all there is to know is the number, which the consumer counts down itself
  __device__ BlockMask(const FwdArgs&, uint32_t, int) {}
  __device__ void expect(uint32_t) {}
  __device__ void start(const FwdArgs&, const FwdWork&, int, int) {}
  __device__ void take(const FwdArgs&, uint32_t, int, int&) {}
  __device__ bool more(int n, int first) const { return n >= first; }
  template <bool kBFloat16, int kCount>
  __device__ void apply(const FwdArgs&, float (&)[kCount]) const {}
  template <bool kBFloat16, int kCount>
  __device__ void remove(const FwdArgs&, float (&)[kCount]) const {}
};

// What the mask has to say of a block is asked for while the products of the block before run: between the turns of a consumer
// there is nothing that hides a wait, or so much as the instructions that find the address.
template <typename Tile>
struct BlockMask<Tile, true> {
  const int warp, lane;
  const int32_t* plan;
  int64_t plane;  // of the values
  int first_query;
  GranuleClass kind;                    // of the block in turn
  FwdBits<Tile> bits, next_bits;        // of it, and of the one after
  uint32_t next;                        // FwdBlock::word of the block after
  const uint32_t values_shared;  // this warp's

  __device__ BlockMask(const FwdArgs&, uint32_t consumer_values, int thread)
      : warp(thread / ptx::kWarpLanes),
        lane(thread % ptx::kWarpLanes),
        values_shared(consumer_values + warp * kMaskRows * Tile::kBlockN * 4) {}
  // act(values of the type that the mask has)
  template <typename Act>
  __device__ void with_values(const FwdArgs& args, const Act& act) const {
    if (args.mask.dtype == DType::kFloat32) {
      act(FwdValues<Tile, 4>{values_shared});
    } else {
      act(FwdValues<Tile, 2>{values_shared});
    }
  }
  // The word of the block after is in `slot`.
  __device__ void expect(uint32_t slot) { next = __shfl_sync(0xffffffffu, ptx::load_shared_4(slot), 0); }
  // A tile, whose first block is expected. `row`: the consumer's first query.
  __device__ void start(const FwdArgs& args, const FwdWork& work, int row, int consumer) {
    plan = plan_of<Tile>(args, work);
    plane = work.batch * args.mask.stride_batch + fwd_first_head<Tile>(args, work.head) * args.mask.stride_head;
    first_query = row;
    ask(args, consumer);
  }
  __device__ int query(const FwdArgs& args, int row_of_warp) const {
    const int row = warp * kMaskRows + row_of_warp;
    return first_query + (Tile::kFew ? row / args.few.pack : row);
  }
  // The block after becomes the one in turn: its products are issued, and `slot` came with its K.
  __device__ void take(const FwdArgs& args, uint32_t slot, int consumer, int& n) {
    const FwdBlock block = FwdBlock::from(next);
    n = block.n;
    kind = block.of(consumer);
    bits = next_bits;
    if (kind == kMixed) {
      __syncwarp();  // the values of the block before have been read
      with_values(args, [&](auto values) { values.load(args.mask, plane, n, lane, [&](int r) { return query(args, r); }); });
    }
    expect(slot);
    ask(args, consumer);
  }
  // The bits of the block after.
  __device__ void ask(const FwdArgs& args, int consumer) {
    const FwdBlock block = FwdBlock::from(next);
    next_bits.load(args.mask, plan, block.of(consumer), {query(args, lane / 4), query(args, lane / 4 + 8)}, block.n);
  }
  __device__ bool more(int, int) const { return !FwdBlock::from(next).none(); }

  template <bool kBFloat16, int kCount>
  __device__ void apply(const FwdArgs& args, float (&s)[kCount]) {
    if (args.sign != 1.f) {
#pragma unroll
      for (float& score : s) score *= args.sign;
    }
    if (kind == kMixed) {
      with_values(args, [&](auto values) {
        values.template for_each<kBFloat16>(lane, s, [](float& score, float value) { score += value; });
      });
    } else if (kind != kFull) {
      if (args.mask.one_key) bits.repeat();
      bits.apply(s, lane);
    }
  }

  // -inf removes a score also where it is NaN or infinite, which adding it does not: for blocks in which a row's sum is not finite.
  template <bool kBFloat16, int kCount>
  __device__ void remove(const FwdArgs& args, float (&s)[kCount]) const {
    if (kind != kMixed) return;
    with_values(args, [&](auto values) {
      values.template for_each<kBFloat16>(lane, s, [](float& score, float value) {
        if (value == kMinusInfinity) score = kMinusInfinity;
      });
    });
  }
};

}  // namespace flashsdpa
