// Single instructions on registers that CUDA C++ has no exact name for.
#pragma once

#include <cstdint>

namespace flashsdpa::ptx {

// 2^x, error about 2 units in the last place, denormals to zero; 2^-inf is 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, error 1 unit in the last place, denormals to zero.
__device__ inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x, brought between -limit and limit; NaN stays, which fminf would lose.
__device__ inline float clamp_keep(float x, float limit) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(limit));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-limit));
  return x;
}

// All 64 bits of a * b, in one instruction: of the plain product the assembler does not see that it needs no more.
__device__ inline uint64_t multiply_wide(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// The bitwise function of a, b and c that is kTable where they are kBitwiseA, kBitwiseB and kBitwiseC: one instruction, which
// the compiler does not take apart to share what it is made of.
constexpr uint32_t kBitwiseA = 0xf0, kBitwiseB = 0xcc, kBitwiseC = 0xaa;
template <uint8_t kTable>
__device__ inline uint32_t bitwise(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(bits) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return bits;
}

// Byte i of the result is the one that hex digit i of `selector` says: 0 to 3 of a, 4 to 7 of b; or, 8 more, its sign in all
// bits.
__device__ inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

// All ones where the floats are equal, else 0: one instruction, where a comparison and a choice are two.
__device__ inline uint32_t equal(float a, float b) {
  uint32_t mask;
  asm("set.eq.u32.f32 %0, %1, %2;" : "=r"(mask) : "f"(a), "f"(b));
  return mask;
}

// The same of each half of two pairs of 16-bit elements.
template <bool kBFloat16>
__device__ inline uint32_t equal_halves(uint32_t a, uint32_t b) {
  uint32_t mask;
  if constexpr (kBFloat16) {
    asm("set.eq.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  } else {
    asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(b));
  }
  return mask;
}

// a - b, where the compiler must not make it a multiply-add.
__device__ inline float subtract(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

// a * b, likewise.
__device__ inline float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

// The same pointer or word, which the compiler takes for another each time: what is made of it is made here, not before a loop,
// and not kept from an earlier time.
template <typename T>
__device__ inline T* anew(T* pointer) {
  asm volatile("" : "+l"(pointer)::"memory");
  return pointer;
}
__device__ inline uint32_t anew(uint32_t word) {
  asm volatile("" : "+r"(word)::"memory");
  return word;
}

// Two floats as a pair of 16-bit elements, rounded to nearest even; `low` in the lower half.
template <bool kBFloat16>
__device__ inline uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// A 16-bit element as a float.
template <bool kBFloat16>
__device__ inline float unpack(uint16_t element) {
  float value;
  if constexpr (kBFloat16) {
    asm("mov.b32 %0, {0, %1};" : "=f"(value) : "h"(element));
  } else {
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element));
  }
  return value;
}

// A pair of them, `low` from the lower half.
template <bool kBFloat16>
__device__ inline void unpack(uint32_t pair, float& low, float& high) {
  if constexpr (kBFloat16) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
  } else {
    low = unpack<false>(uint16_t(pair));
    high = unpack<false>(uint16_t(pair >> 16));
  }
}

}  // namespace flashsdpa::ptx
