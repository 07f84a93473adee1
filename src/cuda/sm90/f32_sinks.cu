// The gradient of the sinks in float32: a row's sink has a weight as its keys have, and no value.
#include "f32_backward.cuh"
#include "f32_instances.h"

namespace flashsdpa {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / ptx::kWarpLanes, kSharedBytes = kWarps * int(sizeof(float));

}  // namespace

// One block for each head, so that the order of a sum is fixed.
__global__ void __launch_bounds__(kThreads)
    flashsdpa_bwd_sinks_f32_sm90(const __grid_constant__ F32Args args, float* dsinks, int64_t batch) {
  extern __shared__ uint8_t memory[];
  const uint32_t sums = ptx::shared_address(memory);
  const int head = int(blockIdx.x), warp = int(threadIdx.x) / ptx::kWarpLanes,
            lane = int(threadIdx.x) % ptx::kWarpLanes;
  double sum = 0.0;
  for (int64_t b = 0; b < batch; ++b) {
    const float sink = value_of_head(args.terms.sinks, int(b), head);
    const int64_t rows_before = (b * args.heads_q + head) * args.seq_q;
#pragma unroll 4
    for (int row = int(threadIdx.x); row < args.seq_q; row += kThreads) {
      const int64_t at = rows_before + row;
      sum += double(f32_weight(sink, args.stats.lse[at], args.stats.shift[at]) * args.stats.delta[at]);
    }
  }
  for (int bit = 1; bit < ptx::kWarpLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  if (lane == 0) ptx::store_shared_4(sums + 4 * warp, __float_as_uint(float(sum)));
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0.0;
  for (int w = 0; w < kWarps; ++w) sum += double(ptx::load_shared_float(sums + 4 * w));
  dsinks[head] = float(-sum);
}

const char* f32_run_sinks(const F32Args& args, float* dsinks, int64_t batch, cudaStream_t stream) {
  flashsdpa_bwd_sinks_f32_sm90<<<static_cast<uint32_t>(args.heads_q), kThreads, kSharedBytes, stream>>>(args, dsinks,
                                                                                                        batch);
  return error_text(cudaGetLastError());
}

}  // namespace flashsdpa
