// Products of one warp on its tensor cores, from registers: D (16 x 8, float32) = A (16 x 8) * B (8 x 8) + C, in TF32.
//
// TF32 is a float32 of which the 13 lowest bits of the mantissa are not looked at. Of lane l: D and C hold rows l / 4 and
// l / 4 + 8 (i / 2), columns 2 * (l % 4) + i % 2; A the same rows (i % 2), columns l % 4 + 4 * (i / 2); B rows l % 4
// and l % 4 + 4, column l / 4. Sums are rounded towards zero.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

}  // namespace flashsdpa::ptx
