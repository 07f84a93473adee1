// 16-bit floats, rounded to nearest even as the hardware does.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulation {

inline float to_float(uint16_t bits, bool bfloat16) {
  if (bfloat16) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

inline uint16_t to_half(float value, bool bfloat16) {
  uint16_t bits;
  if (bfloat16) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (std::isnan(value)) return 0x7fff;
    bits = static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  } else {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(&bits, &half, 2);
  }
  return bits;
}

}  // namespace emulation
