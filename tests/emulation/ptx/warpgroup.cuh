// Emulated src/ptx/warpgroup.cuh.
#pragma once

#include "../../emulation/device.h"

namespace flashsdpa::ptx {

constexpr int kWarpLanes = emulation::kWarp;
constexpr int kWarpgroupThreads = emulation::kWarpgroup;

template <int>
void registers_give() {}
template <int>
void registers_take() {}

inline void barrier_sync(int id, int threads) { emulation::barrier_sync(id, threads); }
inline void barrier_arrive(int id, int threads) { emulation::barrier_arrive(id, threads); }
inline void fence_proxy_shared() { emulation::fence_proxy(); }

template <int kWords>
void store_words(uint32_t shared, const uint32_t (&words)[kWords]) {
  if (shared % sizeof words) emulation::fail("a store at a misaligned shared memory address");
  std::memcpy(emulation::shared_bytes(*emulation::current().block, shared, sizeof words, false), words, sizeof words);
  emulation::wrote_shared(shared, sizeof words);
}
inline void store_shared_16(uint32_t shared, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  store_words<4>(shared, {x, y, z, w});
}
inline void store_shared_8(uint32_t shared, uint32_t x, uint32_t y) { store_words<2>(shared, {x, y}); }
inline void store_shared_4(uint32_t shared, uint32_t x) { store_words<1>(shared, {x}); }
inline uint32_t load_shared_4(uint32_t shared) {
  uint32_t x;
  if (shared % 4) emulation::fail("a load at a misaligned shared memory address");
  std::memcpy(&x, emulation::shared_bytes(*emulation::current().block, shared, 4, false), 4);
  return x;
}

inline uint2 load_shared_8(uint32_t shared) {
  if (shared % 8) emulation::fail("a load at a misaligned shared memory address");
  return {load_shared_4(shared), load_shared_4(shared + 4)};
}
inline void store_shared_floats(uint32_t shared, float x, float y, float z, float w) {
  store_words<4>(shared, {__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w)});
}
inline float load_shared_float(uint32_t shared) { return __uint_as_float(load_shared_4(shared)); }
inline void load_shared_floats(uint32_t shared, float& x, float& y) {
  if (shared % 8) emulation::fail("a load at a misaligned shared memory address");
  x = load_shared_float(shared);
  y = load_shared_float(shared + 4);
}
inline void load_shared_floats(uint32_t shared, float& x, float& y, float& z, float& w) {
  if (shared % 16) emulation::fail("a load at a misaligned shared memory address");
  load_shared_floats(shared, x, y);
  load_shared_floats(shared + 8, z, w);
}

inline void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t words[4] = {r0, r1, r2, r3};
  const int lane = lane_of_thread();
  for (int tile = 0; tile < 4; ++tile) {
    const uint32_t row = __shfl_sync(0xffffffffu, shared, 8 * tile + lane / 4);
    store_shared_4(row + 4 * static_cast<uint32_t>(lane % 4), words[tile]);
  }
}

inline void stmatrix_x4_transposed(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t words[4] = {r0, r1, r2, r3};
  const int lane = lane_of_thread();
  for (int tile = 0; tile < 4; ++tile) {
    for (int half = 0; half < 2; ++half) {  // the element of column 2 * (lane % 4) + half goes to that row, place lane / 4
      const uint32_t row = __shfl_sync(0xffffffffu, shared, 8 * tile + 2 * (lane % 4) + half);
      const uint16_t element = static_cast<uint16_t>(words[tile] >> 16 * half);
      std::memcpy(emulation::shared_bytes(*emulation::current().block, row + 2 * static_cast<uint32_t>(lane / 4), 2, false), &element, 2);
      emulation::wrote_shared(row + 2 * static_cast<uint32_t>(lane / 4), 2);
    }
  }
}

template <bool kTransposed>
void ldmatrix_x4(uint32_t shared, uint32_t (&r)[4]) {
  const int lane = lane_of_thread();
  if (shared % 16) emulation::fail("a load at a misaligned shared memory address");
  for (int tile = 0; tile < 4; ++tile) {
    r[tile] = 0;
    for (int half = 0; half < 2; ++half) {
      const int along = 2 * (lane % 4) + half, across = lane / 4;
      const uint32_t row = __shfl_sync(0xffffffffu, shared, 8 * tile + (kTransposed ? along : across));
      const uint32_t at = row + 2 * static_cast<uint32_t>(kTransposed ? across : along);
      uint16_t element;
      std::memcpy(&element, emulation::shared_bytes(*emulation::current().block, at, 2, false), 2);
      r[tile] |= static_cast<uint32_t>(element) << 16 * half;
    }
  }
}

}  // namespace flashsdpa::ptx
