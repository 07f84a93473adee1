// From scores to P and dS, in the accumulator layout of wgmma (see fwd_softmax.cuh), for both arrangements of the
// backward: rows of a lane are keys and columns queries, or rows are queries and columns keys.
#pragma once

#include "../../ptx/arithmetic.cuh"
#include "bwd_shared.cuh"
#include "fwd_softmax.cuh"

namespace flashsdpa {

// The stats of one block of queries, in shared memory.
template <int kBlockM>
struct BwdStats {
  uint32_t base;
  __device__ uint32_t shift(int query) const { return base + 4 * bwd_stat_place(query); }
  __device__ uint32_t delta(int query) const { return shift(kBlockM + query); }
  __device__ uint32_t high(int query) const { return shift(2 * kBlockM + query); }
  // A flag of this lane for any_coarse, read before it is needed.
  __device__ float coarse(int lane) const {
    return ptx::load_shared_float(base + 4 * (kBwdStats * kBlockM + lane % kBwdFlags));
  }
};
// Which of a lane's four stats of 16 columns is that of accumulator i < 8 of these.
__device__ constexpr int stat_of(int i) { return i / 4 * 2 + i % 2; }

// Whether any row of the block has a log-sum-exp that must be taken off before anything else; for the whole warp.
__device__ inline bool any_coarse(float flag) { return __any_sync(0xffffffffu, flag != 0.f); }

// Rows are queries: removes what the band or the end of the keys leaves out. `query`, `key`: the lane's first of each.
template <int kCount>
__device__ inline void mask_band(const BwdArgs& args, float (&s)[kCount], int query, int key) {
  int first[2], last[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    first[r] = query + 8 * r + args.band_lo - key;
    last[r] = min(query + 8 * r + args.band_hi, args.seq_k - 1) - key;
  }
  mask_before(s, first);
  mask_after(s, last);
}

// A score of a row with `high`, so that scaled, less the row's shift, it is what it should be. The scaled score is
// rounded as the log-sum-exp was: their difference may be far smaller than one rounding of either. It is not positive
// but by rounding, which at this magnitude may be more than exp2 can hold.
__device__ inline float coarse_score(const BwdArgs& args, float score, float high) {
  const float below = fminf(ptx::subtract(score * args.scale, high), 0.f) * args.inverse_scale;
  return high == 0.f ? score : below;
}

}  // namespace flashsdpa
