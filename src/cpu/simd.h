// Vectors of the instruction set this file is compiled for, as GCC vector extensions: one source for every set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kGemmRows = 6, kGemmVecs = 4;  // of one micro-tile: accumulators and operands fit the register file
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kGemmRows = 6, kGemmVecs = 2;
#else
constexpr int kVectorBytes = 16;
constexpr int kGemmRows = 6, kGemmVecs = 2;
#endif

template <typename T>
struct SimdOf;
template <>
struct SimdOf<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Lane;
  typedef Lane Int __attribute__((vector_size(kVectorBytes)));
};
template <>
struct SimdOf<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Lane;
  typedef Lane Int __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vec = typename SimdOf<T>::Vec;
template <typename T>
using IntVec = typename SimdOf<T>::Int;
template <typename T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <typename T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename T>
inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}
template <typename T>
inline Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// The product, rounded: the compiler may not fuse it with what follows.
template <typename T>
inline Vec<T> rounded(Vec<T> x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// NaN in `b` is kept (the comparison is false): exp keeps NaN so; the row maximum passes over NaN in `a`.
template <typename V>
inline V max_keep(V a, V b) {
  return a > b ? a : b;
}

// Whether any bit of a comparison is set.
template <typename V>
inline bool any(V mask) {
  uint64_t words[sizeof(V) / 8], all = 0;
  std::memcpy(words, &mask, sizeof mask);
  for (uint64_t w : words) all |= w;
  return all != 0;
}

// exp(x) for x <= 0 (a score minus its row's maximum); exp(0) is exactly 1, NaN stays NaN, -inf gives 0, and so does
// anything whose result would be subnormal. x = n ln2 + r with |r| <= ln2/2; ln2 in two parts keeps r exact.
inline Vec<float> exp_nonpositive(Vec<float> x) {
  constexpr float kShift = 12582912.0f + 127.0f;  // 1.5 * 2^23: n + 127 lands in the low mantissa bits
  x = max_keep(splat(-88.0f), x);                 // n = -127 there, whose exponent field is that of 0
  const Vec<float> t = x * 1.44269504088896341f + kShift;
  const Vec<float> n = t - kShift;
  const Vec<float> r = x - n * 0.693359375f + n * 2.12194440e-4f;
  // Minimax for the relative error on |r| <= ln2/2 with the constant fixed at 1: 2e-9.
  Vec<float> p = r * 1.3843466e-3f + 8.3743166e-3f;
  p = p * r + 4.1668013e-2f;
  p = p * r + 1.6666429e-1f;
  p = p * r + 4.9999994e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * (Vec<float>)((IntVec<float>)t << 23);
}
inline Vec<double> exp_nonpositive(Vec<double> x) {
  constexpr double kShift = 6755399441055744.0 + 1023.0;  // 1.5 * 2^52
  x = max_keep(splat(-709.0), x);
  const Vec<double> t = x * 1.4426950408889634074 + kShift;
  const Vec<double> n = t - kShift;
  const Vec<double> r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
  Vec<double> p = splat(1.0 / 6227020800.0);
  constexpr double kInverseFactorial[] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
      1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  for (double c : kInverseFactorial) p = p * r + c;
  return p * (Vec<double>)((IntVec<double>)t << 52);
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
