// What the host gives the backward kernels, and how their scratch memory is laid out.
#pragma once

#include "fwd_args.h"
#include "score_terms.h"

namespace flashsdpa {

// Of each block of queries, prepared by the first kernel, kBlockM floats each:
//   shift  what the exponent of a row is less than its score, base 2; +inf: the row takes no part
//   delta  rowsum(out * grad_out) - grad_lse
//   high   0; or, where |lse| > kBwdCoarse, lse itself, taken off the scaled score before anything else; `shift` is then
//          the logarithm of the sum of what is left
// then four floats, one of which is not 0 if any `high` is not.
constexpr float kBwdCoarse = 4096.f;
constexpr int kBwdStats = 3, kBwdFlags = 4;
// Where a query's float is among those of its block: what a lane needs for 16 columns of a wgmma accumulator, 2 c, 2 c + 1,
// 2 c + 8 and 2 c + 9, lies together.
__host__ __device__ constexpr int bwd_stat_place(int query) {
  return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2;
}

// dQ is summed in pieces of 64 x 64 floats (the last of a row of pieces may be narrower), each in the order of a wgmma
// accumulator: four registers of all threads of a warpgroup, then the next four. Pieces of one query block follow
// each other.
constexpr int kBwdPiece = 64;
constexpr int kBwdPieceFloats = kBwdPiece * kBwdPiece;

struct BwdArgs {
  CUtensorMap map_q, map_grad_out;            // boxes of 64 columns and kBlockM rows
  CUtensorMap map_k, map_v, map_dk, map_dv;   // kBlockN rows
  FwdTensor q, k, v, grad_out, dk, dv;        // grad_out goes by TMA always
  const float* stats;    // (batch, heads_q, blocks_m, kBwdStats * kBlockM + kBwdFlags)
  float* dq;             // (batch, heads_q, blocks_m, kBlockM * kDim), see above; zero at the start
  uint32_t* turns;       // (batch, heads_q, blocks_m, adders), 0 at the start: whose turn it is to add to dq (bwd_turn); null: any
  uint32_t* counter;     // tiles taken; at the start, unless there are turns, one for each block, which begins with the tile of its number
  FwdOrder order;        // of key blocks and heads of k
  int32_t heads_q, heads_kv, group;  // group: query heads that share a head of k and v
  int32_t seq_q, seq_k, blocks_m;
  int32_t band_lo, band_hi;  // key j for query i: i + lo <= j <= i + hi; clamped, so that sums fit 32 bits
  float scale;               // > 0; scores are (q . k) * sign * scale
  float scale_log2;          // times log2(e)
  float inverse_scale;       // finite
  float sign;                // -1, 0, 1
  float grad_scale;          // the caller's scale: of dq and dk
  FwdMask mask;              // masked kernels; with values, scale is 1 and sign the scale itself
  ScoreTerms terms;          // kernels with terms; with a cap or slopes, scale and sign are 1, for the terms scale; else the terms do not
  uint32_t spread;  // a tile begins with the block of queries that is row * spread / 2^32 behind the first of its band
  // Masked kernels, last so that the others find all else where they would: an additive mask of q's type, if TMA reaches it and
  // it has all queries and keys. Boxes of a granule.
  CUtensorMap map_values;
  FwdTensor values;
};

// The kernels before and after: one block of threads for each block of queries.
struct BwdPreArgs {
  const uint16_t* out;
  const uint16_t* grad_out;
  const float* lse;       // (batch, heads_q, seq_q)
  const float* grad_lse;  // the same, or null
  int64_t out_stride[3], grad_stride[4];  // batch, head, row (, column)
  const uint16_t* q;  // for rows with a `high`
  const uint16_t* k;
  int64_t q_stride[3], k_stride[3];
  int32_t group, dim, seq_k, band_lo, band_hi;
  float scale;
  uint16_t* grad_copy;    // (batch, heads_q, seq_q, copy_columns), where TMA cannot read grad_out; else null
  int32_t copy_columns;
  float* stats;
  float* dq;
  uint32_t* turns;
  uint32_t* counter;
  uint32_t tiles_taken;  // what the counter starts with
  int32_t turns_per_block, dq_floats;  // of one block of queries
  int32_t heads_q, seq_q, blocks_m, block_m, dim_v;
  FwdMask mask;  // masked kernels, for rows with a `high`
  ScoreTerms terms;   // kernels with terms: the same, and the sinks
  float* sink_sums;   // (batch, heads_q, blocks_m): of a block's rows, the sum of (sink's weight) * delta; or null
};

// From those to the gradient of the sinks.
struct BwdSinksArgs {
  const float* sink_sums;  // (batch, heads_q, blocks_m)
  float* dsinks;           // (heads_q)
  int64_t batch;
  int32_t heads_q, blocks_m;
};

struct BwdPostArgs {
  const float* dq_sum;  // as BwdArgs::dq
  uint16_t* dq;
  int64_t stride[3];    // batch, head, row
  int32_t heads_q, seq_q, blocks_m, block_m, dim, dim_class;
  float scale;
};

}  // namespace flashsdpa
