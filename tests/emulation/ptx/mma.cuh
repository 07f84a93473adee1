// Emulated src/ptx/mma.cuh.
#pragma once

#include "../../emulation/device.h"
#include "arithmetic.cuh"

namespace flashsdpa::ptx {

template <bool kBFloat16>
void mma_16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  std::array<uint64_t, emulation::kWarp> fragment[6];
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int i = 0; i < 6; ++i) fragment[i] = emulation::gather(0xffffffffu, words[i]);
  const auto element = [&](int i, int lane, int half) {
    return static_cast<double>(unpack<kBFloat16>(static_cast<uint16_t>(fragment[i][static_cast<size_t>(lane)] >> 16 * half)));
  };
  const int row = lane_of_thread() / 4, column = lane_of_thread() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {  // row k of B, column k of A: half k % 2 of lane k % 8 / 2 of a row's four
      const int lane = k % 8 / 2;
      sum += element(k / 8 * 2 + i / 2, 4 * row + lane, k % 2) * element(4 + k / 8, 4 * (column + i % 2) + lane, k % 2);
    }
    d[i] = static_cast<float>(sum);
  }
}

inline float as_tf32(uint32_t bits) { return __uint_as_float(bits & ~0x1fffu); }

// To the float that is nearest on the side of zero.
inline float toward_zero(double sum) {
  const float rounded = static_cast<float>(sum);
  return std::fabs(static_cast<double>(rounded)) > std::fabs(sum) ? std::nextafterf(rounded, 0.f) : rounded;
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  emulation::Thread& thread = emulation::current();
  emulation::Warp& warp = thread.block->warps[static_cast<size_t>(thread.index / emulation::kWarp)];
  auto& operands = warp.operands[warp.exchanges % 2];
  const int lane = lane_of_thread();
  operands[static_cast<size_t>(lane)] = {a[0], a[1], a[2], a[3], b0, b1};
  emulation::gather(0xffffffffu, 0);
  const auto operand = [&](int of, int i) { return as_tf32(operands[static_cast<size_t>(of)][static_cast<size_t>(i)]); };
  float result[4];
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = 2 * (lane % 4) + i % 2;
    double sum = c[i];
    for (int k = 0; k < 8; ++k) {
      const float x = operand(4 * row + k % 4, i / 2 + k / 4 * 2), y = operand(4 * column + k % 4, 4 + k / 4);
      sum += static_cast<double>(x) * y;
    }
    result[i] = toward_zero(sum);
  }
  std::copy_n(result, 4, d);
}

}  // namespace flashsdpa::ptx
