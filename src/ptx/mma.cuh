// Products of one warp on its tensor cores, from registers.
//
// A lane's registers, with r = lane / 4 and c = lane % 4. Sums, 16 x 8: d[0], d[1] are (r, 2 c), (r, 2 c + 1); d[2], d[3] those of
// row r + 8: what a wgmma accumulator has for 8 columns.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

// 16 x 16 by 16 x 8 of 16-bit elements, added to d. A: a[0] is (r, 2 c), (r, 2 c + 1); a[1] of row r + 8; a[2], a[3] of columns
// + 8. B: b0 is rows 2 c, 2 c + 1 of column r; b1 rows + 8.
template <bool kBFloat16>
__device__ inline void mma_16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// D = A B + C, 16 x 8 by 8 x 8 in TF32, which is a float32 of which the 13 lowest bits of the mantissa are not looked at. A: a[i] is row
// r + 8 (i % 2), column c + 4 (i / 2). B: rows c and c + 4 of column r. Sums are rounded towards zero.
__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

}  // namespace flashsdpa::ptx
