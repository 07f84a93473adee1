// Rows of a tensor into a tile of the accumulation type, and back. Half types are widened here, once per tile.
#pragma once

#include "simd.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The type a storage type is computed in.
template <typename In>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <typename In>
using Accumulate = typename AccumulateOf<In>::type;

inline float bits_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bits_float(uint32_t(x.bits) << 16); }
inline float widen(Float16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;  // exponent and mantissa in float's place, bias 15
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  if ((x.bits & 0x7c00) == 0x7c00) return bits_float(sign | 0x7f800000u | magnitude);
  return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));
}

// Round to nearest even; NaN stays NaN.
inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }
inline void narrow(float x, BFloat16* out) {
  const uint32_t u = float_bits(x);
  out->bits = x != x ? uint16_t(0x7fc0) : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void narrow(float x, Float16* out) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = uint16_t((u >> 16) & 0x8000);
  const uint32_t magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000u) {
    out->bits = sign | 0x7e00;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    out->bits = sign | 0x7c00;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 rounds the mantissa at float16's subnormal step
    out->bits = sign | uint16_t(float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f));
  } else {
    out->bits = sign | uint16_t((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13);
  }
}

// kLanes consecutive elements.
inline Vec<float> widen_vector(const float* p) { return load(p); }
inline Vec<double> widen_vector(const double* p) { return load(p); }
typedef uint16_t HalfVec __attribute__((vector_size(kLanes<float> * 2)));
typedef uint32_t WordVec __attribute__((vector_size(kVectorBytes)));
inline Vec<float> widen_vector(const BFloat16* p) {
  // Named instructions: g++ 12 makes several of a conversion that doubles the width.
#if defined(__AVX512F__)
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Vec<float>)((WordVec)_mm512_maskz_cvtepu16_epi32(0xffff, half) << 16);
#elif defined(__AVX2__)
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Vec<float>)((WordVec)_mm256_cvtepu16_epi32(half) << 16);
#else
  HalfVec h;
  std::memcpy(&h, p, sizeof h);
  return (Vec<float>)(__builtin_convertvector(h, WordVec) << 16);
#endif
}
inline Vec<float> widen_vector(const Float16* p) {
#if defined(__AVX512F__)
  // Masked forms here, above and below: g++ 12 warns of an uninitialised operand inside the plain ones.
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = widen(p[i]);
  return v;
#endif
}

inline void narrow_vector(Vec<float> v, float* p) { store(p, v); }
inline void narrow_vector(Vec<double> v, double* p) { store(p, v); }
inline void narrow_vector(Vec<float> v, BFloat16* p) {
  const WordVec u = (WordVec)v;
  const WordVec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const WordVec quiet = WordVec{} + 0x7fc0;
  const HalfVec h = __builtin_convertvector(v != v ? quiet : rounded, HalfVec);
  std::memcpy(p, &h, sizeof h);
}
inline void narrow_vector(Vec<float> v, Float16* p) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) narrow(v[i], p + i);
#endif
}

// dst[0, cols) = src; dst is zeroed up to the next full vector, so that products over it stay clean.
template <typename In, typename T>
inline void load_row(T* dst, const In* src, int64_t cols) {
  int64_t c = 0;
  for (; c + kLanes<T> <= cols; c += kLanes<T>) store(dst + c, widen_vector(src + c));
  if (c < cols) {
    store(dst + c, Vec<T>{});
    for (; c < cols; ++c) dst[c] = widen(src[c]);
  }
}

// dst[0, cols) = src * factor, narrowed.
template <typename Out, typename T>
inline void store_row(Out* dst, const T* src, int64_t cols, T factor) {
  int64_t c = 0;
  for (; c + kLanes<T> <= cols; c += kLanes<T>) narrow_vector(load(src + c) * factor, dst + c);
  for (; c < cols; ++c) narrow(src[c] * factor, dst + c);
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
