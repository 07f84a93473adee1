// What a mask does to a block of scores: keeps those whose bit of the mask plan is set, or adds its values.
#pragma once

#include "../../ptx/copy_async.cuh"
#include "../../ptx/warpgroup.cuh"
#include "fwd_blocks.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

// The bits of a lane's two rows for one block of keys.
template <typename Tile>
struct FwdBits {
  static constexpr int kWords = Tile::kBlockN / 32;
  uint32_t words[2][kWords];

  // Only a kBits block has any.
  __device__ void load(const FwdMask& mask, const int32_t* plan, GranuleClass kind, const int (&query)[2], int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (kind == kBits) {
        const int32_t* row = plan + mask.bits_offset + min(query[half], mask.queries - 1) * mask.bits_stride;
        load_row(row + (mask.one_key ? 0 : n * kWords), words[half]);
        if (mask.one_key) {
#pragma unroll
          for (int w = 0; w < kWords; ++w) words[half][w] = words[half][0];
        }
      } else {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[half][w] = 0;
      }
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

// An additive mask of one block: 16 rows of each warp, as they are in memory, in shared memory.
//
// The warp copies them while the block's product runs. Row r's 16-byte chunks are permuted, so that the 8 rows of a fragment, 256
// or 512 bytes apart, lie in different banks.
template <typename Tile>
struct FwdValues {
  static constexpr int kRows = 16;  // of a warp
  uint32_t shared;                  // this warp's
  bool wide;                        // float32, else q's type
  int row_bytes;

  __device__ void start(const FwdMask& mask, uint32_t consumer_shared, int warp) {
    wide = mask.dtype == DType::kFloat32;
    row_bytes = Tile::kBlockN * (wide ? 4 : 2);
    shared = consumer_shared + warp * kRows * Tile::kBlockN * 4;
  }
  __device__ uint32_t address(int row, int byte) const {
    const int swizzle = wide ? row % 4 * 2 : row % 8;
    return shared + row * row_bytes + (byte / 16 ^ swizzle) * 16 + byte % 16;
  }

  // Starts the copy of block n. query(r): of the warp's row r. The lanes have read what was there before.
  template <typename Query>
  __device__ void load(const FwdMask& mask, int64_t plane, int n, int lane, const Query& query) const {
    const int first = n * Tile::kBlockN, size = wide ? 4 : 2;
    const auto row_start = [&](int r) { return plane + min(query(r), mask.queries - 1) * mask.stride_query; };
    if (mask.vectors) {
      const int chunks = row_bytes / 16, elements = 16 / size;
#pragma unroll 1
      for (int i = lane; i < kRows * chunks; i += ptx::kWarpLanes) {
        const int row = i / chunks, column = first + i % chunks * elements;
        const int there = clamp_to(mask.keys - column, 0, elements);
        const char* source = static_cast<const char*>(mask.values) + (row_start(row) + (there ? column : 0)) * size;
        ptx::copy_async_16(address(row, i % chunks * 16), source, there * size);
      }
      return;
    }
    const int words = row_bytes / 4;
#pragma unroll 1
    for (int i = lane; i < kRows * words; i += ptx::kWarpLanes) {
      const int row = i / words, column = first + i % words * 4 / size;
      const auto at = [&](int c) { return row_start(row) + min(c, mask.keys - 1) * mask.stride_key; };
      uint32_t word;
      if (wide) {
        word = __ldg(static_cast<const uint32_t*>(mask.values) + at(column));
      } else {
        const auto* values = static_cast<const uint16_t*>(mask.values);
        word = __ldg(values + at(column)) | uint32_t(__ldg(values + at(column + 1))) << 16;
      }
      ptx::store_shared_4(address(row, i % words * 4), word);
    }
  }

  // Adds the values to the scores, which are scaled already; -inf removes a score, also one that is NaN.
  template <bool kBFloat16, int kCount>
  __device__ void add(int lane, float (&s)[kCount]) const {
    ptx::copy_async_wait();
    __syncwarp();
    const auto put = [&](int i, float value) { s[i] = value == kMinusInfinity ? kMinusInfinity : s[i] + value; };
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int row = lane / 4 + 8 * score_row(i), column = score_column(i) + 2 * (lane % 4);
      if (wide) {
        const uint2 pair = ptx::load_shared_8(address(row, 4 * column));
        put(i, __uint_as_float(pair.x));
        put(i + 1, __uint_as_float(pair.y));
      } else {
        const uint32_t pair = ptx::load_shared_4(address(row, 2 * column));
        put(i, ptx::unpack<kBFloat16>(uint16_t(pair)));
        put(i + 1, ptx::unpack<kBFloat16>(uint16_t(pair >> 16)));
      }
    }
  }
};

// A consumer's view of the blocks it gets.
template <typename Tile, bool kMasked = Tile::kMasked>
struct BlockMask {  // without a mask: all there is to know is the number, which the consumer counts down itself
  __device__ BlockMask(const FwdArgs&, uint32_t, int) {}
  __device__ void start(const FwdArgs&, const FwdWork&, int) {}
  __device__ void take(const FwdArgs&, uint32_t, int, int&) {}
  __device__ bool more(int n, int first) const { return n >= first; }
  template <bool kBFloat16, int kCount>
  __device__ void apply(const FwdArgs&, float (&)[kCount]) const {}
};

template <typename Tile>
struct BlockMask<Tile, true> {
  const int warp, lane;
  const int32_t* plan;
  int64_t plane;  // of the values
  int first_query;
  bool final;
  GranuleClass kind;
  FwdBits<Tile> bits;
  FwdValues<Tile> values;

  __device__ BlockMask(const FwdArgs& args, uint32_t values_shared, int thread)
      : warp(thread / ptx::kWarpLanes), lane(thread % ptx::kWarpLanes) {
    values.start(args.mask, values_shared, warp);
  }
  // `row`: the consumer's first query.
  __device__ void start(const FwdArgs& args, const FwdWork& work, int row) {
    plan = plan_of<Tile>(args, work);
    plane = work.batch * args.mask.stride_batch + fwd_first_head<Tile>(args, work.head) * args.mask.stride_head;
    first_query = row;
    final = false;
  }
  __device__ int query(const FwdArgs& args, int row_of_warp) const {
    const int row = warp * FwdValues<Tile>::kRows + row_of_warp;
    return first_query + (Tile::kFew ? row / args.few.pack : row);
  }
  // The word that came with the block of K. What the mask has to say is asked for at once, to arrive under the product.
  __device__ void take(const FwdArgs& args, uint32_t slot, int consumer, int& n) {
    const FwdBlock block = FwdBlock::from(__shfl_sync(0xffffffffu, ptx::load_shared_4(slot), 0));
    n = block.n;
    final = block.final;
    kind = block.of(consumer);
    if (kind == kMixed && !args.mask.values) kind = kBits;  // a plan alone: of values only what they remove is known
    bits.load(args.mask, plan, kind, {query(args, lane / 4), query(args, lane / 4 + 8)}, n);
    if (kind == kMixed) values.load(args.mask, plane, n, lane, [&](int r) { return query(args, r); });
  }
  __device__ bool more(int, int) const { return !final; }

  template <bool kBFloat16, int kCount>
  __device__ void apply(const FwdArgs& args, float (&s)[kCount]) const {
    if (args.sign != 1.f) {
#pragma unroll
      for (float& score : s) score *= args.sign;
    }
    if (kind == kMixed) {
      values.template add<kBFloat16>(lane, s);
      __syncwarp();  // before the next block's values take the place of these
    } else if (kind != kFull) {
      bits.apply(s, lane);
    }
  }
};

}  // namespace flashsdpa
