// Values of an additive mask on their way to the scores of one warp, for one block of queries: by keys 16 keys of all queries,
// by columns 32 keys of 16 queries.
//
// They come with Q by TMA (bwd_values_load.cuh); or the warp asks for them before the product that makes the scores, and takes them up
// once it has waited for that and for all that it had to do meanwhile. In shared memory a row is a query, as in the mask; by keys the
// scores are the other way round, and ldmatrix turns 16-bit values over.
#pragma once

#include "../../ptx/copy_async.cuh"
#include "../../ptx/warpgroup.cuh"
#include "bwd_blocks.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

// Of the mask: where the warp's values start.
struct BwdValuesOrigin {
  int64_t plane;  // of the batch and head
  int query, key;
};

// kSize: bytes of a value, 4 for float32, else 2 and q's type.
template <typename Tile, int kSize>
struct BwdValues {
  static constexpr int kQueries = Tile::kByKeys ? Tile::kBlockM : 16, kKeys = Tile::kByKeys ? 16 : 32;
  static constexpr int kRowBytes = kKeys * kSize, kChunks = kRowBytes / 16;
  // Where those of 16 bits come with Q, they are some columns of a box of 64 keys; else the warp's alone.
  static constexpr bool kInBox = kSize == 2 && Tile::kValuesWithQ;
  static constexpr int kStep = kInBox ? kBoxRowBytes : kRowBytes;  // from query to query
  // What there is no room for comes in parts of 1 KB, which wait until one has been read.
  static constexpr int kRoom = Tile::kValuesBytes / (kInBox ? Tile::kStages : 1);
  static constexpr bool kWhole = kQueries * kRowBytes <= kRoom;
  static constexpr int kPartRows = kWhole ? kQueries : kBwdValuesPart / kRowBytes;
  static constexpr int kParts = kQueries / kPartRows, kAtOnce = kWhole ? 1 : kRoom / kBwdValuesPart;
  static_assert(kAtOnce > 0 && kQueries % kPartRows == 0);

  uint32_t shared;  // the warp's first query; a multiple of 128
  int lane;
  int first_key;  // of the warp's, in a box

  __device__ uint32_t place(int part) const { return shared + part % kAtOnce * (kPartRows * kStep); }

  // Lines of 128 bytes have their 16-byte chunks (float32: pairs of them) permuted, so that what a warp reads at a time lies in
  // different banks: 8 rows of a chunk each for ldmatrix; 4 bytes of 4 pairs of rows, or 8 bytes of 4 rows, of float32.
  __device__ uint32_t permute(uint32_t offset) const {
    const uint32_t line = offset / 128;
    if constexpr (kInBox) return (offset + first_key * kSize) ^ line % 8 * 16;
    return kSize == 2 ? offset ^ line % kChunks * 16 : offset ^ line % 4 * 32;
  }
  // `lane_at` was permuted and has the lane's share of the offset; the rest of it, which is known here, changes no line % 4, in a box
  // no line % 8.
  __device__ static uint32_t further(uint32_t lane_at, int offset) {
    return (lane_at ^ uint32_t(offset % 128)) + uint32_t(offset / 128 * 128);
  }

  // Starts the copies for which there is room. The lanes have read what was there before.
  __device__ void load(const FwdMask& mask, const BwdValuesOrigin& origin) const {
    load_parts<kAtOnce>(mask, origin, 0);
  }

  // s = s * sign + values. -inf removes a score also where it is NaN. origin(): as it was for `load`.
  template <bool kBFloat16, typename Origin, int kCount>
  __device__ void add(const FwdMask& mask, const Origin& origin, float sign, float (&s)[kCount]) const {
    constexpr int kScores = kCount / kParts;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part % kAtOnce == 0) {  // those until the next wait have all been asked for
        ptx::copy_async_wait();
        __syncwarp();
      }
      const auto for_each = [&](const auto& act) {
        for_each_pair<kBFloat16>(place(part), s, std::integral_constant<int, kScores>(), part * kScores, act);
      };
      const auto remove = [](float& x, float& y, float low, float high) {
        if (low == kMinusInfinity) x = kMinusInfinity;
        if (high == kMinusInfinity) y = kMinusInfinity;
      };
      // Where a sum is NaN, which is hardly ever met, all is read again for what is to be removed. Between parts that spills, and floats
      // would be kept instead.
      constexpr bool kRemoveLater = kWhole && kSize == 2;
      bool any_nan = false;
      for_each([&](float& x, float& y, float low, float high) {
        x = fmaf(x, sign, low);
        y = fmaf(y, sign, high);
        if constexpr (!kRemoveLater) remove(x, y, low, high);
        any_nan |= x != x || y != y;
      });
      if constexpr (kRemoveLater) {
        if (__any_sync(0xffffffffu, any_nan)) for_each(remove);
      }
      if (part + kAtOnce < kParts) {
        __syncwarp();
        load_parts<1>(mask, origin(), part + kAtOnce);
      }
    }
  }

 private:
  // By asynchronous copies; or, where values do not start at multiples of 16 bytes or neighbouring keys do not lie side by
  // side, plain loads and stores, neighbouring lanes taking neighbouring keys.
  template <int kCount>
  __device__ void load_parts(const FwdMask& mask, const BwdValuesOrigin& origin, int part) const {
    const int first = origin.query + part * kPartRows;
    const auto row_start = [&](int row) { return origin.plane + min(first + row, mask.queries - 1) * mask.stride_query; };
    if (mask.vectors) {
      constexpr int kElements = 16 / kSize, kPassRows = ptx::kWarpLanes / kChunks;
      const int chunk = lane % kChunks, key = origin.key + chunk * kElements;
      const int there = clamp_to(mask.keys - key, 0, kElements);
      const char* source = static_cast<const char*>(mask.values) + (there ? key * kSize : 0);
      const uint32_t target = place(part) + permute(lane / kChunks * kStep + chunk * 16);
#pragma unroll
      for (int pass = 0; pass < kCount * kPartRows / kPassRows; ++pass) {
        ptx::copy_async<16>(further(target, pass * kPassRows * kStep), source + row_start(lane / kChunks + pass * kPassRows) * kSize,
                           there * kSize);
      }
    } else {
      constexpr int kWords = kRowBytes / 4;
#pragma unroll 2
      for (int i = lane; i < kCount * kPartRows * kWords; i += ptx::kWarpLanes) {
        const int row = i / kWords, word = i % kWords, key = origin.key + word * 4 / kSize;
        const auto at = [&](int k) { return row_start(row) + min(k, mask.keys - 1) * mask.stride_key; };
        uint32_t value;  // or two
        if constexpr (kSize == 4) {
          value = __ldg(static_cast<const uint32_t*>(mask.values) + at(key));
        } else {
          const auto* values = static_cast<const uint16_t*>(mask.values);
          value = __ldg(values + at(key)) | uint32_t(__ldg(values + at(key + 1))) << 16;
        }
        ptx::store_shared_4(place(part) + permute(kInBox ? row * kStep + word * 4 : 4 * i), value);
      }
    }
  }

  // act(score, score, their values) for the scores from `first` on.
  template <bool kBFloat16, int kCount, typename Scores, typename Act>
  __device__ void for_each_pair(uint32_t values, float (&s)[kCount], Scores, int first, const Act& act) const {
    // Rows of values are rows of scores, or columns.
    constexpr int kRow = Tile::kByKeys ? kSize : kStep, kColumn = Tile::kByKeys ? kStep : kSize;
    if constexpr (kSize == 2) {
      // The four fragments of 16 rows and 16 columns of scores; a lane names a line of 8 values.
      const int line = lane % 8, row = lane / 8 % 2 * 8, column = lane / 16 * 8;
      const uint32_t at = values + permute(row * kRow + column * kColumn + line * kStep);
#pragma unroll
      for (int i = 0; i < Scores::value; i += 8) {
        uint32_t pairs[4];
        ptx::ldmatrix_x4<Tile::kByKeys>(further(at, i * 2 * kColumn), pairs);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          float value[2];
          ptx::unpack<kBFloat16>(pairs[t], value[0], value[1]);
          act(s[first + i + 2 * t], s[first + i + 2 * t + 1], value[0], value[1]);
        }
      }
    } else {
      const uint32_t at = values + permute(lane / 4 * kRow + lane % 4 * 2 * kColumn);
#pragma unroll
      for (int i = 0; i < Scores::value; i += 2) {
        const auto address = [&](int e) { return further(at, 8 * score_row(i) * kRow + score_column(i + e) * kColumn); };
        float value[2];
        if constexpr (Tile::kByKeys) {
          value[0] = ptx::load_shared_float(address(0));
          value[1] = ptx::load_shared_float(address(1));
        } else {
          ptx::load_shared_floats(address(0), value[0], value[1]);
        }
        act(s[first + i], s[first + i + 1], value[0], value[1]);
      }
    }
  }
};

}  // namespace flashsdpa
