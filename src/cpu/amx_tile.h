// C (+)= A B on AMX: bfloat16 operands, float accumulation, 32 x 32 of C at a time (four of the eight tiles).
//
//   A: rows x depth bfloat16, row stride lda elements
//   B: depth/2 rows of pairs: element (k, n) at b[(k / 2 * ldb + n) * 2 + k % 2], as TDPBF16PS wants it
//   C: rows x cols float
// rows, cols and depth are multiples of 32; the operands are padded with zeros.
#pragma once

#include "convert.h"

#if defined(__AMX_BF16__)

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// The intrinsics of g++ 12 do not tell the compiler that tile loads and the configuration read memory: stores to an
// operand could move past them. These do.
#if !defined(FLASHSDPA_AMX_EMULATION)
template <int kTileNumber>
inline void tile_load(const void* p, int64_t row_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTileNumber), "r"(p), "r"(row_bytes) : "memory");
}
template <int kTileNumber>
inline void tile_store(void* p, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTileNumber), "r"(p), "r"(row_bytes) : "memory");
}
template <int kTileNumber>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTileNumber));
}
template <int kC, int kA, int kB>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
inline void tile_configure(const void* config) {
  asm volatile("ldtilecfg %0" ::"m"(*static_cast<const char(*)[64]>(config)));
}
inline void tile_release() { asm volatile("tilerelease"); }
#endif

constexpr int kAmxBlock = 32;
inline int64_t amx_padded(int64_t size) { return (size + kAmxBlock - 1) / kAmxBlock * kAmxBlock; }

// Eight tiles of 16 rows x 64 bytes for this thread; released when the scope ends.
class AmxTiles {
 public:
  AmxTiles() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    tile_configure(&config);
  }
  ~AmxTiles() { tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

template <bool kAccumulate>
inline void amx_gemm(int64_t rows, int64_t cols, int64_t depth, const BFloat16* a, int64_t lda, const BFloat16* b,
                     int64_t ldb, float* c, int64_t ldc) {
  const int64_t a_bytes = lda * 2, b_bytes = ldb * 4, c_bytes = ldc * 4;
  for (int64_t j = 0; j < cols; j += kAmxBlock)
    for (int64_t i = 0; i < rows; i += kAmxBlock) {
      float* c00 = c + i * ldc + j;
      float* c10 = c00 + 16 * ldc;
      if (kAccumulate) {
        tile_load<0>(c00, c_bytes);
        tile_load<1>(c00 + 16, c_bytes);
        tile_load<2>(c10, c_bytes);
        tile_load<3>(c10 + 16, c_bytes);
      } else {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
      }
      for (int64_t k = 0; k < depth; k += kAmxBlock) {
        const BFloat16* a0 = a + i * lda + k;
        const BFloat16* b0 = b + (k / 2 * ldb + j) * 2;
        tile_load<4>(a0, a_bytes);
        tile_load<6>(b0, b_bytes);
        tile_load<5>(a0 + 16 * lda, a_bytes);
        tile_load<7>(b0 + 32, b_bytes);
        tile_multiply<0, 4, 6>();
        tile_multiply<2, 5, 6>();
        tile_multiply<1, 4, 7>();
        tile_multiply<3, 5, 7>();
      }
      tile_store<0>(c00, c_bytes);
      tile_store<1>(c00 + 16, c_bytes);
      tile_store<2>(c10, c_bytes);
      tile_store<3>(c10 + 16, c_bytes);
    }
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE

#endif
