// Emulated src/ptx/mma.cuh.
#pragma once

#include "../../emulation/device.h"

namespace flashsdpa::ptx {

inline float as_tf32(uint32_t bits) { return __uint_as_float(bits & ~0x1fffu); }

// To the float that is nearest on the side of zero.
inline float toward_zero(double sum) {
  const float rounded = static_cast<float>(sum);
  return std::fabs(static_cast<double>(rounded)) > std::fabs(sum) ? std::nextafterf(rounded, 0.f) : rounded;
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  constexpr uint32_t kAll = 0xffffffffu;
  const auto words = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  const auto all_b = emulation::gather(kAll, words(b0, b1));
  const auto all_low = emulation::gather(kAll, words(a[0], a[1]));   // rows l / 4 and l / 4 + 8
  const auto all_high = emulation::gather(kAll, words(a[2], a[3]));  // four columns on
  const int lane = lane_of_thread();
  float result[4];
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = 2 * (lane % 4) + i % 2;
    double sum = c[i];
    for (int k = 0; k < 8; ++k) {
      const uint64_t from_a = (k < 4 ? all_low : all_high)[static_cast<size_t>(4 * row + k % 4)];
      const uint64_t from_b = all_b[static_cast<size_t>(4 * column + k % 4)];
      const float x = as_tf32(static_cast<uint32_t>(i / 2 ? from_a >> 32 : from_a));
      const float y = as_tf32(static_cast<uint32_t>(k < 4 ? from_b : from_b >> 32));
      sum += static_cast<double>(x) * y;
    }
    result[i] = toward_zero(sum);
  }
  std::copy_n(result, 4, d);
}

}  // namespace flashsdpa::ptx
