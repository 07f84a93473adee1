// The kernels before and after the backward kernel, which go through rows of queries at the speed of memory.
//
//   flashsdpa_bwd_pre_sm90    stats of each row (BwdArgs::stats), dQ's sum zeroed, turns and counter zeroed; a copy of
//                             grad_out where TMA cannot read it
//   flashsdpa_bwd_post_sm90   dQ's sum, scaled and rounded, as the caller laid out dq
//
// One block of threads for each block of queries of a head.
#include "../../ptx/arithmetic.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../common/status.h"
#include "bwd_instances.h"

namespace flashsdpa {
namespace {

constexpr int kThreads = 128, kVector = 8;  // elements of 16 bytes
constexpr float kInfinity = __builtin_huge_valf(), kLog2e = 1.4426950408889634f;

struct alignas(16) Vector {
  uint16_t element[kVector];
};
struct alignas(16) FourFloats {
  float value[4];
};

struct RowsPlace {
  int m, head;
  int64_t batch;
  __device__ RowsPlace(int blocks_m, int heads)
      : m(int(blockIdx.x % uint32_t(blocks_m))),
        head(int(blockIdx.x / uint32_t(blocks_m) % uint32_t(heads))),
        batch(blockIdx.x / uint32_t(blocks_m) / uint32_t(heads)) {}
};

__device__ inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector) == 0; }

// Up to 8 elements, `step` apart; zeros beyond `count`.
__device__ inline Vector load_vector(const uint16_t* source, int64_t step, int count) {
  if (step == 1 && count >= kVector && aligned(source)) return *reinterpret_cast<const Vector*>(source);
  Vector v;
#pragma unroll
  for (int e = 0; e < kVector; ++e) v.element[e] = e < count ? source[e * step] : uint16_t(0);
  return v;
}
__device__ inline void store_vector(uint16_t* target, const Vector& v, int count) {
  if (count >= kVector && aligned(target)) {
    *reinterpret_cast<Vector*>(target) = v;
    return;
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    if (e < count) target[e] = v.element[e];
  }
}

// What the mask says of one score.
__device__ inline bool mask_keeps(const FwdMask& mask, const RowsPlace& at, int row, int key) {
  const int32_t* bits = mask.plan + at.batch * mask.plan_batch + at.head * mask.plan_head + mask.bits_offset;
  key = min(key, mask.keys - 1);
  return uint32_t(bits[min(row, mask.queries - 1) * mask.bits_stride + key / 32]) >> key % 32 & 1;
}
template <bool kBFloat16>
__device__ inline float mask_value(const FwdMask& mask, const RowsPlace& at, int row, int key) {
  const int64_t i = at.batch * mask.stride_batch + at.head * mask.stride_head +
                    min(row, mask.queries - 1) * mask.stride_query + min(key, mask.keys - 1) * mask.stride_key;
  if (mask.dtype == DType::kFloat32) return static_cast<const float*>(mask.values)[i];
  return ptx::unpack<kBFloat16>(static_cast<const uint16_t*>(mask.values)[i]);
}

// The shift of a row whose log-sum-exp has few digits left for the logarithm of the sum, or none: the sum again, from the
// scores. By the whole warp, in ordinary arithmetic: such rows are hardly ever met.
template <bool kBFloat16, bool kMasked>
__device__ inline float restored_shift(const BwdPreArgs& args, const RowsPlace& at, int row, float lse, int lane) {
  const uint16_t* q = args.q + at.batch * args.q_stride[0] + at.head * args.q_stride[1] + row * args.q_stride[2];
  const uint16_t* k = args.k + at.batch * args.k_stride[0] + at.head / args.group * args.k_stride[1];
  float sum = 0.f;
  for (int j = max(row + args.band_lo, 0) + lane; j <= min(row + args.band_hi, args.seq_k - 1); j += ptx::kWarpLanes) {
    float score = 0.f;
    for (int c = 0; c < args.dim; ++c) {
      score = fmaf(ptx::unpack<kBFloat16>(q[c]), ptx::unpack<kBFloat16>(k[j * args.k_stride[2] + c]), score);
    }
    if constexpr (kMasked) {
      score *= args.scale;
      if (args.mask.values) score = ptx::subtract(score, -mask_value<kBFloat16>(args.mask, at, row, j));
      if (!mask_keeps(args.mask, at, row, j)) continue;
    } else {
      score *= args.scale;
    }
    sum += ptx::exp2_fast(fminf(ptx::subtract(score, lse), 0.f) * kLog2e);
  }
  for (int bit = 1; bit < ptx::kWarpLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  return sum > 0.f ? log2f(sum) : 0.f;
}

}  // namespace

template <bool kBFloat16, bool kMasked>
__global__ void __launch_bounds__(kThreads) flashsdpa_bwd_pre_sm90(const __grid_constant__ BwdPreArgs args) {
  const RowsPlace at(args.blocks_m, args.heads_q);
  const int64_t rows_before = (at.batch * args.heads_q + at.head) * args.seq_q;
  const int warp = int(threadIdx.x) / ptx::kWarpLanes, lane = int(threadIdx.x) % ptx::kWarpLanes;
  float* stats = args.stats + blockIdx.x * int64_t(kBwdStats * args.block_m + kBwdFlags);

  // As many lanes for a row as it has vectors, a power of two.
  int lanes = 1;
  while (lanes * kVector < args.dim_v) lanes *= 2;
  const int column = lane % lanes * kVector, count = args.dim_v - column;
  const uint16_t* out = args.out + at.batch * args.out_stride[0] + at.head * args.out_stride[1] + column;
  const uint16_t* grad_out =
      args.grad_out + at.batch * args.grad_stride[0] + at.head * args.grad_stride[1] + column * args.grad_stride[3];
  bool coarse = false;
#pragma unroll 4
  for (int first = warp * (ptx::kWarpLanes / lanes); first < args.block_m; first += kThreads / lanes) {
    const int r = first + lane / lanes, row = at.m * args.block_m + r;
    const bool inside = row < args.seq_q;
    float sum = 0.f;
    if (inside) {
      const Vector o = load_vector(out + row * args.out_stride[2], 1, count);
      const Vector g = load_vector(grad_out + row * args.grad_stride[2], args.grad_stride[3], count);
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sum += ptx::unpack<kBFloat16>(o.element[e]) * ptx::unpack<kBFloat16>(g.element[e]);
      }
      if (args.grad_copy && column < args.copy_columns) {
        store_vector(args.grad_copy + (rows_before + row) * args.copy_columns + column, g, kVector);
      }
    }
    for (int bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    const bool first_lane = lane % lanes == 0;
    float lse = -kInfinity;
    if (first_lane && inside) lse = args.lse[rows_before + row];
    const bool high = fabsf(lse) > kBwdCoarse && lse != -kInfinity;
    if (first_lane) {
      if (inside && args.grad_lse) sum -= args.grad_lse[rows_before + row];
      if (!high) stats[bwd_stat_place(r)] = lse == -kInfinity ? kInfinity : lse * kLog2e;
      stats[args.block_m + bwd_stat_place(r)] = lse == -kInfinity ? 0.f : sum;
      stats[2 * args.block_m + bwd_stat_place(r)] = high ? lse : 0.f;
    }
    for (uint32_t rows = __ballot_sync(0xffffffffu, high); rows != 0; rows &= rows - 1) {
      const int source = __ffs(int(rows)) - 1, its_row = __shfl_sync(0xffffffffu, row, source);
      const float shift = restored_shift<kBFloat16, kMasked>(args, at, its_row, __shfl_sync(0xffffffffu, lse, source), lane);
      if (lane == source) stats[bwd_stat_place(r)] = shift;
      coarse = true;
    }
  }
  if (lane == 0) stats[kBwdStats * args.block_m + warp] = coarse ? 1.f : 0.f;

  FourFloats* dq = reinterpret_cast<FourFloats*>(args.dq + blockIdx.x * int64_t(args.dq_floats));
  for (int i = int(threadIdx.x); i < args.dq_floats / 4; i += kThreads) dq[i] = FourFloats{};
  if (args.turns && int(threadIdx.x) < args.turns_per_block) {
    args.turns[blockIdx.x * int64_t(args.turns_per_block) + threadIdx.x] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.counter = 0;
}

template <bool kBFloat16>
__device__ inline void store_row(const BwdPostArgs& args, uint16_t* dq, int row, int column, const float (&values)[kVector]) {
  if (row >= args.seq_q || column >= args.dim) return;
  Vector v;
#pragma unroll
  for (int e = 0; e < kVector; e += 2) {
    const uint32_t pair = ptx::pack<kBFloat16>(values[e] * args.scale, values[e + 1] * args.scale);
    v.element[e] = uint16_t(pair);
    v.element[e + 1] = uint16_t(pair >> 16);
  }
  store_vector(dq + row * args.stride[2] + column, v, args.dim - column);
}

// Where four registers of four neighbouring lanes lie (kByKeys: rows r and r + 8 of eight columns), or those of eight
// lanes, four apart (two rows of sixteen columns).
template <bool kBFloat16, bool kByKeys>
__global__ void __launch_bounds__(kThreads) flashsdpa_bwd_post_sm90(const __grid_constant__ BwdPostArgs args) {
  const RowsPlace at(args.blocks_m, args.heads_q);
  uint16_t* dq = args.dq + at.batch * args.stride[0] + at.head * args.stride[1];
  const float* sum = args.dq_sum + blockIdx.x * (int64_t(args.block_m) * args.dim_class);
  const int boxes = (args.dim_class + kBwdPiece - 1) / kBwdPiece;
  constexpr int kGroup = 4 * ptx::kWarpgroupThreads;  // floats of four registers of all threads
  constexpr int kItems = kByKeys ? 256 : 128;         // of a piece
  for (int i = int(threadIdx.x); i < args.block_m / kBwdPiece * boxes * kItems; i += kThreads) {
    const int piece = i / kItems, item = i % kItems;
    const int row = at.m * args.block_m + piece / boxes * kBwdPiece, column = piece % boxes * kBwdPiece;
    const float* base = sum + piece * kBwdPieceFloats;
    float values[2][2][kVector];  // of two rows: eight columns (kByKeys: the first half), or sixteen
    if constexpr (kByKeys) {
      const int group = item % 8, warp = item / 64, r = item / 8 % 8;
      if (column + 8 * group >= args.dim_class) continue;
      const auto* four = reinterpret_cast<const FourFloats*>(base + group * kGroup + (warp * ptx::kWarpLanes + r * 4) * 4);
#pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        const FourFloats f = four[lane];
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e / 2][0][2 * lane + e % 2] = f.value[e];
      }
      store_row<kBFloat16>(args, dq, row + 16 * warp + r, column + 8 * group, values[0][0]);
      store_row<kBFloat16>(args, dq, row + 16 * warp + r + 8, column + 8 * group, values[1][0]);
    } else {
      const int c = item % 4, warp = item / 4 % 4, group = item / 16;
      const auto* four = reinterpret_cast<const FourFloats*>(base + group * kGroup + (warp * ptx::kWarpLanes + c) * 4);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const FourFloats f = four[4 * k];
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e % 2][e / 2][k] = f.value[e];
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = row + 8 * group + 2 * c + e;
        store_row<kBFloat16>(args, dq, r, column + 16 * warp, values[e][0]);
        store_row<kBFloat16>(args, dq, r, column + 16 * warp + 8, values[e][1]);
      }
    }
  }
}

const char* bwd_launch_pre(const BwdPreArgs& args, DType dtype, uint32_t blocks, cudaStream_t stream) {
  const bool bfloat16 = dtype == DType::kBFloat16, masked = args.mask.plan != nullptr;
  const auto kernel = masked ? (bfloat16 ? flashsdpa_bwd_pre_sm90<true, true> : flashsdpa_bwd_pre_sm90<false, true>)
                             : (bfloat16 ? flashsdpa_bwd_pre_sm90<true, false> : flashsdpa_bwd_pre_sm90<false, false>);
  kernel<<<blocks, kThreads, 0, stream>>>(args);
  return error_text(cudaGetLastError());
}

const char* bwd_launch_post(const BwdPostArgs& args, DType dtype, bool by_keys, uint32_t blocks, cudaStream_t stream) {
  const bool bfloat16 = dtype == DType::kBFloat16;
  const auto kernel = by_keys ? (bfloat16 ? flashsdpa_bwd_post_sm90<true, true> : flashsdpa_bwd_post_sm90<false, true>)
                              : (bfloat16 ? flashsdpa_bwd_post_sm90<true, false> : flashsdpa_bwd_post_sm90<false, false>);
  kernel<<<blocks, kThreads, 0, stream>>>(args);
  return error_text(cudaGetLastError());
}

}  // namespace flashsdpa
