// The mask plan: what a dense mask rules out, in granules of 64 queries x 64 keys, for the forward (rows of granules)
// and the backward (columns), and one bit for each score that the mask keeps. One format for every kernel, CPU and CUDA.
//
// int32 words of one (mask batch, mask head), with rows = ceil(mask.size[2] / 64), cols = ceil(mask.size[3] / 64):
//   [0]                          version
//   [1], [2], [3]                counts of empty, full, and all other granules
//   4 + r * (1 + cols) ...       row r: its count of non-empty granules, then that many entries, keys ascending
//   4 + rows * (1 + cols)
//     + c * (1 + rows) ...       column c: the same over query granules (the transposed list)
//   plan_bits_offset ...         bits: for each query of the mask, cols words of 64 bits, low half first, and one more word,
//                                0, if cols is odd; bit k of word c is 1 if key 64 c + k keeps its score
// An entry is granule_index << 2 | class. Words past a list's count, and bits past the last key, are zero. A mask axis of
// size 1 broadcasts: it has one granule, which speaks for every granule of that axis, one row of bits for every query, or
// one bit, 64 times, for every key.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashsdpa {

constexpr int64_t kGranule = 64;
constexpr int32_t kPlanVersion = 2;
constexpr int64_t kPlanHeader = 4;

enum GranuleClass : int32_t {
  kEmpty = 0,  // every score removed (False, -inf)
  kFull = 1,   // nothing to do (True, +0 or -0)
  kMixed = 2,  // a bias: some value is added to a score
  kBits = 3,   // some scores are removed, the others left alone: the bits say it all
};

// Int: int64_t, or a symbolic integer.
template <typename Int>
FLASHSDPA_HOST_DEVICE inline Int plan_granules(Int size) {
  return (size + Int(kGranule - 1)) / Int(kGranule);
}
FLASHSDPA_HOST_DEVICE inline int64_t plan_row_offset(int64_t row, int64_t cols) {
  return kPlanHeader + row * (1 + cols);
}
template <typename Int>
FLASHSDPA_HOST_DEVICE inline Int plan_col_offset(Int col, Int rows, Int cols) {
  return Int(kPlanHeader) + rows * (cols + Int(1)) + col * (rows + Int(1));
}
// The bits of one query start at a multiple of 16 bytes.
template <typename Int>
FLASHSDPA_HOST_DEVICE inline Int plan_bits_offset(Int rows, Int cols) {
  return (plan_col_offset(cols, rows, cols) + Int(3)) / Int(4) * Int(4);
}
template <typename Int>
FLASHSDPA_HOST_DEVICE inline Int plan_bits_stride(Int cols) {  // from query to query
  return (cols + Int(1)) / Int(2) * Int(4);
}
template <typename Int>
FLASHSDPA_HOST_DEVICE inline Int plan_words(Int mask_seq_q, Int mask_seq_k) {
  const Int rows = plan_granules(mask_seq_q), cols = plan_granules(mask_seq_k);
  return plan_bits_offset(rows, cols) + mask_seq_q * plan_bits_stride(cols);
}

}  // namespace flashsdpa
