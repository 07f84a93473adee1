// Emulated src/ptx/arithmetic.cuh.
#pragma once

#include "../../emulation/device.h"
#include "../../emulation/half.h"

namespace flashsdpa::ptx {

inline float subtract(float a, float b) {
  volatile float rounded = a;  // the host compiler makes multiply-adds too
  return rounded - b;
}
inline float multiply(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline uint64_t multiply_wide(uint32_t a, uint32_t b) { return uint64_t{a} * b; }
constexpr uint32_t kBitwiseA = 0xf0, kBitwiseB = 0xcc, kBitwiseC = 0xaa;
template <uint8_t kTable>
uint32_t bitwise(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (kTable >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1u) << i;
  return bits;
}
inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = a | uint64_t{b} << 32;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 15, byte = static_cast<uint32_t>(both >> (digit & 7) * 8 & 0xff);
    bytes |= (digit < 8 ? byte : (byte >> 7) * 0xff) << 8 * i;
  }
  return bytes;
}
template <bool kBFloat16>
float unpack(uint16_t element) {
  return emulation::to_float(element, kBFloat16);
}
template <bool kBFloat16>
void unpack(uint32_t pair, float& low, float& high) {
  low = unpack<kBFloat16>(static_cast<uint16_t>(pair));
  high = unpack<kBFloat16>(static_cast<uint16_t>(pair >> 16));
}

inline uint32_t equal(float a, float b) { return a == b ? 0xffffffffu : 0; }
template <bool kBFloat16>
uint32_t equal_halves(uint32_t a, uint32_t b) {
  float a_low, a_high, b_low, b_high;
  unpack<kBFloat16>(a, a_low, a_high);
  unpack<kBFloat16>(b, b_low, b_high);
  return (a_low == b_low ? 0xffffu : 0) | (a_high == b_high ? 0xffff0000u : 0);
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1.f / x; }
inline float clamp_keep(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

template <typename T>
T anew(T value) {
  return value;
}

template <bool kBFloat16>
uint32_t pack(float low, float high) {
  return emulation::to_half(low, kBFloat16) | static_cast<uint32_t>(emulation::to_half(high, kBFloat16)) << 16;
}

}  // namespace flashsdpa::ptx
