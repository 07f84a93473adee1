// Host: tensor maps for TMA. The encoder is a driver function; it is found at run time, so that libcuda is not linked.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashsdpa::ptx {

// A tensor (batch, head, row, column) of 16-bit elements with unit column stride, cut into boxes of `box_rows` rows of
// 64 columns with the 128-byte swizzle. Strides in bytes, multiples of 16.
struct TensorMapShape {
  const void* data;
  uint64_t columns, rows, heads, batch;
  uint64_t row_bytes, head_bytes, batch_bytes;
  uint32_t box_rows;
};

// The same tensor with its heads in groups of `group`: (batch, group, row, head in group, column). A box holds, for
// each of `box_rows` rows, `box_heads` heads of a group, 64 columns each.
struct PackedMapShape {
  TensorMapShape tensor;
  uint64_t group;
  uint32_t box_heads;
  PackedMapShape(const TensorMapShape& tensor, uint64_t group, uint32_t box_heads)
      : tensor(tensor), group(group), box_heads(box_heads) {}
};

constexpr uint32_t kBoxColumns = 64;

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    constexpr unsigned kCudaVersion = 12000;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kCudaVersion, cudaEnableDefault, &found);
    if (found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

template <int kRank>
bool encode_boxes(CUtensorMap* map, CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[kRank],
                  const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  const auto encoder = tensor_map_encoder();
  if (!encoder) return false;
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const auto encoded = [&] {
    return encoder(map, type, kRank, const_cast<void*>(data), sizes, strides, box, element_strides,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (encoded()) return true;
  // The driver asks for a current context. A thread that has not used the device yet has none: autograd's, at the first
  // backward of a process. The runtime gives it one.
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess && encoded();
}

inline bool encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, const TensorMapShape& s) {
  return encode_boxes<4>(map, type, s.data, {s.columns, s.rows, s.heads, s.batch},
                         {s.row_bytes, s.head_bytes, s.batch_bytes}, {kBoxColumns, s.box_rows, 1, 1});
}

inline bool encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, const PackedMapShape& packed) {
  const TensorMapShape& s = packed.tensor;
  return encode_boxes<5>(map, type, s.data, {s.columns, packed.group, s.rows, s.heads / packed.group, s.batch},
                         {s.head_bytes, s.row_bytes, s.head_bytes * packed.group, s.batch_bytes},
                         {kBoxColumns, packed.box_heads, s.box_rows, 1, 1});
}

}  // namespace flashsdpa::ptx
