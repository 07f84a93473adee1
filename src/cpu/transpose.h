// 8 x 8 transposes in registers: Q, dO and masks lie with their rows in memory, score tiles with their keys (S^T).
#pragma once

#include "convert.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

template <typename T>
struct OctetOf {
  typedef T Vec __attribute__((vector_size(8 * sizeof(T))));
};
template <typename T>
using Octet = typename OctetOf<T>::Vec;

template <typename T>
inline Octet<T> load8(const T* p) {
  Octet<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename T>
inline void store8(T* p, const Octet<T>& v) {
  std::memcpy(p, &v, sizeof v);
}

// x[i][j] becomes x[j][i]: pairs, then quads, then halves.
template <typename V>
inline void transpose8(V (&x)[8]) {
  V t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    u[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    u[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    u[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    u[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = __builtin_shufflevector(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = __builtin_shufflevector(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Eight consecutive elements, widened.
inline Octet<float> octet(const float* p) { return load8(p); }
inline Octet<double> octet(const double* p) { return load8(p); }
inline Octet<float> octet(const BFloat16* p) {
  typedef uint32_t Word __attribute__((vector_size(32)));
#if defined(__AVX2__)
  return (Octet<float>)((Word)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) << 16);
#else
  typedef uint16_t Half __attribute__((vector_size(16)));
  Half h;
  std::memcpy(&h, p, sizeof h);
  return (Octet<float>)(__builtin_convertvector(h, Word) << 16);
#endif
}
inline Octet<float> octet(const Float16* p) {
#if defined(__F16C__)
  return (Octet<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Octet<float> v;
  for (int i = 0; i < 8; ++i) v[i] = widen(p[i]);
  return v;
#endif
}
// `count` (1 to 8) elements `step` apart, as an octet whose rest is zero (bias: neutral).
template <typename In>
inline auto octet(const In* p, int64_t step, int count) {
  if (step == 1 && count >= 8) return octet(p);
  decltype(octet(p)) v{};
  for (int i = 0; i < count && i < 8; ++i) v[i] = widen(p[i * step]);
  return v;
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
