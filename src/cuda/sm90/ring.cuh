// What producers and consumers count of the stages that go round between them.
#pragma once

#include <cstdint>

#include "../../ptx/warpgroup.cuh"

namespace flashsdpa {

// Position in a ring of stages: how many have been used. One register, where stage and phase would take two.
template <int kStages>
struct Ring {
  static_assert((kStages & (kStages - 1)) == 0, "the count wraps around");
  uint32_t count = 0;
  __device__ int stage() const { return count % kStages; }
  __device__ uint32_t phase() const { return count / kStages % 2; }  // parity of the barrier phase in use
  __device__ void advance() { ++count; }
};

// Stages are freed by each warp for itself: its share of a product being done says nothing of the other warps' shares.
constexpr int kWarpsPerGroup = ptx::kWarpgroupThreads / ptx::kWarpLanes;

}  // namespace flashsdpa
