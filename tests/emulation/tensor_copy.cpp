#include "tensor_copy.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstring>

namespace emulation {
namespace {

// What the emulated encoder leaves in a CUtensorMap.
struct Map {
  uint8_t* data;
  uint64_t sizes[kMaxRank], strides[kMaxRank];  // strides in bytes
  uint16_t box[kMaxRank];
  uint8_t rank, element_bytes, swizzle;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

Map read_map(const CUtensorMap* map) {
  Map m;
  std::memcpy(&m, map, sizeof m);
  if (m.rank == 0 || m.rank > kMaxRank) fail("a bulk copy through a tensor map that nobody encoded");
  return m;
}

uint32_t box_bytes(const Map& m) {
  uint32_t bytes = m.element_bytes;
  for (int axis = 0; axis < m.rank; ++axis) bytes *= m.box[axis];
  return bytes;
}

uint32_t swizzled(uint32_t address, int mode) {
  return mode == CU_TENSOR_MAP_SWIZZLE_NONE ? address : address ^ ((address >> 7) & ((1u << mode) - 1)) << 4;
}

// Calls visit(shared address, global address or null outside the tensor) for each element of a box.
template <typename Visit>
void for_each_element(const Map& m, uint32_t shared, const BoxPlace& at, const Visit& visit) {
  const uint32_t row_bytes = m.box[0] * m.element_bytes;
  uint32_t rows = 1;
  for (int axis = 1; axis < m.rank; ++axis) rows *= m.box[axis];
  for (uint32_t r = 0; r < rows; ++r) {
    uint8_t* row = m.data;
    bool inside = true;
    for (uint32_t axis = 1, rest = r; axis < m.rank; rest /= m.box[axis], ++axis) {
      const int64_t i = at[axis] + static_cast<int64_t>(rest % m.box[axis]);
      inside = inside && i >= 0 && i < static_cast<int64_t>(m.sizes[axis]);
      row += i * static_cast<int64_t>(m.strides[axis]);
    }
    for (uint32_t byte = 0; byte < row_bytes; byte += m.element_bytes) {
      const int64_t column = at[0] + static_cast<int64_t>(byte / m.element_bytes);
      const bool there = inside && column >= 0 && column < static_cast<int64_t>(m.sizes[0]);
      visit(swizzled(shared + r * row_bytes + byte, m.swizzle), there ? row + column * m.element_bytes : nullptr);
    }
  }
}

void check_shared(uint32_t shared, uint32_t align) {
  if (shared % align) fail("a bulk copy at shared memory address " + std::to_string(shared) + ", not a multiple of " + std::to_string(align));
}

void put(void* global, const void* source, uint32_t bytes, StoreKind kind) {
  if (kind == StoreKind::kWrite) {
    std::memcpy(global, source, bytes);
    return;
  }
  for (uint32_t byte = 0; byte < bytes; byte += 4) {
    float term, sum;
    std::memcpy(&term, static_cast<const uint8_t*>(source) + byte, 4);
    std::memcpy(&sum, static_cast<uint8_t*>(global) + byte, 4);
    sum += term;
    std::memcpy(static_cast<uint8_t*>(global) + byte, &sum, 4);
  }
}

void check_barrier(Block& block, uint32_t barrier) {
  if (!mbarrier(block, barrier).fenced) fail("a bulk copy at an mbarrier whose initialisation was not fenced");
}

template <typename Act>
void schedule_store(const Act& act) {
  const auto open = current().open_stores;
  ++*open;
  schedule([act, open] {
    act();
    --*open;
  });
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  Map m{};
  m.data = static_cast<uint8_t*>(data);
  m.rank = static_cast<uint8_t>(rank);
  m.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  m.swizzle = static_cast<uint8_t>(swizzle);
  bool valid = rank >= 1 && rank <= kMaxRank && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (uint32_t axis = 0; valid && axis < rank; ++axis) {
    m.sizes[axis] = sizes[axis];
    m.strides[axis] = axis == 0 ? m.element_bytes : strides[axis - 1];
    m.box[axis] = static_cast<uint16_t>(box[axis]);
    valid = sizes[axis] >= 1 && sizes[axis] <= uint64_t{1} << 32 && box[axis] >= 1 && box[axis] <= 256 &&
            element_strides[axis] == 1 && (axis == 0 || (m.strides[axis] % 16 == 0 && m.strides[axis] < uint64_t{1} << 40));
  }
  const uint32_t row_bytes = m.box[0] * m.element_bytes, span = 16u << swizzle;
  valid = valid && row_bytes % 16 == 0 && (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || row_bytes <= span);
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  *map = {};
  std::memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}

}  // namespace

void load_box(uint32_t shared, const CUtensorMap* map, const BoxPlace& at, uint32_t barrier) {
  const Map m = read_map(map);
  Block* block = current().block;
  check_shared(shared, 128);
  check_barrier(*block, barrier);
  schedule([=] {
    for_each_element(m, shared, at, [&](uint32_t address, const uint8_t* source) {
      uint8_t* target = shared_bytes(*block, address, m.element_bytes, true);
      if (source) {
        std::memcpy(target, source, m.element_bytes);
      } else {
        std::memset(target, 0, m.element_bytes);
      }
    });
    mbarrier_arrived(*block, barrier, 0, -static_cast<int64_t>(box_bytes(m)));
  });
}

void store_box(const CUtensorMap* map, uint32_t shared, const BoxPlace& at, StoreKind kind) {
  const Map m = read_map(map);
  Block* block = current().block;
  check_shared(shared, 128);
  schedule_store([=] {
    for_each_element(m, shared, at, [&](uint32_t address, uint8_t* target) {
      const uint8_t* source = shared_bytes(*block, address, m.element_bytes, true);
      if (target) put(target, source, m.element_bytes, kind);
    });
  });
}

void load_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  Block* block = current().block;
  check_shared(shared, 16);
  check_barrier(*block, barrier);
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) fail("a bulk copy that is not in units of 16 bytes");
  schedule([=] {
    std::memcpy(shared_bytes(*block, shared, bytes, true), global, bytes);
    mbarrier_arrived(*block, barrier, 0, -static_cast<int64_t>(bytes));
  });
}

void store_bytes(void* global, uint32_t shared, uint32_t bytes, StoreKind kind) {
  Block* block = current().block;
  check_shared(shared, 16);
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16) fail("a bulk copy that is not in units of 16 bytes");
  schedule_store([=] { put(global, shared_bytes(*block, shared, bytes, true), bytes, kind); });
}

void commit_stores() {
  Thread& thread = current();
  thread.store_groups.push_back(thread.open_stores);
  thread.open_stores = std::make_shared<int>(0);
}

void wait_for_stores(int pending_groups) {
  Thread& thread = current();
  if (*thread.open_stores) fail("a wait for bulk stores that were not committed");
  while (thread.store_groups.size() > static_cast<size_t>(pending_groups)) {
    const auto group = thread.store_groups.front();
    wait_until([&] { return *group == 0; }, "its bulk stores");
    thread.store_groups.pop_front();
  }
}

}  // namespace emulation

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = !std::strcmp(name, "cuTensorMapEncodeTiled");
  *function = known ? reinterpret_cast<void*>(&emulation::encode) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
