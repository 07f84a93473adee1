// CUDA C++ as our kernels use it, for a host compiler: read before every source.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine.h"

#define __device__
#define __host__
#define __global__
#define __shared__ static  // one for all blocks: kernels that use it run one block at a time
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

inline emulation::Index threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

struct dim3 : emulation::Index {
  dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : Index{x, y, z} {}
};

// What kernel<<<grid, block, shared_bytes, stream>>>(arguments) becomes: launch(kernel, ...)(arguments).
template <typename... Parameters>
auto launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, const void* = nullptr) {
  return [=](const auto&... arguments) {
    emulation::run_grid(grid, block, static_cast<uint32_t>(shared_bytes), [=] { kernel(arguments...); }, /*behind=*/false);
  };
}

struct ulonglong2 {
  unsigned long long x, y;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

using std::max;
using std::min;

template <typename T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <typename T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

inline int lane_of_thread() { return static_cast<int>(threadIdx.x) % emulation::kWarp; }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane) {
  return from_word<T>(emulation::exchange(mask, to_word(value), lane % emulation::kWarp));
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return __shfl_sync(mask, value, lane_of_thread() ^ bits);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, int step) {
  const int lane = lane_of_thread();
  return __shfl_sync(mask, value, lane + step < emulation::kWarp ? lane + step : lane);
}
inline uint32_t __ballot_sync(uint32_t mask, bool vote) {
  const auto& votes = emulation::gather(mask, vote);
  uint32_t ballot = 0;
  for (int lane = 0; lane < emulation::kWarp; ++lane) ballot |= (mask >> lane & 1 && votes[lane]) ? 1u << lane : 0u;
  return ballot;
}
inline bool __all_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
inline bool __any_sync(uint32_t mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { emulation::gather(mask, 0); }
inline void __syncthreads() { emulation::barrier_sync(0, static_cast<int>(blockDim.x)); }

inline void __nanosleep(uint32_t) { emulation::yield(); }

template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline uint32_t __float_as_uint(float x) { return from_word<uint32_t>(to_word(x)); }
inline float __uint_as_float(uint32_t x) { return from_word<float>(x); }
inline float __int_as_float(int x) { return from_word<float>(to_word(x)); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
  return sum;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) << shift % 32 >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> shift % 32);
}
inline int __ffs(int x) { return __builtin_ffs(x); }
