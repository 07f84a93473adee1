// Products of one warp, from registers: 16 rows of A by 8 columns of B, added to 16 x 8 floats.
//
// A lane's registers, with r = lane / 4 and c = 2 * (lane % 4):
//   A, 16 x 16: a[0] (r, c), (r, c + 1); a[1] the same of row r + 8; a[2], a[3] of columns + 8
//   B, 16 x 8:  b0 rows c, c + 1 of column r; b1 rows c + 8, c + 9
//   sums:       d[0], d[1] (r, c), (r, c + 1); d[2], d[3] of row r + 8: what a wgmma accumulator has for 8 columns
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

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

}  // namespace flashsdpa::ptx
