// Emulated src/ptx/global.cuh: what one thread writes, all others see.
#pragma once

#include "../../emulation/device.h"

namespace flashsdpa::ptx {

inline void reduce_add_floats(float* global, float x, float y, float z, float w) {
  if (reinterpret_cast<uintptr_t>(global) % 16) emulation::fail("a reduction at a misaligned global memory address");
  const float terms[4] = {x, y, z, w};
  for (int i = 0; i < 4; ++i) global[i] += terms[i];
}
inline uint32_t load_acquire(const uint32_t* global) {
  emulation::yield();  // whoever asks again and again must let the others run
  return *global;
}
inline void add_release(uint32_t* global, uint32_t value) { *global += value; }
inline void fence_proxy() { emulation::fence_proxy(); }

}  // namespace flashsdpa::ptx
