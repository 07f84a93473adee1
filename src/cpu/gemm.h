// C (+)= A B on small tiles that live in cache: the one matrix product under every CPU kernel.
//
//   A: M x K, element (i, k) at a[i * a_row + k * a_col]: rows or columns of a tile alike, read one scalar at a time
//   B: K x N, rows of ldb elements, N contiguous; readable (not necessarily meaningful) up to the next full vector
//   C: M x N, rows of ldc elements, written up to the next full vector
#pragma once

#include "simd.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

template <typename T, int kRows, int kVecs, bool kAccumulate>
inline void micro_tile(int64_t depth, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t ldb, T* c,
                       int64_t ldc) {
  Vec<T> acc[kRows][kVecs];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) acc[i][j] = Vec<T>{};
#pragma GCC unroll 2  // for the loop's own arithmetic: 4 % on AVX2
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> bk[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) bk[j] = load(b + j * kLanes<T>);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> ai = splat(a[i * a_row]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) acc[i][j] += ai * bk[j];
    }
    a += a_col;
    b += ldb;
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      // Added at the end: rounding then grows with the number of tiles, not with the number of keys.
      T* out = c + i * ldc + j * kLanes<T>;
      store(out, kAccumulate ? load(out) + acc[i][j] : acc[i][j]);
    }
}

template <typename T, int kVecs, bool kAccumulate>
inline void row_panel(int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_col, const T* b, int64_t ldb,
                      T* c, int64_t ldc) {
  int64_t i = 0;
  for (; i + kGemmRows <= rows; i += kGemmRows)
    micro_tile<T, kGemmRows, kVecs, kAccumulate>(depth, a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc);
  if constexpr (kGemmRows > 4)
    if (i + 4 <= rows) {
      micro_tile<T, 4, kVecs, kAccumulate>(depth, a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc);
      i += 4;
    }
  for (; i + 2 <= rows; i += 2)
    micro_tile<T, 2, kVecs, kAccumulate>(depth, a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc);
  if (i < rows) micro_tile<T, 1, kVecs, kAccumulate>(depth, a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc);
}

template <bool kAccumulate, typename T>
inline void gemm(int64_t rows, int64_t cols, int64_t depth, const T* a, int64_t a_row, int64_t a_col, const T* b,
                 int64_t ldb, T* c, int64_t ldc) {
  constexpr int kLane = kLanes<T>;
  int64_t j = 0;
  if constexpr (kGemmVecs == 4)
    for (; j + 3 * kLane < cols; j += 4 * kLane)
      row_panel<T, 4, kAccumulate>(rows, depth, a, a_row, a_col, b + j, ldb, c + j, ldc);
  for (; j + kLane < cols; j += 2 * kLane)
    row_panel<T, 2, kAccumulate>(rows, depth, a, a_row, a_col, b + j, ldb, c + j, ldc);
  if (j < cols) row_panel<T, 1, kAccumulate>(rows, depth, a, a_row, a_col, b + j, ldb, c + j, ldc);
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
