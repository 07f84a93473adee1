// What a mask does to a block of scores: keeps those whose bit of the mask plan is set, or adds its values.
#pragma once

#include "../../ptx/copy_async.cuh"
#include "../../ptx/warpgroup.cuh"
#include "fwd_blocks.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

constexpr int kMaskRows = 16;  // of a warp

// The bits of one block: 16 rows of each warp, in shared memory.
template <typename Tile>
struct FwdBits {
  static constexpr int kWords = Tile::kBlockN / 32, kRowBytes = kWords * 4, kBytes = kMaskRows * kRowBytes;
  uint32_t shared;  // this warp's

  // Starts the copy for block n. query(r): of the warp's row r.
  template <typename Query>
  __device__ void load(const FwdMask& mask, const int32_t* plan, int n, int lane, const Query& query) const {
    if (lane >= kMaskRows) return;
    const int32_t* row = plan + mask.bits_offset + min(query(lane), mask.queries - 1) * mask.bits_stride;
    ptx::copy_async<kRowBytes>(shared + lane * kRowBytes, row + (mask.one_key ? 0 : n * kWords), kRowBytes);
  }

  // Scores whose bit is 0 are removed; all of them where none is kept, which is what the bits are not read for.
  template <int kCount>
  __device__ void apply(const FwdMask& mask, bool none, float (&s)[kCount], int lane) const {
    uint32_t words[2][kWords] = {};
    if (!none) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int w = 0; w < kWords; w += 2) {
          const uint2 pair = ptx::load_shared_8(shared + (lane / 4 + 8 * half) * kRowBytes + 4 * w);
          words[half][w] = pair.x;
          words[half][w + 1] = pair.y;
        }
        if (mask.one_key) {
#pragma unroll
          for (int w = 1; w < kWords; ++w) words[half][w] = words[half][0];
        }
      }
    }
    const int shift = 2 * (lane % 4);  // the lane's first column
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = score_column(i);
      const uint32_t word = words[score_row(i)][column / 32] >> shift;
      s[i] = word >> column % 32 & 1 ? s[i] : kMinusInfinity;
    }
  }
};

// An additive mask of one block: 16 rows of each warp, as they are in memory, in shared memory. kSize: bytes of a value, 4 for
// float32, else 2 and q's type.
//
// The warp copies them while products run. Row r's 16-byte chunks are permuted, so that the 8 rows of a fragment, 128 to 512 bytes
// apart, lie in different banks.
template <typename Tile, int kSize>
struct FwdValues {
  static constexpr int kRowBytes = Tile::kBlockN * kSize, kChunks = kRowBytes / 16;
  static constexpr int kBytes = kMaskRows * kRowBytes;
  static constexpr bool kSpare = Tile::kTakeUnderProducts && !Tile::kTerms;  // there are registers to spare
  uint32_t shared;  // this warp's, a multiple of kRowBytes

  __device__ static int swizzle(int row) { return kSize == 4 ? row % 4 * 2 : row % 8; }
  __device__ uint32_t chunk_address(int row, int chunk) const {
    return shared + row * kRowBytes + (chunk ^ swizzle(row)) * 16;
  }

  // Starts the copy of block n. query(r): of the warp's row r.
  template <typename Query>
  __device__ void load(const FwdMask& mask, int64_t plane, int n, int lane, const Query& query) const {
    const int first = n * Tile::kBlockN;
    const auto row_start = [&](int r) { return plane + min(query(r), mask.queries - 1) * mask.stride_query; };
    if (mask.vectors) {
      constexpr int kElements = 16 / kSize, kPassRows = ptx::kWarpLanes / kChunks;
      const int chunk = lane % kChunks, lane_row = lane / kChunks, column = first + chunk * kElements;
      const char* source = static_cast<const char*>(mask.values);
      const bool all_rows = query(kMaskRows - 1) < mask.queries || mask.queries == 1;
      if (kSpare && !Tile::kFew && all_rows && first + Tile::kBlockN <= mask.keys) {  // a few instructions a copy
        const char* from = source + (row_start(lane_row) + column) * kSize;
        const uint32_t target = chunk_address(lane_row, chunk);
#pragma unroll
        for (int row = 0; row < kMaskRows; row += kPassRows) {  // has none of the bits of lane_row
          ptx::copy_async_16((target ^ swizzle(row) * 16) + row * kRowBytes, from);
          from += mask.stride_query * (kPassRows * kSize);
        }
      } else {
        const int there = clamp_to(mask.keys - column, 0, kElements);
        if (there) source += column * kSize;
        constexpr int kUnrolled = Tile::kTakeUnderProducts && !kSpare ? 4 : 1;
#pragma unroll kUnrolled
        for (int row = lane_row; row < kMaskRows; row += kPassRows) {
          ptx::copy_async<16>(chunk_address(row, chunk), source + row_start(row) * kSize, there * kSize);
        }
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

  // score = score * sign + value for all scores of the lane.
  template <bool kBFloat16, int kCount>
  __device__ void add(int lane, float (&s)[kCount], float sign) const {
    if constexpr (kSize == 2 && kSpare) {  // the four tiles of 8 x 8 in 16 columns at a time; the lane names a row of one
      const uint32_t address = chunk_address(lane % 16, lane / 16);
#pragma unroll
      for (int i = 0; i < kCount; i += 8) {
        uint32_t pairs[4];
        ptx::ldmatrix_x4<false>(address ^ i / 8 * 32, pairs);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          float value[2];
          ptx::unpack<kBFloat16>(pairs[t], value[0], value[1]);
#pragma unroll
          for (int e = 0; e < 2; ++e) s[i + 2 * t + e] = fmaf(s[i + 2 * t + e], sign, value[e]);
        }
      }
    } else {
      for_each<kBFloat16>(lane, s, [&](float& score, float value) { score = fmaf(score, sign, value); });
    }
  }

  // act(score, value) for all scores of the lane. Not by tiles, for the sake of registers.
  template <bool kBFloat16, int kCount, typename Act>
  __device__ void for_each(int lane, float (&s)[kCount], const Act& act) const {
    // Row lane / 4, and 8 rows on, which are permuted alike.
    const uint32_t address = chunk_address(lane / 4, 0) + lane % 4 * 2 * kSize;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      // Eight columns are 8 * kSize bytes; the chunk's number is all that the permutation changes.
      const uint32_t at = (address ^ i / 4 * 8 * kSize) + score_row(i) * 8 * kRowBytes;
      float value[2];
      if constexpr (kSize == 4) {
        ptx::load_shared_floats(at, value[0], value[1]);
      } else {
        ptx::unpack<kBFloat16>(ptx::load_shared_4(at), value[0], value[1]);
      }
      act(s[i], value[0]);
      act(s[i + 1], value[1]);
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

// The plan of a tile, and its plane of values.
template <typename Tile, bool kTerms = Tile::kTerms>
struct BlockMaskPlace {
  const int32_t* its_plan;
  int64_t its_plane;
  __device__ void start(const FwdArgs& args, const FwdWork& work) {
    its_plan = plan_of<Tile>(args, work);
    its_plane = work.batch * args.mask.stride_batch + fwd_first_head<Tile>(args, work.head) * args.mask.stride_head;
  }
  __device__ const int32_t* plan(const FwdArgs&) const { return its_plan; }
  __device__ int64_t plane(const FwdArgs&) const { return its_plane; }
};
// With terms there are no registers for either: anew for each block, from what is kept anyway; shuffled, or it would be kept.
template <typename Tile>
struct BlockMaskPlace<Tile, true> {
  int batch, head;
  __device__ void start(const FwdArgs&, const FwdWork& work) {
    batch = work.batch;
    head = work.head;
  }
  __device__ static int anew(int value) { return __shfl_sync(0xffffffffu, value, 0); }
  __device__ const int32_t* plan(const FwdArgs& args) const {
    return args.mask.plan + anew(batch) * args.mask.plan_batch + anew(head) * args.mask.plan_head;
  }
  __device__ int64_t plane(const FwdArgs& args) const {
    return anew(batch) * args.mask.stride_batch + anew(head) * args.mask.stride_head;
  }
};

// What the mask has to say of a block is asked for while the products of the block before run: between the turns of a consumer
// there is nothing that hides a wait, or so much as the instructions that find an address. It goes to shared memory because there
// are no registers for it. A warp's memory holds two blocks, or one whose values are floats: such a block asks for its own. Of
// bool masks alone (not Tile::kValues) it holds bits.
template <typename Tile>
struct BlockMask<Tile, true> {
  const int warp, lane;
  BlockMaskPlace<Tile> place;
  int first_query;
  GranuleClass kind;      // of the block in turn
  uint32_t next;          // FwdBlock::word of the block after
  const uint32_t memory;  // this warp's
  uint32_t offset = 0;    // there, of the block in turn

  static constexpr int kMemory = Tile::kMaskBytes * ptx::kWarpLanes / ptx::kWarpgroupThreads;
  static constexpr int kPlace = Tile::kValues ? FwdValues<Tile, 2>::kBytes : FwdBits<Tile>::kBytes;  // of one of two blocks
  static_assert(2 * kPlace <= kMemory && FwdBits<Tile>::kBytes <= kPlace && (!Tile::kValues || FwdValues<Tile, 4>::kBytes <= kMemory));

  __device__ BlockMask(const FwdArgs&, uint32_t consumer_memory, int thread)
      : warp(thread / ptx::kWarpLanes), lane(thread % ptx::kWarpLanes), memory(consumer_memory + warp * kMemory) {}
  __device__ static bool floats(const FwdArgs& args) { return Tile::kValues && args.mask.values && args.mask.dtype == DType::kFloat32; }
  // act(values there, of the type that the mask has)
  template <typename Act>
  __device__ static void with_values(const FwdArgs& args, uint32_t there, const Act& act) {
    if (floats(args)) {
      act(FwdValues<Tile, 4>{there});
    } else {
      act(FwdValues<Tile, 2>{there});
    }
  }
  __device__ uint32_t other_offset() const { return offset ^ kPlace; }
  __device__ uint32_t in_turn(const FwdArgs& args) const { return memory + (floats(args) ? 0 : offset); }
  // The word of the block after is in `slot`.
  __device__ void expect(uint32_t slot) { next = __shfl_sync(0xffffffffu, ptx::load_shared_4(slot), 0); }
  // A tile, whose first block is expected. `row`: the consumer's first query.
  __device__ void start(const FwdArgs& args, const FwdWork& work, int row, int consumer) {
    place.start(args, work);
    first_query = row;
    if (!floats(args)) ask(args, FwdBlock::from(next), consumer, other_offset());
  }
  // The block after becomes the one in turn: its products are issued, and `slot` came with its K.
  __device__ void take(const FwdArgs& args, uint32_t slot, int consumer, int& n) {
    const FwdBlock block = FwdBlock::from(next);
    n = block.n;
    kind = kind_of(args, block, consumer);
    expect(slot);
    offset = other_offset();
    ask(args, floats(args) ? block : FwdBlock::from(next), consumer, floats(args) ? 0 : other_offset());
  }
  // A plan alone: of values only what they remove is known.
  __device__ static GranuleClass kind_of(const FwdArgs& args, const FwdBlock& block, int consumer) {
    const GranuleClass kind = block.of(consumer);
    return kind == kMixed && !(Tile::kValues && args.mask.values) ? kBits : kind;
  }
  // Starts the copies for a block, to `there` in the warp's memory: one group, empty or not, for arrived() counts them.
  __device__ void ask(const FwdArgs& args, const FwdBlock& block, int consumer, uint32_t there) const {
    const GranuleClass asked = kind_of(args, block, consumer);
    // Shuffled, so that the compiler does not keep for the whole tile what follows from it: there are no registers for that.
    const int first = __shfl_sync(0xffffffffu, first_query, 0);
    const auto query = [&](int row_of_warp) {
      const int row = warp * kMaskRows + row_of_warp;
      return first + (Tile::kFew ? row / args.few.pack : row);
    };
    const bool values = Tile::kValues && asked == kMixed;
    if (asked == kBits || values) __syncwarp();  // all lanes have read what was there
    if (asked == kBits) FwdBits<Tile>{memory + there}.load(args.mask, place.plan(args), block.n, lane, query);
    if (values) {
      with_values(args, memory + there, [&](auto values) { values.load(args.mask, place.plane(args), block.n, lane, query); });
    }
    ptx::copy_async_commit();
  }
  // What was asked for the block in turn is there, from all lanes.
  __device__ void arrived(const FwdArgs& args) const {
    if (floats(args)) {
      ptx::copy_async_wait_for_all_but<0>();
    } else {
      ptx::copy_async_wait_for_all_but<1>();
    }
    __syncwarp();
  }
  __device__ bool more(int, int) const { return !FwdBlock::from(next).none(); }
  __device__ int to_come() const { return FwdBlock::from(next).n; }

  template <bool kBFloat16, int kCount>
  __device__ void apply(const FwdArgs& args, float (&s)[kCount]) const {
    const float sign = args.sign;
    if (Tile::kValues && kind == kMixed) {
      arrived(args);
      with_values(args, in_turn(args), [&](auto values) { values.template add<kBFloat16>(lane, s, sign); });
      return;
    }
    if (sign != 1.f) {
#pragma unroll
      for (float& score : s) score *= sign;
    }
    if (kind == kFull) return;
    if (kind == kBits) arrived(args);
    FwdBits<Tile>{in_turn(args)}.apply(args.mask, kind == kEmpty, s, lane);
  }

  // -inf removes a score also where it is NaN or infinite, which adding it does not: for blocks in which a row's sum is not finite.
  template <bool kBFloat16, int kCount>
  __device__ void remove(const FwdArgs& args, float (&s)[kCount]) const {
    if (!Tile::kValues || kind != kMixed) return;
    with_values(args, in_turn(args), [&](auto values) {
      values.template for_each<kBFloat16>(lane, s, [](float& score, float value) {
        if (value == kMinusInfinity) score = kMinusInfinity;
      });
    });
  }
};

}  // namespace flashsdpa
