// The forward kernel's shared memory: where everything lies, and the barriers in it.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "fwd_tiles.h"
#include "ring.cuh"

namespace flashsdpa {

// Addresses of everything in shared memory.
template <typename Tile>
struct FwdShared {
  uint32_t base;
  __device__ uint32_t q(int consumer) const { return base + Tile::kQOffset + consumer * Tile::kQBytes; }
  __device__ uint32_t k(int stage) const { return base + Tile::kKOffset + stage * Tile::kKBytes; }
  __device__ uint32_t v(int stage) const { return base + Tile::kVOffset + stage * Tile::kVBytes; }
  __device__ uint32_t out(int consumer) const { return base + Tile::kOutOffset + consumer * Tile::kOutStride; }
  static constexpr int kOfK = 2 * Tile::kConsumers, kOfTiles = kOfK + 4 * Tile::kStages,
                       kOfWalk = kOfTiles + 2 * kTileSlots;  // first barriers
  __device__ uint32_t full_q(int consumer) const { return barrier(consumer); }
  __device__ uint32_t empty_q(int consumer) const { return barrier(Tile::kConsumers + consumer); }
  __device__ uint32_t full_k(int stage) const { return barrier(kOfK + stage); }
  __device__ uint32_t empty_k(int stage) const { return barrier(kOfK + Tile::kStages + stage); }
  __device__ uint32_t full_v(int stage) const { return barrier(kOfK + 2 * Tile::kStages + stage); }
  __device__ uint32_t empty_v(int stage) const { return barrier(kOfK + 3 * Tile::kStages + stage); }
  __device__ uint32_t full_tile(int slot) const { return barrier(kOfTiles + slot); }
  __device__ uint32_t empty_tile(int slot) const { return full_tile(kTileSlots + slot); }
  __device__ uint32_t full_walk(int slot) const { return barrier(kOfWalk + slot); }
  __device__ uint32_t empty_walk(int slot) const { return full_walk(kWalkSlots + slot); }
  __device__ uint32_t walk(int slot) const { return base + Tile::kWalkOffset + kTileSlotBytes * slot; }
  __device__ uint32_t walk_block(int slot) const { return walk(slot) + Tile::kTileBlockOffset; }
  __device__ uint32_t tile(int slot) const { return base + Tile::kTileOffset + kTileSlotBytes * slot; }
  __device__ uint32_t tile_block(int slot) const { return tile(slot) + Tile::kTileBlockOffset; }
  __device__ uint32_t block(int stage) const { return base + Tile::kBlockOffset + 4 * stage; }
  __device__ uint32_t mask(int consumer) const { return base + Tile::kMaskOffset + consumer * Tile::kMaskBytes; }
  __device__ uint32_t stream(int consumer) const { return base + Tile::kStreamOffset + consumer * Tile::kStreamBytes; }
  __device__ uint32_t barrier(int i) const { return base + Tile::kBarrierOffset + 8 * i; }
};

template <typename Tile>
__device__ inline void fwd_init_barriers(const FwdShared<Tile>& shared) {
  for (int c = 0; c < Tile::kConsumers; ++c) {
    ptx::mbarrier_init(shared.full_q(c), 1);
    ptx::mbarrier_init(shared.empty_q(c), Tile::kOwnOut ? kWarpsPerGroup : 1);
  }
  for (int s = 0; s < Tile::kStages; ++s) {
    ptx::mbarrier_init(shared.full_k(s), 1);
    ptx::mbarrier_init(shared.full_v(s), 1);
    ptx::mbarrier_init(shared.empty_k(s), Tile::kConsumers * kWarpsPerGroup);
    ptx::mbarrier_init(shared.empty_v(s), Tile::kConsumers * kWarpsPerGroup);
  }
  for (int slot = 0; slot < kTileSlots; ++slot) {
    ptx::mbarrier_init(shared.full_tile(slot), 1);
    ptx::mbarrier_init(shared.empty_tile(slot), Tile::kConsumers * kWarpsPerGroup);
  }
  for (int slot = 0; Tile::kMasked && slot < kWalkSlots; ++slot) {
    ptx::mbarrier_init(shared.full_walk(slot), 1);
    ptx::mbarrier_init(shared.empty_walk(slot), 1);
  }
  ptx::mbarrier_init_fence();
}

}  // namespace flashsdpa
