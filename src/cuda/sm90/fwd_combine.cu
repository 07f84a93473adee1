// The second kernel of a split launch: out = sum over parts of f(part) * out(part) / sum of f(part) * sum(part), where
// f(part) = exp((max(part) - max) * scale). In a fixed order, so that results do not depend on timing.
//
// A row is summed by 1, 2, 4 or 8 warps, each taking every so many-th part; a lane has 4 columns, and 4 more 128
// further.
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../common/status.h"
#include "fwd_instances.h"
#include "fwd_softmax.cuh"

namespace flashsdpa {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * ptx::kWarpLanes;
constexpr int kLaneColumns = 4, kChunkColumns = kLaneColumns * ptx::kWarpLanes, kChunks = 256 / kChunkColumns;
constexpr int kInFlight = 4;      // parts whose loads a warp has under way
constexpr int kPartsPerWarp = 8;  // more parts go to more warps
constexpr int kFloatBytes = 4, kSlotBytes = kLaneColumns * kFloatBytes;
constexpr int kSharedBytes = kWarps * kChunks * kChunkColumns * kFloatBytes;

struct alignas(16) FourFloats {
  float x[kLaneColumns];
};
struct alignas(8) Weight {
  float max, sum;
};
struct alignas(8) FourElements {
  uint32_t pair[2];
};

struct CombineArgs {
  FwdPartial partial;
  FwdTensor out;
  float* lse;  // (rows)
  int32_t heads_q, seq_q, splits, warps_per_row;
  float scale;
};

__device__ inline float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ inline float max_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

template <bool kBFloat16>
__device__ inline void store_four(const FwdTensor& out, uint16_t* line, int column, const float (&value)[kLaneColumns],
                                  float factor) {
  FourElements four;
#pragma unroll
  for (int i = 0; i < 2; ++i) four.pair[i] = ptx::pack<kBFloat16>(value[2 * i] * factor, value[2 * i + 1] * factor);
  if (out.tma && column + kLaneColumns <= out.columns) {  // what TMA can reach is aligned to 16 bytes
    *reinterpret_cast<FourElements*>(line + column) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    if (column + i < out.columns) line[column + i] = uint16_t(four.pair[i / 2] >> 16 * (i % 2));
  }
}

}  // namespace

template <DType kType>
__global__ void __launch_bounds__(kThreads) flashsdpa_fwd_combine_sm90(const __grid_constant__ CombineArgs args) {
  extern __shared__ uint8_t memory[];
  const int warp = threadIdx.x / ptx::kWarpLanes, lane = threadIdx.x % ptx::kWarpLanes;
  const int parts = args.warps_per_row, part = warp % parts;
  const int64_t rows = args.partial.rows, row_floats = args.partial.row_floats;
  const int place = int(blockIdx.x) * (kWarps / parts) + warp / parts;
  const bool exists = place < rows;
  const int64_t row = exists ? place : 0;  // warps beyond the last row do the first again and drop it
  const auto* weights = reinterpret_cast<const Weight*>(args.partial.weight) + row;
  const float scale_log2 = args.scale * 1.4426950408889634f;

  Weight own[kMaxFwdSplits / ptx::kWarpLanes];
  float top = kMinusInfinity, total = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxFwdSplits / ptx::kWarpLanes; ++i) {
    const int s = i * ptx::kWarpLanes + lane;
    own[i] = s < args.splits ? weights[s * rows] : Weight{kMinusInfinity, 0.f};
    top = fmaxf(top, own[i].max);
  }
  top = max_of_warp(top);
  const float safe = top == kMinusInfinity ? 0.f : top;  // no part has a key: exp2 of -inf, not of -inf - -inf
  const auto factor_of = [&](float max) { return ptx::exp2_fast((max - safe) * scale_log2); };
#pragma unroll
  for (const Weight& weight : own) total += weight.sum == 0.f ? 0.f : weight.sum * factor_of(weight.max);
  total = sum_of_warp(total);

  const float* lines = args.partial.out + row * row_floats;
  float value[kChunks][kLaneColumns] = {};
  for (int first = part; first < args.splits; first += parts * kInFlight) {
    FourFloats more[kInFlight][kChunks] = {};
    float max[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int s = first + u * parts;
      max[u] = kMinusInfinity;
      if (s >= args.splits) continue;
      max[u] = weights[s * rows].max;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int column = c * kChunkColumns + kLaneColumns * lane;
        const float* from = lines + s * rows * row_floats + column;
        if (column < row_floats) more[u][c] = *reinterpret_cast<const FourFloats*>(from);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const float factor = factor_of(max[u]);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) value[c][i] = fmaf(more[u][c].x[i], factor, value[c][i]);
      }
    }
  }

  if (parts > 1) {
    const auto slot = [&](int of_warp, int c) {
      return ptx::shared_address(memory) + ((of_warp * kChunks + c) * ptx::kWarpLanes + lane) * kSlotBytes;
    };
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const auto bits = [&](int i) { return __float_as_uint(value[c][i]); };
      ptx::store_shared_16(slot(warp, c), bits(0), bits(1), bits(2), bits(3));
    }
    __syncthreads();
    if (part > 0) return;
    for (int other = 1; other < parts; ++other) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) {
          value[c][i] += __uint_as_float(ptx::load_shared_4(slot(warp + other, c) + i * kFloatBytes));
        }
      }
    }
  }
  if (!exists) return;

  const float inverse = total == 0.f ? 0.f : 1.f / total;
  const int head = place / args.seq_q, query = place % args.seq_q;  // head: of all batches
  uint16_t* line = args.out.data + head / args.heads_q * args.out.stride_batch +
                   head % args.heads_q * args.out.stride_head + query * args.out.stride_row;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    store_four<kType == DType::kBFloat16>(args.out, line, c * kChunkColumns + kLaneColumns * lane, value[c], inverse);
  }
  if (lane == 0) args.lse[row] = total == 0.f ? kMinusInfinity : fmaf(top, args.scale, logf(total));
}

const char* fwd_combine(const FwdArgs& args, DType dtype, cudaStream_t stream) {
  const FwdFew& few = args.few;
  int warps_per_row = 1;
  while (warps_per_row < kWarps && warps_per_row * kPartsPerWarp < few.splits) warps_per_row *= 2;
  const CombineArgs combine{few.partial, args.out,   args.lse,      few.heads_q,
                            args.seq_q,  few.splits, warps_per_row, args.scale};
  const int64_t rows_per_block = kWarps / warps_per_row;
  const auto blocks = static_cast<uint32_t>((few.partial.rows + rows_per_block - 1) / rows_per_block);
  const auto kernel = dtype == DType::kBFloat16 ? flashsdpa_fwd_combine_sm90<DType::kBFloat16>
                                                : flashsdpa_fwd_combine_sm90<DType::kFloat16>;
  kernel<<<blocks, kThreads, kSharedBytes, stream>>>(combine);
  return error_text(cudaGetLastError());
}

}  // namespace flashsdpa
