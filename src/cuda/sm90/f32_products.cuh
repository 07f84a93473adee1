// Products of float32 tiles on the tensor cores, by one warp.
//
// Exact: an operand is a sum of two TF32 numbers, high and low, and a product is high * high + high * low + low * high; what is
// left out is below float32's own rounding. The tensor cores round sums towards zero, which over many terms adds up: 16
// terms are summed there, the small ones first, and their sums are added in ordinary arithmetic.
// An infinity has no two parts: what it takes part in is NaN.
// TF32: high * high, in one chain.
//
// Accumulators are as those of wgmma (fwd_softmax.cuh), for kM blocks of 16 rows. Which of the 16 columns k of a product a
// register stands for is free as long as A and B agree: here such that a lane's four lie side by side in memory.
#pragma once

#include "../../ptx/mma.cuh"
#include "f32_tiles.cuh"

namespace flashsdpa {

constexpr int kF32Depth = 16;  // terms summed on the tensor cores: two instructions' worth

// Operands of two instructions. A: elements 4 * step + i; B: 2 * step + i.
template <int kCount, bool kExact>
struct F32Operand {
  uint32_t high[kCount], low[kCount];

  __device__ void set(int i, float x) {
    if constexpr (kExact) {
      // Rounded to the nearest. A NaN may lose itself in `high`; then `low` is one, as it is of an infinity.
      high[i] = __float_as_uint(x) + 0x1000;
      low[i] = __float_as_uint(x - __uint_as_float(high[i] & 0xffffe000u));
    } else {
      // What is cut off is on average what the factor added; a number that TF32 holds stays the same.
      constexpr float kNudge = 1.f + 0.6875f / 2048;
      high[i] = __float_as_uint(x * kNudge);
    }
  }
};
template <bool kExact>
using F32OperandA = F32Operand<8, kExact>;
template <bool kExact>
using F32OperandB = F32Operand<4, kExact>;

// Blocks of 8 columns that are multiplied at a time: a product waits for the one before in its chain, so chains go side by
// side.
template <int kM>
constexpr int kF32Together = 4 / kM;

// sum[m][first + n] += A[m] * B[n]. kLowAFirst: the order of the small products, for callers who want the same bits with A
// and B exchanged.
template <bool kExact, bool kLowAFirst = true, int kM, int kN, int kBlocks>
__device__ inline void f32_multiply(float (&sum)[kM][kBlocks][4], int first, const F32OperandA<kExact> (&a)[kM],
                                    const F32OperandB<kExact> (&b)[kN]) {
  const auto step = [](float(&c)[4], const uint32_t(&x)[8], const uint32_t(&y)[4], int s) {
    const uint32_t four[4] = {x[4 * s], x[4 * s + 1], x[4 * s + 2], x[4 * s + 3]};
    ptx::mma_tf32(c, four, y[2 * s], y[2 * s + 1], c);
  };
  const auto for_each = [](const auto& act) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) act(m, n);
    }
  };
  if constexpr (kExact) {
    float c[kM][kN][4] = {};
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      for_each([&](int m, int n) { step(c[m][n], kLowAFirst ? a[m].low : a[m].high, kLowAFirst ? b[n].high : b[n].low, s); });
      for_each([&](int m, int n) { step(c[m][n], kLowAFirst ? a[m].high : a[m].low, kLowAFirst ? b[n].low : b[n].high, s); });
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) for_each([&](int m, int n) { step(c[m][n], a[m].high, b[n].high, s); });
    for_each([&](int m, int n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][first + n][i] += c[m][n][i];
    });
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) for_each([&](int m, int n) { step(sum[m][first + n], a[m].high, b[n].high, s); });
  }
}

// S += X * Y^T: rows of X from `x` on, kN rows of Y, `columns` of both (those up to a multiple of 32 are read).
template <bool kExact, bool kXIsQ, int kDim, int kM, int kN>
__device__ inline void f32_scores(float (&s)[kM][kN / 8][4], uint32_t x, uint32_t y, int columns, int lane) {
  constexpr int kTogether = kF32Together<kM>;
  const int row = lane / 4, chunk = lane % 4;
  const uint32_t even = f32_place<kDim>(row, chunk);  // rows 8 further on are swizzled alike
#pragma unroll 1
  for (int column = 0; column < columns; column += 2 * kF32Depth) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = (even ^ half * 64) + column * 4;
      F32OperandA<kExact> a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float f[4];
          ptx::load_shared_floats(x + at + (16 * m + 8 * r) * kDim * 4, f[0], f[1], f[2], f[3]);
#pragma unroll
          for (int e = 0; e < 4; ++e) a[m].set(e / 2 * 4 + e % 2 * 2 + r, f[e]);
        }
      }
#pragma unroll
      for (int n = 0; n < kN / 8; n += kTogether) {
        F32OperandB<kExact> b[kTogether];
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          float f[4];
          ptx::load_shared_floats(y + at + 8 * (n + t) * kDim * 4, f[0], f[1], f[2], f[3]);
#pragma unroll
          for (int e = 0; e < 4; ++e) b[t].set(e, f[e]);
        }
        f32_multiply<kExact, kXIsQ>(s, n, a, b);
      }
    }
  }
}

// O += P * Y: P as accumulators, kN rows of Y, `columns` of it. Accumulator i of block n of O is column f32_column(n, i, lane).
template <bool kExact, int kDim, int kM, int kN>
__device__ inline void f32_add_product(float (&o)[kM][kDim / 8][4], const float (&p)[kM][kN / 8][4], uint32_t y, int columns,
                                       int lane) {
  constexpr int kTogether = kF32Together<kM>;
  const int row = lane % 4 * 2, chunk = lane / 4;
  const uint32_t first = y + f32_place<kDim>(row, chunk), second = y + f32_place<kDim>(row + 1, chunk);
#pragma unroll
  for (int j = 0; j < kN; j += kF32Depth) {
    F32OperandA<kExact> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) a[m].set(i, p[m][j / 8 + i / 4][i % 4 / 2 + i % 2 * 2]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 32; ++n) {
      if (n * 32 >= columns) break;
      float f[4][4];  // of rows k, k + 1, k + 8, k + 9: one column of each of four blocks
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t from = (r % 2 ? second : first) + (j + r / 2 * 8) * kDim * 4 + n * 128;
        ptx::load_shared_floats(from, f[r][0], f[r][1], f[r][2], f[r][3]);
      }
#pragma unroll
      for (int first = 0; first < 4; first += kTogether) {
        F32OperandB<kExact> b[kTogether];
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
#pragma unroll
          for (int r = 0; r < 4; ++r) b[t].set(r, f[r][first + t]);
        }
        f32_multiply<kExact>(o, 4 * n + first, a, b);
      }
    }
  }
}

__device__ inline int f32_column(int n, int i, int lane) { return n / 4 * 32 + 4 * (2 * (lane % 4) + i % 2) + n % 4; }

// What f32_add_product summed, times factor(m, half), as rows first + 16 * m + 8 * half + lane / 4 of `t`.
template <int kDim, int kM, typename Factor>
__device__ inline void f32_store(const F32Tensor& t, const float* plane, const float (&o)[kM][kDim / 8][4], int first, int lane,
                                 const Factor& factor) {
  struct alignas(16) Four {
    float value[4];
  };
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 16 * m + 8 * half + lane / 4;
      if (row >= t.rows) continue;
      const float by = factor(m, half);
      float* target = const_cast<float*>(plane) + row * t.stride_row;
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = f32_column(n, e, lane);
          Four four;
#pragma unroll
          for (int k = 0; k < 4; ++k) four.value[k] = o[m][n + k][2 * half + e] * by;
          if (t.vectors && column + 4 <= t.columns) {
            *reinterpret_cast<Four*>(target + column) = four;
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (column + k < t.columns) target[column + k] = four.value[k];
            }
          }
        }
      }
    }
  }
}

}  // namespace flashsdpa
