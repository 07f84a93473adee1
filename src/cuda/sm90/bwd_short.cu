// Backward attention of short sequences (short.h): dq, dk, dv and the gradient of an additive mask.
//
// All keys of a row are at hand, so the softmax is taken again and neither the output nor the log-sum-exp is read:
//   P = softmax(q k^T * scale + mask)   dP = dO v^T   dS = P (dP - rowsum(P dP) + grad_lse)   dmask = dS summed
//   dq = dS k * scale   by each warp's 16 queries
//   dk = dS^T q * scale, dv = P^T dO   by each warp's 16 keys, P and dS going through shared memory
// A block does a share of the (batch, head) that a plane of the mask's gradient sums, one after the other.
#include "shared_memory.h"
#include "short_host.h"
#include "short_tile.cuh"

namespace flashsdpa {

template <int kDim>
struct BwdShortShared {
  using Rows = ShortTile<kDim>;
  using Scores = ShortTile<kShortRows>;
  static constexpr int kBytes = 5 * Rows::kBytes + 2 * Scores::kBytes + 128;  // 128: to align the base
  uint32_t q, k, v, grad_out, dq, p, ds;
  __device__ explicit BwdShortShared(const uint8_t* memory)
      : q((ptx::shared_address(memory) + 127) & ~127u),
        k(q + Rows::kBytes),
        v(k + Rows::kBytes),
        grad_out(v + Rows::kBytes),
        dq(grad_out + Rows::kBytes),
        p(dq + Rows::kBytes),
        ds(p + Scores::kBytes) {}
};

// Scores become their softmax, each row's in its lanes of the warp; a row without a key becomes zeros.
__device__ inline void short_softmax(float (&s)[kShortScores], float scale) {
  const float scale_log2 = scale * 1.4426950408889634f;
  float top[2] = {kMinusInfinity, kMinusInfinity}, sum[2] = {};
#pragma unroll
  for (int i = 0; i < kShortScores; ++i) top[score_row(i)] = fmaxf(top[score_row(i)], s[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
    top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
    if (top[r] == kMinusInfinity) top[r] = 0.f;  // exp2 of -inf, not of -inf - -inf
  }
#pragma unroll
  for (int i = 0; i < kShortScores; ++i) {
    s[i] = ptx::exp2_fast((s[i] - top[score_row(i)]) * scale_log2);
    sum[score_row(i)] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    sum[r] = sum[r] == 0.f ? 0.f : 1.f / sum[r];
  }
#pragma unroll
  for (int i = 0; i < kShortScores; ++i) s[i] *= sum[score_row(i)];
}

// 16 rows of numbers as fragments of A, and in shared memory, where the other warps read them by columns.
template <bool kBFloat16>
__device__ inline void short_share(const float (&x)[kShortScores], uint32_t shared, int row, int lane, uint32_t (&a)[kShortRows / 16][4]) {
#pragma unroll
  for (int i = 0; i < kShortScores; i += 2) {
    const uint32_t pair = ptx::pack<kBFloat16>(x[i], x[i + 1]);
    a[i / 8][i % 8 / 2] = pair;
    ptx::store_shared_4(shared + ShortTile<kShortRows>::at(row + lane / 4 + 8 * score_row(i), i / 4) + lane % 4 * 4, pair);
  }
}

// Fragments of A = X^T, 16 rows of it from `row` on, of the 64 x 64 numbers X in shared memory.
__device__ inline void short_transposed(uint32_t shared, int row, int lane, uint32_t (&a)[kShortRows / 16][4]) {
#pragma unroll
  for (int step = 0; step < kShortRows / 16; ++step) {
    ptx::ldmatrix_x4<true>(
        shared + ShortTile<kShortRows>::at(16 * step + lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2), a[step]);
  }
}

template <bool kBFloat16>
__device__ inline void store_as(void* out, DType dtype, int64_t at, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(out)[at] = value;
  } else {
    static_cast<uint16_t*>(out)[at] = uint16_t(ptx::pack<kBFloat16>(value, 0.f));
  }
}

// One (batch, head). `sum`: what the gradient of the mask has so far, of this lane's scores.
template <bool kBFloat16, int kDim, bool kMaskGradient>
__device__ inline void short_gradients(const BwdShortArgs& args, const BwdShortShared<kDim>& shared, int batch, int head, int thread,
                                       float* sum) {
  const int lane = thread % ptx::kWarpLanes, row = thread / ptx::kWarpLanes * 16, query = row + lane / 4;
  const auto base = [&](const FwdTensor& t) { return batch * t.stride_batch + head * t.stride_head; };
  short_load<kDim>(shared.q, args.q, base(args.q), thread);
  short_load<kDim>(shared.k, args.k, base(args.k), thread);
  short_load<kDim>(shared.v, args.v, base(args.v), thread);
  short_load<kDim>(shared.grad_out, args.grad_out, base(args.grad_out), thread, args.grad_step);
  float m[kShortScores], p[kShortScores], ds[kShortScores];
  if (args.mask.data) short_mask<kBFloat16>(args, batch, head, query, lane, m);
  float delta[2] = {};  // rowsum(P dP) - grad_lse
  if (args.grad_lse && lane % 4 == 0) {
    const float* grad_lse = args.grad_lse + (int64_t(batch) * args.heads_q + head) * args.seq_q;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (query + 8 * r < args.seq_q) delta[r] = -__ldg(grad_lse + query + 8 * r);
    }
  }
  ptx::copy_async_wait();
  __syncthreads();

  short_scores<kDim, kBFloat16>(p, shared.q, row, shared.k, lane);
  short_finish(args, query, lane, m, p);
  short_softmax(p, args.scale);
  short_scores<kDim, kBFloat16>(ds, shared.grad_out, row, shared.v, lane);
#pragma unroll
  for (int e = 0; e < kShortScores; ++e) delta[score_row(e)] += p[e] * ds[e];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    delta[r] += __shfl_xor_sync(0xffffffffu, delta[r], 1);
    delta[r] += __shfl_xor_sync(0xffffffffu, delta[r], 2);
  }
#pragma unroll
  for (int e = 0; e < kShortScores; ++e) {
    ds[e] = p[e] * (ds[e] - delta[score_row(e)]);
    if constexpr (kMaskGradient) sum[e] += ds[e];
  }
  if (!args.inputs) return;

  const float scale[2] = {args.grad_scale, args.grad_scale}, one[2] = {1.f, 1.f};
  uint32_t a[kShortRows / 16][4];
  short_share<kBFloat16>(p, shared.p, row, lane, a);
  short_share<kBFloat16>(ds, shared.ds, row, lane, a);
  float x[kDim / 2];
  short_sums<kDim, kBFloat16>(x, a, shared.k, lane);
  short_store<kDim, kBFloat16>(shared.dq, args.dq, base(args.dq), row, x, scale, lane);
  __syncthreads();
  // Results go to the places of this warp's rows of V and K, which all have read.
  short_transposed(shared.p, row, lane, a);
  short_sums<kDim, kBFloat16>(x, a, shared.grad_out, lane);
  short_store<kDim, kBFloat16>(shared.v, args.dv, base(args.dv), row, x, one, lane);
  short_transposed(shared.ds, row, lane, a);
  short_sums<kDim, kBFloat16>(x, a, shared.q, lane);
  short_store<kDim, kBFloat16>(shared.k, args.dk, base(args.dk), row, x, scale, lane);
}

// Blocks of a processor, by the registers that they take.
constexpr int bwd_short_blocks(int dim, bool mask_gradient) { return (dim == 32 ? 4 : 3) - mask_gradient; }

template <DType kType, int kDim, bool kMaskGradient>
__global__ void __launch_bounds__(kShortThreads, bwd_short_blocks(kDim, kMaskGradient))
    flashsdpa_bwd_short_sm90(const __grid_constant__ BwdShortArgs args) {
  constexpr bool kBFloat16 = kType == DType::kBFloat16;
  extern __shared__ uint8_t memory[];
  const BwdShortShared<kDim> shared(memory);
  const ShortMaskGradient& dmask = args.dmask;
  const int plane = int(blockIdx.x) / dmask.parts, part = int(blockIdx.x) % dmask.parts;
  if constexpr (!kMaskGradient) {
    short_gradients<kBFloat16, kDim, false>(args, shared, plane / args.heads_q, plane % args.heads_q, int(threadIdx.x), nullptr);
    return;
  }
  const int first = int(int64_t(part) * dmask.summed / dmask.parts), last = int(int64_t(part + 1) * dmask.summed / dmask.parts);
  const int plane_heads = dmask.over_heads ? 1 : args.heads_q, summed_heads = dmask.over_heads ? args.heads_q : 1;
  float sum[kShortScores] = {};
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    const int batch = dmask.over_batch ? i / summed_heads : plane / plane_heads;
    const int head = dmask.over_heads ? i % summed_heads : plane % plane_heads;
    __syncthreads();  // all have read what was there before
    short_gradients<kBFloat16, kDim, true>(args, shared, batch, head, int(ptx::anew(threadIdx.x)), sum);
  }

  const int lane = int(threadIdx.x) % ptx::kWarpLanes, query = int(threadIdx.x) / ptx::kWarpLanes * 16 + lane / 4;
  const int64_t start = int64_t(blockIdx.x) * args.seq_q * args.seq_k;
#pragma unroll
  for (int e = 0; e < kShortScores; ++e) {
    const int i = query + 8 * score_row(e), j = 2 * (lane % 4) + score_column(e);
    if (i >= args.seq_q || j >= args.seq_k) continue;
    const int64_t at = start + i * args.seq_k + j;
    if (dmask.parts > 1) {
      dmask.partial[at] = sum[e];
    } else {
      store_as<kBFloat16>(dmask.out, args.mask.dtype, at, sum[e]);
    }
  }
}

// The planes of a mask's gradient, each the sum of its parts in their order.
template <bool kBFloat16>
__global__ void __launch_bounds__(kShortThreads) flashsdpa_bwd_short_mask_sm90(const ShortMaskGradient dmask, DType dtype, int size,
                                                                               int64_t elements) {
  const int64_t at = int64_t(blockIdx.x) * kShortThreads + threadIdx.x;
  if (at >= elements) return;
  const float* partial = dmask.partial + at / size * dmask.parts * size + at % size;
  float sum = 0.f;
#pragma unroll 4
  for (int part = 0; part < dmask.parts; ++part) sum += partial[int64_t(part) * size];
  store_as<kBFloat16>(dmask.out, dtype, at, sum);
}

namespace {

template <DType kType, int kDim, bool kMaskGradient>
const char* launch(const BwdShortArgs& args, uint32_t blocks, int device, cudaStream_t stream) {
  const auto kernel = flashsdpa_bwd_short_sm90<kType, kDim, kMaskGradient>;
  static SharedMemoryGrant grant;
  if (const char* error = grant.ask(kernel, BwdShortShared<kDim>::kBytes, device)) return error;
  kernel<<<blocks, kShortThreads, BwdShortShared<kDim>::kBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

template <DType kType>
const char* launch_of_type(const BwdShortArgs& args, bool narrow, uint32_t blocks, int device, cudaStream_t stream) {
  const auto run = args.dmask.out ? (narrow ? launch<kType, 32, true> : launch<kType, 64, true>)
                                  : (narrow ? launch<kType, 32, false> : launch<kType, 64, false>);
  return run(args, blocks, device, stream);
}

struct Shares {
  int64_t planes = 0;
  ShortMaskGradient dmask{};
};

// Without a gradient of the mask a plane is what one block does: a head of k and v.
Shares share_out(const BackwardParams& b, int processors) {
  const Problem& p = b.problem;
  const int64_t blocks = processors * bwd_short_blocks(short_class(p), /*mask_gradient=*/true);
  Shares shares;
  shares.dmask.out = b.dmask;
  shares.dmask.over_batch = b.dmask && p.mask.size[0] == 1;
  shares.dmask.over_heads = b.dmask && p.mask.size[1] == 1;
  const int64_t summed = (shares.dmask.over_batch ? p.batch : 1) * (shares.dmask.over_heads ? p.heads_q : 1);
  shares.planes = p.batch * p.heads_q / summed;
  shares.dmask.summed = static_cast<int32_t>(summed);
  shares.dmask.parts = static_cast<int32_t>(std::clamp<int64_t>(blocks / shares.planes, 1, summed));
  return shares;
}

}  // namespace

int64_t bwd_short_scratch_bytes(const BackwardParams& b, int processors) {
  const Shares shares = share_out(b, processors);
  const int64_t partials = b.dmask && shares.dmask.parts > 1 ? shares.planes * shares.dmask.parts : 0;
  return partials * b.problem.seq_q * b.problem.seq_k * int64_t{sizeof(float)};
}

const char* bwd_launch_short(const BackwardParams& b, int device, int processors, cudaStream_t stream) {
  const Problem& p = b.problem;
  const Shares shares = share_out(b, processors);
  BwdShortArgs args{};
  short_make_args(p, b.q, b.k, b.v, &args);
  args.grad_out = reach(b.grad_out.data, b.grad_out.stride, {p.batch, p.heads_q, p.seq_q, p.dim_v});
  args.grad_step = b.grad_out.stride[3];
  args.grad_lse = static_cast<const float*>(b.grad_lse);
  args.inputs = b.dv.data != nullptr;
  args.dq = reach(b.dq.data, b.dq.stride, {p.batch, p.heads_q, p.seq_q, p.dim});
  args.dk = reach(b.dk.data, b.dk.stride, {p.batch, p.heads_q, p.seq_k, p.dim});
  args.dv = reach(b.dv.data, b.dv.stride, {p.batch, p.heads_q, p.seq_k, p.dim_v});
  args.grad_scale = static_cast<float>(p.scale);
  args.dmask = shares.dmask;
  args.dmask.partial = static_cast<float*>(b.scratch);
  const bool narrow = short_class(p) == 32;
  const auto blocks = static_cast<uint32_t>(shares.planes * shares.dmask.parts);
  const auto run = p.dtype == DType::kBFloat16 ? launch_of_type<DType::kBFloat16> : launch_of_type<DType::kFloat16>;
  const char* error = run(args, narrow, blocks, device, stream);
  if (error || !b.dmask || shares.dmask.parts == 1) return error;
  const auto size = static_cast<int>(p.seq_q * p.seq_k);
  const int64_t elements = shares.planes * size;
  const auto sum = p.dtype == DType::kBFloat16 ? flashsdpa_bwd_short_mask_sm90<true> : flashsdpa_bwd_short_mask_sm90<false>;
  sum<<<static_cast<uint32_t>(ceil_div(elements, kShortThreads)), kShortThreads, 0, stream>>>(args.dmask, args.mask.dtype, size, elements);
  return error_text(cudaGetLastError());
}

}  // namespace flashsdpa
