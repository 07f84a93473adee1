// Forward attention of short sequences (short.h): out = softmax(q k^T * scale + mask) v and its log-sum-exp.
#include "short_host.h"
#include "short_tile.cuh"

namespace flashsdpa {

template <DType kType, int kDim>
__global__ void __launch_bounds__(kShortThreads, kDim == 32 ? 5 : 4) flashsdpa_fwd_short_sm90(const __grid_constant__ FwdShortArgs args) {
  using Tile = ShortTile<kDim>;
  constexpr bool kBFloat16 = kType == DType::kBFloat16;
  extern __shared__ uint8_t memory[];
  const uint32_t q = (ptx::shared_address(memory) + 127) & ~127u, k = q + Tile::kBytes, v = k + Tile::kBytes;
  const int thread = int(threadIdx.x), lane = thread % ptx::kWarpLanes, first_row = thread / ptx::kWarpLanes * 16;
  const int head = int(blockIdx.x % uint32_t(args.heads_q)), batch = int(blockIdx.x / uint32_t(args.heads_q));
  const int head_kv = head / args.group, query = first_row + lane / 4;

  short_load<kDim>(q, args.q, batch * args.q.stride_batch + head * args.q.stride_head, thread);
  short_load<kDim>(k, args.k, batch * args.k.stride_batch + head_kv * args.k.stride_head, thread);
  short_load<kDim>(v, args.v, batch * args.v.stride_batch + head_kv * args.v.stride_head, thread);
  float m[kShortScores], s[kShortScores], o[kDim / 2];
  if (args.mask.data) short_mask<kBFloat16>(args, batch, head, query, lane, m);
  ptx::copy_async_wait();
  __syncthreads();
  if (first_row >= args.seq_q) return;

  short_scores<kDim, kBFloat16>(s, q, first_row, k, lane);
  short_finish(args, query, lane, m, s);
  OnlineSoftmax softmax;
  uint32_t p[kShortRows / 16][4];
  float factor[2];  // nothing was summed before
  const auto keep = [](int, uint32_t pair) { return pair; };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    softmax.sum[r] = softmax.template raise<kBFloat16>(r, s, args.scale * 1.4426950408889634f, p, keep, factor[r]);
  }
  short_sums<kDim, kBFloat16>(o, p, v, lane);
  softmax.reduce();
  float* lse = args.lse + int64_t(blockIdx.x) * args.seq_q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    factor[r] = softmax.inverse(r);
    if (lane % 4 == 0 && query + 8 * r < args.seq_q) lse[query + 8 * r] = softmax.log_sum_exp(r, args.scale);
  }
  // In the place of this warp's rows of Q.
  short_store<kDim, kBFloat16>(q, args.out, batch * args.out.stride_batch + head * args.out.stride_head, first_row, o, factor, lane);
}

namespace {

template <DType kType, int kDim>
const char* launch(const FwdShortArgs& args, uint32_t blocks, cudaStream_t stream) {
  constexpr int kSharedBytes = 3 * ShortTile<kDim>::kBytes + 128;  // 128: to align the base
  const auto kernel = flashsdpa_fwd_short_sm90<kType, kDim>;
  kernel<<<blocks, kShortThreads, kSharedBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

}  // namespace

const char* fwd_launch_short(const ForwardParams& f, cudaStream_t stream) {
  const Problem& p = f.problem;
  FwdShortArgs args{};
  short_make_args(p, f.q, f.k, f.v, &args);
  args.out = reach(f.out.data, f.out.stride, {p.batch, p.heads_q, p.seq_q, p.dim_v});
  args.lse = static_cast<float*>(f.lse);
  const bool narrow = short_class(p) == 32, bfloat16 = p.dtype == DType::kBFloat16;
  const auto run = narrow ? (bfloat16 ? launch<DType::kBFloat16, 32> : launch<DType::kFloat16, 32>)
                          : (bfloat16 ? launch<DType::kBFloat16, 64> : launch<DType::kFloat16, 64>);
  return run(args, static_cast<uint32_t>(p.batch * p.heads_q), stream);
}

}  // namespace flashsdpa
