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

}  // namespace flashsdpa::ptx
