// Small kernels with one fault each, for tests/test_emulated_ptx.py. Prints what the emulator says of the fault named.
#include <cstdio>
#include <string>

#include "src/ptx/mbarrier.cuh"
#include "src/ptx/tensor_map.h"
#include "src/ptx/tma.cuh"
#include "src/ptx/warpgroup.cuh"
#include "src/ptx/wgmma.cuh"

using namespace flashsdpa::ptx;

constexpr int kShared = 64 * 1024;

enum class Fault {
  kNone, kDeadlock, kArrivals, kUninitialised, kOutside, kUnfencedStore, kUnfencedProduct, kUncommitted, kNoProductFence,
  kCounts, kOrder,
};

// One box of 64 x 64 in, a product with itself, and out again; every step right but for the fault.
__global__ void square(Fault fault, const __grid_constant__ CUtensorMap map, const __grid_constant__ CUtensorMap map_out) {
  const uint32_t barrier = shared_address(nullptr), tile = (barrier + 8 + 1023) & ~1023u, out = tile + 64 * 128;
  const bool first = threadIdx.x == 0;
  if (first) {
    mbarrier_init(barrier, 1);
    if (fault != Fault::kUninitialised) mbarrier_init_fence();
    if (fault != Fault::kDeadlock) mbarrier_arrive_expect(barrier, 64 * 128);
    if (fault == Fault::kArrivals) mbarrier_arrive(barrier);
    tma_load(tile, &map, {0, 0, 0, 0}, barrier, 0);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  if (fault == Fault::kUnfencedProduct) store_shared_4(tile + 4 * threadIdx.x, 0);
  if (fault == Fault::kOutside) store_shared_4(barrier + kShared, 0);
  float d[32], e[32];
  if (fault != Fault::kNoProductFence) wgmma_fence();
  const bool swap = fault == Fault::kOrder && threadIdx.x >= 64;
  for (int turn = 0; turn < 2; ++turn) {
    Wgmma<64>::ss<true, 0>((turn == 0) != swap ? d : e, wgmma_operand(tile), wgmma_operand(tile), swap != (turn > 0) ? 1 : 0);
  }
  if (fault != Fault::kUncommitted) wgmma_commit();
  wgmma_wait<0>();
  const uint32_t row = out + threadIdx.x / 2 * 128 + threadIdx.x % 2 * 64;
  for (int i = 0; i < 16; ++i) store_shared_4(row + 4 * i, __float_as_uint(d[i]));
  if (fault != Fault::kUnfencedStore) fence_proxy_shared();
  barrier_sync(1, fault == Fault::kCounts && threadIdx.x < 32 ? 96 : 128);
  if (first) {
    tma_store(&map_out, out, {0, 0, 0, 0});
    tma_store_commit();
    tma_store_wait_read();
  }
}

int main(int, char** arguments) {
  alignas(128) static uint16_t data[64 * 64], result[64 * 64];
  CUtensorMap map, map_out;
  encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {data, 64, 64, 1, 1, 128, 16, 16, 64});
  encode_tensor_map(&map_out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, {result, 64, 64, 1, 1, 128, 16, 16, 64});
  square<<<1, 128, kShared>>>(static_cast<Fault>(std::stoi(arguments[1])), map, map_out);
  std::printf("%s\n", cudaGetErrorString(cudaGetLastError()));
}
