// The bulk copy engine: boxes of a tensor between global and shared memory, at a random later moment.
#pragma once

#include <cuda.h>

#include <array>

#include "machine.h"

namespace emulation {

constexpr int kMaxRank = 5;
using BoxPlace = std::array<int32_t, kMaxRank>;  // innermost first; unused axes are 0

enum class StoreKind { kWrite, kAddFloat };

void load_box(uint32_t shared, const CUtensorMap* map, const BoxPlace& at, uint32_t barrier);
void store_box(const CUtensorMap* map, uint32_t shared, const BoxPlace& at, StoreKind kind);
// Contiguous bytes, multiples of 16.
void load_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier);
void store_bytes(void* global, uint32_t shared, uint32_t bytes, StoreKind kind);
void commit_stores();
void wait_for_stores(int pending_groups);  // of this thread; until they have read their shared memory

}  // namespace emulation
