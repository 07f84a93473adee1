// Emulated src/ptx/tma.cuh.
#pragma once

#include "../../emulation/device.h"
#include "../../emulation/tensor_copy.h"

namespace flashsdpa::ptx {

struct BoxOrigin {
  int32_t column, row, head, batch;
};

struct PackedBoxOrigin {
  int32_t column, head_in_group, row, group, batch;
  PackedBoxOrigin(int column, int head_in_group, int row, int group, int batch)
      : column(column), head_in_group(head_in_group), row(row), group(group), batch(batch) {}
};

enum class Reuse { kNone, kSoon };
template <Reuse>
uint64_t cache_policy() {
  return 0;
}

inline void tma_load(uint32_t shared, const CUtensorMap* map, BoxOrigin at, uint32_t barrier, uint64_t) {
  emulation::load_box(shared, map, {at.column, at.row, at.head, at.batch}, barrier);
}
inline void tma_load(uint32_t shared, const CUtensorMap* map, PackedBoxOrigin at, uint32_t barrier, uint64_t) {
  emulation::load_box(shared, map, {at.column, at.head_in_group, at.row, at.group, at.batch}, barrier);
}
inline void tma_prefetch(const CUtensorMap*, BoxOrigin) {}
inline void tma_store(const CUtensorMap* map, uint32_t shared, BoxOrigin at) {
  emulation::store_box(map, shared, {at.column, at.row, at.head, at.batch}, emulation::StoreKind::kWrite);
}
inline void tma_store(const CUtensorMap* map, uint32_t shared, PackedBoxOrigin at) {
  emulation::store_box(map, shared, {at.column, at.head_in_group, at.row, at.group, at.batch},
                       emulation::StoreKind::kWrite);
}
inline void tma_store_commit() { emulation::commit_stores(); }
template <int kPending = 0>
inline void tma_store_wait_read() {
  emulation::wait_for_stores(kPending);
}
template <int kPending = 0>
inline void tma_store_wait() {
  emulation::wait_for_stores(kPending);  // here, stores are done when they have read
}
inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  emulation::load_bytes(shared, global, bytes, barrier);
}
inline void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
  emulation::store_bytes(global, shared, bytes, emulation::StoreKind::kAddFloat);
}
inline void tma_prefetch_map(const CUtensorMap*) {}

}  // namespace flashsdpa::ptx
