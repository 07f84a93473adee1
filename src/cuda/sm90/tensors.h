// Host: what the Hopper kernels take, and how they reach the tensors.
#pragma once

#include "../../mask_plan.h"
#include "../../params.h"
#include "../../ptx/tensor_map.h"
#include "fwd_args.h"

namespace flashsdpa {

constexpr int64_t kMaxDim = 256;
constexpr int64_t kMaxLength = int64_t{1} << 29;  // so that a row plus a band limit fits 32 bits

inline int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

inline const char* refuse_problem(const Problem& p) {
  if (p.dim < 1 || p.dim > kMaxDim || p.dim_v < 1 || p.dim_v > kMaxDim)
    return "this kernel takes head dims from 1 to 256; use the stock backend";
  if (p.seq_q > kMaxLength || p.seq_k > kMaxLength)
    return "this kernel takes sequences up to 2^29; use the stock backend";
  if (p.mask.data && p.mask.dtype != DType::kBool && p.mask.dtype != DType::kFloat32 && p.mask.dtype != p.dtype)
    return "this kernel takes an attn_mask of bool, float32 or q's type";
  return nullptr;
}
inline const char* refuse_without_plan(const Problem& p) {
  return p.mask.data && !p.plan.data ? "this kernel takes an attn_mask with its plan; give flashsdpa::mask_plan of it" : nullptr;
}

struct TensorSizes {
  int64_t batch, heads, rows, columns;
};

constexpr int64_t kTmaAlign = 16;

// How the kernel reaches a tensor. TMA wants a base and strides that are multiples of 16 bytes; an axis of stride 0 is left
// out of its map.
inline FwdTensor reach(const void* data, const int64_t (&stride)[4], const TensorSizes& size) {
  constexpr int64_t kMaxStride = int64_t{1} << 40;
  const auto used = [](int64_t length, int64_t step) { return length > 1 && step != 0; };
  const auto suits = [](int64_t step) { return step > 0 && step * 2 % kTmaAlign == 0 && step * 2 < kMaxStride; };
  FwdTensor tensor{static_cast<uint16_t*>(const_cast<void*>(data)), stride[0], stride[1], stride[2],
                   static_cast<int32_t>(size.rows), static_cast<int32_t>(size.columns), used(size.batch, stride[0]),
                   used(size.heads, stride[1]), false, false};
  if (size.rows == 0) return tensor;  // there is no map of nothing
  tensor.tma = reinterpret_cast<uintptr_t>(data) % kTmaAlign == 0 && (size.rows == 1 || suits(stride[2])) &&
               (!tensor.map_head || suits(stride[1])) && (!tensor.map_batch || suits(stride[0]));
  const auto even = [](int64_t length, int64_t step) { return length == 1 || step % 2 == 0; };
  tensor.words = reinterpret_cast<uintptr_t>(data) % 4 == 0 && even(size.rows, stride[2]) &&
                 even(size.heads, stride[1]) && even(size.batch, stride[0]);
  return tensor;
}

// What a tensor map says of a tensor that TMA can reach.
inline ptx::TensorMapShape map_shape(const FwdTensor& tensor, const TensorSizes& size, int box_rows) {
  const auto length = [](bool used, int64_t n) { return used ? static_cast<uint64_t>(n) : 1; };
  const auto bytes = [](bool used, int64_t step) { return static_cast<uint64_t>(used ? step * 2 : kTmaAlign); };
  return {tensor.data, static_cast<uint64_t>(size.columns), static_cast<uint64_t>(size.rows),
          length(tensor.map_head, size.heads), length(tensor.map_batch, size.batch),
          bytes(size.rows > 1, tensor.stride_row), bytes(tensor.map_head, tensor.stride_head),
          bytes(tensor.map_batch, tensor.stride_batch), static_cast<uint32_t>(box_rows)};
}
inline CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}
constexpr const char* kMapRefused = "the driver refused a tensor map (cuTensorMapEncodeTiled, CUDA 12.0 or newer)";

inline const char* encode(const FwdTensor& tensor, const TensorSizes& size, DType dtype, int box_rows, CUtensorMap* map) {
  if (!tensor.tma || size.rows == 0) return nullptr;
  return ptx::encode_tensor_map(map, map_type(dtype), map_shape(tensor, size, box_rows)) ? nullptr : kMapRefused;
}

// Of the whole problem, for kernels that take a mask.
inline FwdMask make_mask(const Problem& p) {
  const MaskView& m = p.mask;
  FwdMask mask{};
  const int64_t rows = plan_granules(m.size[2]), cols = plan_granules(m.size[3]);
  mask.plan = p.plan.data;
  mask.plan_batch = p.plan.stride_batch;
  mask.plan_head = p.plan.stride_head;
  mask.bits_offset = plan_bits_offset(rows, cols);
  mask.bits_stride = plan_bits_stride(cols);
  mask.values = m.dtype == DType::kBool ? nullptr : m.data;
  mask.stride_batch = m.stride[0];
  mask.stride_head = m.stride[1];
  mask.stride_query = m.stride[2];
  mask.stride_key = m.stride[3];
  mask.dtype = m.dtype;
  mask.queries = static_cast<int32_t>(m.size[2]);
  mask.keys = static_cast<int32_t>(m.size[3]);
  mask.rows = static_cast<int32_t>(rows);
  mask.cols = static_cast<int32_t>(cols);
  mask.one_key = m.size[3] == 1;
  const int64_t steps = (m.stride[0] | m.stride[1] | m.stride[2]) * dtype_size(m.dtype);
  mask.vectors = m.stride[3] == 1 && (reinterpret_cast<int64_t>(m.data) | steps) % 16 == 0;
  return mask;
}

}  // namespace flashsdpa
