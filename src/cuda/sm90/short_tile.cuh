// What the kernels for short sequences share: 64 rows of a tensor in shared memory, products of a warp's 16 rows with them, and
// the scores of a block before the softmax.
#pragma once

#include "../../ptx/copy_async.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/warpgroup.cuh"
#include "fwd_schedule.cuh"
#include "fwd_softmax.cuh"
#include "short.h"

namespace flashsdpa {

constexpr int kShortScores = kShortRows / 2;  // of a lane: 16 rows x 64 keys

// Shared memory of 64 rows. Lines of 128 bytes have their 16-byte chunks permuted, so that 8 rows of a chunk lie in different banks.
template <int kDim>
struct ShortTile {
  static constexpr int kRowBytes = kDim * 2, kChunks = kDim / 8, kBytes = kShortRows * kRowBytes;
  static constexpr int kLineRows = 128 / kRowBytes;
  static_assert(kDim == 32 || kDim == 64);
  __device__ static uint32_t at(int row, int chunk) { return row * kRowBytes + (chunk ^ row / kLineRows % kChunks) * 16; }
};

// The rows of one head, from `base`; rows and columns that are not there become zeros. `step`: from column to column.
template <int kDim>
__device__ inline void short_load(uint32_t shared, const FwdTensor& t, int64_t base, int thread, int64_t step = 1) {
  using Tile = ShortTile<kDim>;
  const uint16_t* first = t.data + base;
  const auto there = [&](int row, int column, int most) { return row < t.rows ? clamp_to(t.columns - column, 0, most) : 0; };
  if (t.tma && step == 1) {
#pragma unroll
    for (int i = thread; i < kShortRows * Tile::kChunks; i += kShortThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks, count = there(row, 8 * chunk, 8);
      ptx::copy_async<16>(shared + Tile::at(row, chunk), count ? first + row * t.stride_row + 8 * chunk : t.data, count * 2);
    }
  } else if (t.words && step == 1) {
#pragma unroll 4
    for (int i = thread; i < kShortRows * kDim / 2; i += kShortThreads) {
      const int row = i / (kDim / 2), column = i % (kDim / 2) * 2, count = there(row, column, 2);
      ptx::copy_async<4>(shared + Tile::at(row, column / 8) + column % 8 * 2, count ? first + row * t.stride_row + column : t.data,
                         count * 2);
    }
  } else {
#pragma unroll 2
    for (int i = thread; i < kShortRows * kDim / 2; i += kShortThreads) {
      const int row = i / (kDim / 2), column = i % (kDim / 2) * 2, count = there(row, column, 2);
      const uint16_t* source = first + row * t.stride_row + column * step;
      const uint32_t low = count > 0 ? source[0] : 0, high = count > 1 ? source[step] : 0;
      ptx::store_shared_4(shared + Tile::at(row, column / 8) + column % 8 * 2, low | high << 16);
    }
  }
}

// A warp's 16 rows of results, each row times its factor, by way of shared memory that this warp alone uses.
template <int kDim, bool kBFloat16>
__device__ inline void short_store(uint32_t shared, const FwdTensor& t, int64_t base, int first_row, const float (&x)[kDim / 2],
                                   const float (&factor)[2], int lane) {
  using Tile = ShortTile<kDim>;
#pragma unroll
  for (int i = 0; i < kDim / 2; i += 2) {
    const int row = first_row + lane / 4 + 8 * score_row(i);
    ptx::store_shared_4(shared + Tile::at(row, i / 4) + lane % 4 * 4,
                        ptx::pack<kBFloat16>(x[i] * factor[score_row(i)], x[i + 1] * factor[score_row(i)]));
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * Tile::kChunks; i += ptx::kWarpLanes) {
    const int row = first_row + i / Tile::kChunks, chunk = i % Tile::kChunks;
    const int count = row < t.rows ? clamp_to(t.columns - 8 * chunk, 0, 8) : 0;
    uint16_t* target = t.data + base + row * t.stride_row + 8 * chunk;
    const uint32_t source = shared + Tile::at(row, chunk);
    if (t.tma && count == 8) {
      const uint2 low = ptx::load_shared_8(source), high = ptx::load_shared_8(source + 8);
      *reinterpret_cast<uint4*>(target) = uint4{low.x, low.y, high.x, high.y};
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e < count) target[e] = uint16_t(ptx::load_shared_4(source + e / 2 * 4) >> e % 2 * 16);
      }
    }
  }
  __syncwarp();
}

// s = A B^T of 16 rows of A, from `row` on, and all 64 of B.
template <int kDim, bool kBFloat16>
__device__ inline void short_scores(float (&s)[kShortScores], uint32_t a, int row, uint32_t b, int lane) {
  using Tile = ShortTile<kDim>;
#pragma unroll
  for (float& score : s) score = 0.f;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t rows[4];
    ptx::ldmatrix_x4<false>(a + Tile::at(row + lane % 16, 2 * step + lane / 16), rows);
#pragma unroll
    for (int pair = 0; pair < kShortRows / 16; ++pair) {  // of 8 rows of B
      uint32_t keys[4];
      ptx::ldmatrix_x4<false>(b + Tile::at(16 * pair + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2), keys);
      ptx::mma_16<kBFloat16>(s + 8 * pair, rows, keys[0], keys[1]);
      ptx::mma_16<kBFloat16>(s + 8 * pair + 4, rows, keys[2], keys[3]);
    }
  }
}

// x = A B of 16 rows of A, in fragments of 16 columns, and all 64 rows of B.
template <int kDim, bool kBFloat16>
__device__ inline void short_sums(float (&x)[kDim / 2], const uint32_t (&a)[kShortRows / 16][4], uint32_t b, int lane) {
  using Tile = ShortTile<kDim>;
#pragma unroll
  for (float& sum : x) sum = 0.f;
#pragma unroll
  for (int step = 0; step < kShortRows / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {  // of 8 columns of B
      uint32_t columns[4];
      ptx::ldmatrix_x4<true>(b + Tile::at(16 * step + lane % 16, 2 * pair + lane / 16), columns);
      ptx::mma_16<kBFloat16>(x + 8 * pair, a[step], columns[0], columns[1]);
      ptx::mma_16<kBFloat16>(x + 8 * pair + 4, a[step], columns[2], columns[3]);
    }
  }
}

// What is added to each of the lane's scores, in units of the scores' factor; -inf removes one. Asked for before it is needed. Where
// there is no such query or key, that of the last.
template <bool kBFloat16>
__device__ inline void short_mask(const ShortArgs& args, int batch, int head, int query, int lane, float (&m)[kShortScores]) {
  const ShortMask& mask = args.mask;
  const int64_t plane = batch * mask.stride[0] + head * mask.stride[1];
  const int64_t row[2] = {plane + min(query, args.seq_q - 1) * mask.stride[2],
                          plane + min(query + 8, args.seq_q - 1) * mask.stride[2]};
  const auto fill = [&](const auto& value) {
#pragma unroll
    for (int i = 0; i < kShortScores; ++i) {
      m[i] = value(row[score_row(i)] + min(2 * (lane % 4) + score_column(i), args.seq_k - 1) * mask.stride[3]);
    }
  };
  if (mask.dtype == DType::kBool) {
    fill([&](int64_t at) { return __ldg(static_cast<const uint8_t*>(mask.data) + at) ? 0.f : kMinusInfinity; });
  } else if (mask.dtype == DType::kFloat32) {
    fill([&](int64_t at) { return __ldg(static_cast<const float*>(mask.data) + at); });
  } else {
    fill([&](int64_t at) { return ptx::unpack<kBFloat16>(__ldg(static_cast<const uint16_t*>(mask.data) + at)); });
  }
}

// Scores of products: factor, mask, band, and the end of the keys. `query`: the first of the lane's two.
__device__ inline void short_finish(const ShortArgs& args, int query, int lane, const float (&m)[kShortScores],
                                    float (&s)[kShortScores]) {
  if (args.mask.data) {
#pragma unroll
    for (int i = 0; i < kShortScores; ++i) s[i] = m[i] == kMinusInfinity ? kMinusInfinity : fmaf(s[i], args.factor, m[i]);
  } else if (args.factor != 1.f) {
#pragma unroll
    for (float& score : s) score *= args.factor;
  }
  const int key = 2 * (lane % 4);  // the lane's first
  const int first[2] = {query + args.band_lo - key, query + 8 + args.band_lo - key};
  const int last[2] = {min(query + args.band_hi, args.seq_k - 1) - key, min(query + 8 + args.band_hi, args.seq_k - 1) - key};
  mask_before(s, first);
  mask_after(s, last);
}

}  // namespace flashsdpa
