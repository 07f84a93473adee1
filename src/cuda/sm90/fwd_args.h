// What the host gives the forward kernel.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashsdpa {

// One of q, k, v, out as the kernel reaches it: through its tensor map, or by ordinary accesses where TMA cannot.
struct FwdTensor {
  uint16_t* data;
  int64_t stride_batch, stride_head, stride_row;  // in elements
  int32_t rows, columns;
  int32_t map_batch, map_head;  // 0 where the axis is left out of the map (a broadcast axis), else 1
  bool tma;
};

// The order in which tiles (query block, head) are visited. Heads go in sections whose K and V fit the L2 cache; in a
// section, all heads of the last query block, then of the block before it, and so on. Where later blocks see more keys
// (`longest_first`) this is done in passes: first the later half of the blocks in all sections, then the later half of
// the rest, ..., so that the tiles left for the end, when blocks run out of work at different times, are short.
struct FwdOrder {
  uint32_t tiles, blocks_m, heads, section;
  bool longest_first;
};

struct FwdArgs {
  CUtensorMap map_q, map_k, map_v, map_out;  // boxes of 64 columns; 64 rows of q and out, kBlockN of k and v
  FwdTensor q, k, v, out;
  float* lse;  // (batch, heads_q, seq_q), natural logarithm
  FwdOrder order;
  uint32_t* counter;  // tiles taken beyond the first of each block, 0 at the start; null: tiles are dealt out in turn
  int32_t heads_q, group;  // query heads, and how many of them share a head of k and v
  int32_t seq_q, seq_k;
  int32_t band_lo, band_hi;  // key j for query i: i + lo <= j <= i + hi; clamped, so that sums fit 32 bits
  float scale;               // > 0; scores are (q . k) * sign * scale
  float sign;                // -1, 0, 1
};

}  // namespace flashsdpa
