// What the host gives the forward kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../params.h"
#include "score_terms.h"

namespace flashsdpa {

constexpr int kConsumerRows = 64;   // of one consumer warpgroup: the M of wgmma
constexpr int kMaxFwdSplits = 128;  // about as many as there are processors

// One of q, k, v, out as the kernel reaches it: through its tensor map, or by accesses of its own where TMA cannot.
struct FwdTensor {
  uint16_t* data;
  int64_t stride_batch, stride_head, stride_row;  // in elements
  int32_t rows, columns;
  int32_t map_batch, map_head;  // 0 where the axis is left out of the map (a broadcast axis), else 1
  bool tma;
  bool words;  // every row starts at a multiple of 4 bytes
};

// The order in which tiles (query block, head) are visited. Heads go in sections whose K and V fit the L2 cache; in a
// section, all heads of the last query block, then of the block before it, and so on. Where later blocks see more keys
// (`longest_first`) this is done in passes: first the later half of the blocks in all sections, then the later half of
// the rest, ..., so that the tiles left for the end, when blocks run out of work at different times, are short. With a mask alone,
// of whose rows nothing is known here, there are no passes, and the last section takes the heads that are left over.
struct FwdOrder {
  uint32_t tiles, blocks_m, heads, section;  // few queries: `tiles` counts a tile once for each split
  bool longest_first;
};

// Results of a part of the keys of every row; rows are numbered (batch, query head, query).
struct FwdPartial {
  float* out;     // (splits, rows, row_floats): the sum of exp(score - max) * v; past the columns of v zeros
  float* weight;  // (splits, rows, 2): max, a reference in units of unscaled scores, and the sum of exp(score - max)
  int32_t rows;
  int32_t row_floats;  // columns of v rounded up to a multiple of 4, so that rows are 16-byte aligned
};

// What kernels for few queries (FwdTile::kFew) are told besides. There a "head" of the order of tiles is a pack: `pack`
// of the query heads that share a head of k and v, side by side, so that row r of a consumer is head r % pack of the
// pack and query r / pack. And a piece of work is a tile against one of `splits` parts of its keys.
struct FwdFew {
  int32_t heads_q, group;  // query heads, and how many of them share a head of k and v
  int32_t pack;
  int32_t queries;  // of a consumer: 64 / pack, rounded down; rows from pack * queries on stand for nothing
  int32_t splits;   // 1: the output is final
  FwdPartial partial;
};

// Which masks a kernel takes: none; bool ones, of which the plan's bits say all; additive ones too.
enum class Masks { kNone, kBits, kValues };

// What masked kernels (FwdTile::kMasked) are told besides: the mask plan (mask_plan.h), and an additive mask itself. The stride
// of an axis of size 1 is 0.
struct FwdMask {
  const int32_t* plan;
  int64_t plan_batch, plan_head;     // strides, in words
  int64_t bits_offset, bits_stride;  // from the start of a plan; from query to query; in words
  const void* values;                // null: the bits say it all
  int64_t stride_batch, stride_head, stride_query, stride_key;  // of the values, in elements
  DType dtype;                                                  // of the values
  int32_t queries, keys;                                        // of the mask: 1 stands for all
  int32_t cols;                                                 // granules of keys
  bool one_key;                                                 // keys is 1
  bool vectors;                                                 // values can be read 16 bytes at a time
  int32_t rows;                                                 // granules of queries
};

struct FwdArgs {
  // Boxes of 64 columns; 64 rows of q and out (few queries: `queries` times `pack` heads), kBlockN of k and v.
  CUtensorMap map_q, map_k, map_v, map_out;
  FwdTensor q, k, v, out;
  float* lse;  // (batch, heads_q, seq_q), natural logarithm
  FwdOrder order;
  uint32_t* counter;  // tiles taken beyond the first of each block, 0 at the start; null: tiles are dealt out in turn
  int32_t heads_q, group;  // heads in the order of tiles, and how many of them share a head of k and v
  int32_t seq_q, seq_k;
  int32_t band_lo, band_hi;  // key j for query i: i + lo <= j <= i + hi; clamped, so that sums fit 32 bits
  float scale;               // > 0; scores are (q . k) * sign * scale
  float sign;                // -1, 0, 1; with an additive mask scale is 1 and this is the scale itself
  FwdFew few;
  FwdMask mask;
  uint32_t mask_sections;  // masked: sections of heads; the last may be longer
  uint32_t batches;        // masked, if not 0: a head's tiles of all batches come together, as they share values of the mask
  ScoreTerms terms;        // kernels with terms; where they change scores, scale and sign above are 1
};

}  // namespace flashsdpa
