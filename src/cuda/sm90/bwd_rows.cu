// The kernels before and after the backward kernel, which go through rows of queries at the speed of memory.
//
//   flashsdpa_bwd_pre_sm90    stats of each row (BwdArgs::stats), dQ's sum zeroed, turns zeroed, the counter set; a copy of
//                             grad_out where TMA cannot read it; with terms, what each block gives to the sinks' gradient
//   flashsdpa_bwd_post_sm90   dQ's sum, scaled and rounded, as the caller laid out dq
//
// One block of threads for each block of queries of a head; the last kernel has one for each piece of it.
#include <type_traits>

#include "../../ptx/arithmetic.cuh"
#include "../../ptx/grid.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../common/status.h"
#include "bwd_instances.h"
#include "bwd_store.cuh"
#include "launch_behind.h"
#include "score_terms.cuh"

namespace flashsdpa {
namespace {

constexpr int kThreads = 128, kVector = 8;  // elements of 16 bytes
constexpr float kInfinity = __builtin_huge_valf(), kLog2e = 1.4426950408889634f;

struct alignas(16) Vector {
  uint32_t pair[kVector / 2];
  __device__ uint16_t element(int e) const { return uint16_t(pair[e / 2] >> e % 2 * 16); }
};
struct alignas(16) FourFloats {
  float value[4];
};

// The kernel between goes from the first heads to the last: what it begins with, and what it has ended with, is then the part of dQ's
// sum that the L2 cache still holds, and of grad_out.
__device__ inline uint32_t from_the_last() { return gridDim.x - 1 - blockIdx.x; }

struct RowsPlace {
  int m, head;
  int64_t batch;
  __device__ RowsPlace(uint32_t block, int blocks_m, int heads)
      : m(int(block % uint32_t(blocks_m))),
        head(int(block / uint32_t(blocks_m) % uint32_t(heads))),
        batch(block / uint32_t(blocks_m) / uint32_t(heads)) {}
};

__host__ __device__ inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector) == 0; }

__device__ inline Vector load_vector(const uint16_t* source) { return *reinterpret_cast<const Vector*>(source); }
// Up to 8 elements, `step` apart; zeros beyond `count`.
__device__ inline Vector load_elements(const uint16_t* source, int64_t step, int count) {
  Vector v = {};
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    if (e < count) v.pair[e / 2] |= uint32_t(source[e * step]) << e % 2 * 16;
  }
  return v;
}
__device__ inline Vector load_staged(uint32_t shared) {
  float f[4];
  ptx::load_shared_floats(shared, f[0], f[1], f[2], f[3]);
  return {{__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])}};
}
__device__ inline void store_vector(uint16_t* target, const Vector& v, int count) {
  if (count >= kVector && aligned(target)) {
    *reinterpret_cast<Vector*>(target) = v;
    return;
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    if (e < count) target[e] = v.element(e);
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

// A row's scores as terms make them of products q . k, but for what a mask adds.
struct RowTerms {
  const ScoreTerms& terms;
  float slope, place;  // place: where the distance is 0
  __device__ RowTerms(const ScoreTerms& its_terms, const RowsPlace& at, int row)
      : terms(its_terms),
        slope(terms.slopes.data ? value_of_head(terms.slopes, int(at.batch), at.head) : 0.f),
        place(float(row + terms.diagonal)) {}
  __device__ float score(float product, int key) const {
    float one[1] = {product};
    scale_and_cap(terms, one);
    return fmaf(-slope, fabsf(place - float(key)), one[0]);
  }
};
__device__ inline float sink_of(const ScoreTerms& terms, const RowsPlace& at) {
  return terms.sinks.data ? value_of_head(terms.sinks, int(at.batch), at.head) : -kInfinity;
}

// The shift of a row whose log-sum-exp has few digits left for the logarithm of the sum, or none: the sum again, from the
// scores. By the whole warp, in ordinary arithmetic: such rows are hardly ever met.
template <bool kBFloat16, bool kMasked, bool kTerms>
__device__ inline float restored_shift(const BwdPreArgs& args, const RowsPlace& at, int row, float lse, int lane) {
  const uint16_t* q = args.q + at.batch * args.q_stride[0] + at.head * args.q_stride[1] + row * args.q_stride[2];
  const uint16_t* k = args.k + at.batch * args.k_stride[0] + at.head / args.group * args.k_stride[1];
  float sum = 0.f;
  for (int j = max(row + args.band_lo, 0) + lane; j <= min(row + args.band_hi, args.seq_k - 1); j += ptx::kWarpLanes) {
    float score = 0.f;
    for (int c = 0; c < args.dim; ++c) {
      score = fmaf(ptx::unpack<kBFloat16>(q[c]), ptx::unpack<kBFloat16>(k[j * args.k_stride[2] + c]), score);
    }
    if constexpr (kTerms) {
      score = RowTerms(args.terms, at, row).score(score, j) * args.scale;
      if (args.mask.values) score = ptx::subtract(score, -mask_value<kBFloat16>(args.mask, at, row, j));
      if (args.mask.plan && !mask_keeps(args.mask, at, row, j)) continue;
    } else if constexpr (kMasked) {
      // As the other kernels do it: rounded once.
      score = args.mask.values ? fmaf(score, args.scale, mask_value<kBFloat16>(args.mask, at, row, j)) : score * args.scale;
      if (!mask_keeps(args.mask, at, row, j)) continue;
    } else {
      score *= args.scale;
    }
    sum += ptx::exp2_fast(fminf(ptx::subtract(score, lse), 0.f) * kLog2e);
  }
  for (int bit = 1; bit < ptx::kWarpLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  if constexpr (kTerms) sum += ptx::exp2_fast(fminf(ptx::subtract(sink_of(args.terms, at), lse), 0.f) * kLog2e);
  return sum > 0.f ? log2f(sum) : 0.f;
}

// What a block's rows give to the sinks' gradient: a row's sink has a weight as its keys have, and no value.
__device__ inline void store_sink_sum(const BwdPreArgs& args, uint32_t block, const RowsPlace& at, const float* stats) {
  __syncthreads();  // all stats are there
  if (threadIdx.x >= ptx::kWarpLanes) return;
  const float sink = sink_of(args.terms, at);
  float sum = 0.f;
  for (int row = int(threadIdx.x); row < args.block_m; row += ptx::kWarpLanes) {
    const float shift = stats[bwd_stat_place(row)], high = stats[2 * args.block_m + bwd_stat_place(row)];
    sum += ptx::exp2_fast(fmaf(ptx::subtract(sink, high), kLog2e, -shift)) * stats[args.block_m + bwd_stat_place(row)];
  }
  for (int bit = 1; bit < ptx::kWarpLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  if (threadIdx.x == 0) args.sink_sums[block] = sum;
}

}  // namespace

// kVectors: rows of out and grad_out are whole vectors.
template <bool kBFloat16, bool kMasked, bool kTerms, bool kVectors>
__global__ void __launch_bounds__(kThreads) flashsdpa_bwd_pre_sm90(const __grid_constant__ BwdPreArgs args) {
  ptx::launch_dependents();  // all blocks have a place by the time that counts
  const uint32_t block = from_the_last();
  const RowsPlace at(block, args.blocks_m, args.heads_q);
  const int64_t rows_before = (at.batch * args.heads_q + at.head) * args.seq_q;
  const int warp = int(threadIdx.x) / ptx::kWarpLanes, lane = int(threadIdx.x) % ptx::kWarpLanes;
  float* stats = args.stats + block * int64_t(kBwdStats * args.block_m + kBwdFlags);

  // As many lanes for a row as it has vectors, a power of two.
  int lanes = 1;
  while (lanes * kVector < args.dim_v) lanes *= 2;
  const int column = lane % lanes * kVector, count = args.dim_v - column;
  const uint16_t* out = args.out + at.batch * args.out_stride[0] + at.head * args.out_stride[1] + column;
  const uint16_t* grad_out =
      args.grad_out + at.batch * args.grad_stride[0] + at.head * args.grad_stride[1] + column * args.grad_stride[3];
  const bool first_lane = lane % lanes == 0;
  bool coarse = false;
  constexpr int kAtOnce = kVectors ? 4 : 1;  // rows of a lane, on their way together
  const int step = kThreads / lanes;
  // The sum of dQ is zeroed while rows are on their way, of each turn of the loop a part.
  FourFloats* dq = reinterpret_cast<FourFloats*>(args.dq + block * int64_t(args.dq_floats));
  const int vectors = args.dq_floats / 4, part = vectors * kAtOnce * step / args.block_m;
  int zeroed = int(threadIdx.x), end = 0;
  const auto zero_until = [&](int its_end) {
#pragma unroll 1
    for (; zeroed < its_end; zeroed += kThreads) dq[zeroed] = FourFloats{};
  };
#pragma unroll 1
  for (int begin = warp * (ptx::kWarpLanes / lanes); begin < args.block_m; begin += kAtOnce * step) {
    const auto place = [&](int u) { return begin + lane / lanes + u * step; };  // in the block
    const auto row_of = [&](int u) { return at.m * args.block_m + place(u); };
    const auto near_row = [&](int u) { return min(row_of(u), args.seq_q - 1); };  // one that can be read
    Vector o[kAtOnce] = {}, g[kAtOnce] = {};
    if (count > 0) {
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint16_t *from_out = out + near_row(u) * args.out_stride[2], *from_grad = grad_out + near_row(u) * args.grad_stride[2];
        o[u] = kVectors ? load_vector(from_out) : load_elements(from_out, 1, count);
        g[u] = kVectors ? load_vector(from_grad) : load_elements(from_grad, args.grad_stride[3], count);
      }
    }
    uint32_t all_high = 0;
    float lse[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) lse[u] = args.lse[rows_before + near_row(u)];
    end += part;
    zero_until(min(end, vectors));
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int r = place(u), row = row_of(u);
      const bool inside = r < args.block_m && row < args.seq_q;
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        sum += ptx::unpack<kBFloat16>(o[u].element(e)) * ptx::unpack<kBFloat16>(g[u].element(e));
      }
      if (inside && args.grad_copy && column < args.copy_columns) {
        store_vector(args.grad_copy + (rows_before + row) * args.copy_columns + column, g[u], kVector);
      }
      for (int bit = 1; bit < lanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
      const bool empty = !inside || lse[u] == -kInfinity, high = first_lane && !empty && fabsf(lse[u]) > kBwdCoarse;
      if (first_lane && r < args.block_m) {
        if (inside && args.grad_lse) sum -= args.grad_lse[rows_before + row];
        if (!high) stats[bwd_stat_place(r)] = empty ? kInfinity : lse[u] * kLog2e;
        stats[args.block_m + bwd_stat_place(r)] = empty ? 0.f : sum;
        stats[2 * args.block_m + bwd_stat_place(r)] = high ? lse[u] : 0.f;
      }
      all_high |= uint32_t(high) << u;
    }
#pragma unroll 1
    for (int u = 0; u < kAtOnce; ++u) {
      for (uint32_t rows = __ballot_sync(0xffffffffu, all_high >> u & 1); rows != 0; rows &= rows - 1) {
        const int source = __ffs(int(rows)) - 1, row = __shfl_sync(0xffffffffu, row_of(u), source);
        const float shift = restored_shift<kBFloat16, kMasked, kTerms>(args, at, row, args.lse[rows_before + row], lane);
        if (lane == source) stats[bwd_stat_place(place(u))] = shift;
        coarse = true;
      }
    }
  }
  if (lane == 0) stats[kBwdStats * args.block_m + warp] = coarse ? 1.f : 0.f;

  zero_until(vectors);
  if (args.turns && int(threadIdx.x) < args.turns_per_block) {
    args.turns[block * int64_t(args.turns_per_block) + threadIdx.x] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.counter = args.tiles_taken;
  if constexpr (kTerms) {
    if (args.sink_sums) store_sink_sum(args, block, at, stats);
  }
}

// One warp for each head, so that the order of a sum is fixed.
__global__ void __launch_bounds__(ptx::kWarpLanes) flashsdpa_bwd_sinks_sm90(const __grid_constant__ BwdSinksArgs args) {
  const int head = int(blockIdx.x), count = args.blocks_m;
  double sum = 0.0;
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    const float* of_batch = args.sink_sums + (batch * args.heads_q + head) * count;
    for (int m = int(threadIdx.x); m < count; m += ptx::kWarpLanes) sum += double(of_batch[m]);
  }
  for (int bit = 1; bit < ptx::kWarpLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  if (threadIdx.x == 0) args.dsinks[head] = float(-sum);
}

// A block of threads for each piece of 64 x 64: a thread loads the registers that one of a warpgroup added, so that a warp reads whole
// lines, all under way together; and through shared memory it writes whole lines: 8 lanes the 64 columns of a row.
template <bool kBFloat16, bool kByKeys>
__global__ void __launch_bounds__(kThreads) flashsdpa_bwd_post_sm90(const __grid_constant__ BwdPostArgs args) {
  extern __shared__ uint8_t memory[];
  static_assert(kThreads == ptx::kWarpgroupThreads);
  const uint32_t rounded = ptx::shared_address(memory);
  const int boxes = (args.dim_class + kBwdPiece - 1) / kBwdPiece, pieces = args.block_m / kBwdPiece * boxes;
  const uint32_t block = from_the_last() / uint32_t(pieces);
  const int piece = int(from_the_last() % uint32_t(pieces)), thread = int(threadIdx.x);
  const RowsPlace at(block, args.blocks_m, args.heads_q);
  const int first_row = at.m * args.block_m + piece / boxes * kBwdPiece, first_column = piece % boxes * kBwdPiece;
  const float* sum = args.dq_sum + block * (int64_t(args.block_m) * args.dim_class) + piece * kBwdPieceFloats;
  ptx::wait_for_grid_before();

  float values[kBwdPiece / 2];
#pragma unroll
  for (int i = 0; i < kBwdPiece / 2; i += 4) {
    FourFloats four = {};
    if (!kByKeys || first_column + 2 * i < args.dim_class) {  // of class 96 the second piece has half the columns
      four = *reinterpret_cast<const FourFloats*>(sum + i * kThreads + 4 * thread);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) values[i + k] = four.value[k];
  }
  if constexpr (kByKeys) {
    stage_rows<kBwdPiece, kBFloat16>(rounded, values, args.scale, 0, thread);
  } else {
    stage_columns<kBwdPiece, kBFloat16>(rounded, values, args.scale, thread);
  }
  __syncthreads();
  uint16_t* dq = args.dq + at.batch * args.stride[0] + at.head * args.stride[1];
  constexpr int kChunks = kBwdPiece / kVector;  // of a row
#pragma unroll
  for (int i = 0; i < kBwdPiece * kChunks / kThreads; ++i) {
    const int r = i * (kThreads / kChunks) + thread / kChunks, chunk = thread % kChunks;
    const int row = first_row + r, column = first_column + chunk * kVector;
    if (row >= args.seq_q || column >= args.dim) continue;
    store_vector(dq + row * args.stride[2] + column, load_staged(rounded + swizzled_offset<kBwdPiece>(r, chunk)), args.dim - column);
  }
}

const char* bwd_launch_pre(const BwdPreArgs& args, DType dtype, bool terms, uint32_t blocks, cudaStream_t stream) {
  const auto whole = [&](const uint16_t* data, const int64_t* stride) {
    return aligned(data) && stride[0] % kVector == 0 && stride[1] % kVector == 0 && stride[2] % kVector == 0;
  };
  const bool vectors = args.dim_v % kVector == 0 && args.grad_stride[3] == 1 && whole(args.out, args.out_stride) &&
                       whole(args.grad_out, args.grad_stride);
  const auto pick = [&](auto bfloat16) {
    constexpr bool kBFloat16 = decltype(bfloat16)::value;
    if (terms) {
      return vectors ? flashsdpa_bwd_pre_sm90<kBFloat16, true, true, true> : flashsdpa_bwd_pre_sm90<kBFloat16, true, true, false>;
    }
    if (args.mask.plan) {
      return vectors ? flashsdpa_bwd_pre_sm90<kBFloat16, true, false, true> : flashsdpa_bwd_pre_sm90<kBFloat16, true, false, false>;
    }
    return vectors ? flashsdpa_bwd_pre_sm90<kBFloat16, false, false, true> : flashsdpa_bwd_pre_sm90<kBFloat16, false, false, false>;
  };
  const auto kernel = dtype == DType::kBFloat16 ? pick(std::true_type()) : pick(std::false_type());
  kernel<<<blocks, kThreads, 0, stream>>>(args);
  return error_text(cudaGetLastError());
}

const char* bwd_launch_sinks(const BwdSinksArgs& args, cudaStream_t stream) {
  flashsdpa_bwd_sinks_sm90<<<static_cast<uint32_t>(args.heads_q), ptx::kWarpLanes, 0, stream>>>(args);
  return error_text(cudaGetLastError());
}

const char* bwd_launch_post(const BwdPostArgs& args, DType dtype, bool by_keys, bool behind, uint32_t blocks, cudaStream_t stream) {
  const bool bfloat16 = dtype == DType::kBFloat16;
  const auto kernel = by_keys ? (bfloat16 ? flashsdpa_bwd_post_sm90<true, true> : flashsdpa_bwd_post_sm90<false, true>)
                              : (bfloat16 ? flashsdpa_bwd_post_sm90<true, false> : flashsdpa_bwd_post_sm90<false, false>);
  constexpr int kBoxBytes = kBwdPiece * kBoxRowBytes;
  const uint32_t pieces = blocks * static_cast<uint32_t>(args.block_m / kBwdPiece * ((args.dim_class + kBwdPiece - 1) / kBwdPiece));
  if (behind) return launch_behind(kernel, pieces, kThreads, kBoxBytes, stream, args);
  kernel<<<pieces, kThreads, kBoxBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

}  // namespace flashsdpa
