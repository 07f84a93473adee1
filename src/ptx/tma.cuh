// The bulk tensor copy engine (TMA): boxes of a tensor to and from shared memory, one thread issuing for all.
// Elements outside the tensor read as zero and are not written, so ragged edges need no code.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashsdpa::ptx {

// Where a box starts: column, row, head, batch.
struct BoxOrigin {
  int32_t column, row, head, batch;
};
// The same for a map whose heads come in groups, the heads of a group side by side under each row.
struct PackedBoxOrigin {
  int32_t column, head_in_group, row, group, batch;
  __host__ __device__ PackedBoxOrigin(int column, int head_in_group, int row, int group, int batch)
      : column(column), head_in_group(head_in_group), row(row), group(group), batch(batch) {}  // {c, r, h, b}: a BoxOrigin
};

// Whether other blocks will read the same bytes soon: what the L2 cache should keep, and what it should give up first.
enum class Reuse { kNone, kSoon };

template <Reuse kReuse>
__device__ inline uint64_t cache_policy() {
  uint64_t policy;
  if constexpr (kReuse == Reuse::kSoon) {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

__device__ inline void tma_load(uint32_t shared, const CUtensorMap* map, BoxOrigin at, uint32_t barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "l"(policy)
      : "memory");
}

__device__ inline void tma_load(uint32_t shared, const CUtensorMap* map, PackedBoxOrigin at, uint32_t barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.column), "r"(at.head_in_group), "r"(at.row), "r"(at.group), "r"(at.batch),
      "l"(policy)
      : "memory");
}

// Asks for a box to be in the L2 cache; nobody waits for it.
__device__ inline void tma_prefetch(const CUtensorMap* map, BoxOrigin at) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(at.column), "r"(at.row),
               "r"(at.head), "r"(at.batch)
               : "memory");
}

__device__ inline void tma_store(const CUtensorMap* map, uint32_t shared, BoxOrigin at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}

__device__ inline void tma_store(const CUtensorMap* map, uint32_t shared, PackedBoxOrigin at) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(shared), "r"(at.column), "r"(at.head_in_group), "r"(at.row), "r"(at.group), "r"(at.batch)
               : "memory");
}

__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// `bytes`, a multiple of 16, from global to shared memory, both aligned to 16 bytes.
__device__ inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Adds `bytes` of floats in shared memory to those in global memory, each by one atomic addition; a multiple of 16, both
// aligned to 16 bytes. Committed and waited for like a store.
__device__ inline void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

// Until all stores of this thread have read their shared memory, which may then be written again.
template <int kPending = 0>
__device__ inline void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all but the last kPending groups of this thread's stores are done, which makes what they wrote visible to it.
template <int kPending = 0>
__device__ inline void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace flashsdpa::ptx
