// What every CPU pass does with one tile: its rows, and which key tiles it visits. masking.h says which scores it
// loses.
//
// Scores are kept transposed, S^T (keys x query rows): K and V are read in the order they lie in memory, and the
// softmax runs along the vectors, without a reduction inside one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "../mask_plan.h"
#include "../kernel_table.h"
#include "transpose.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

constexpr int kTile = int(kGranule);     // query rows and keys of a tile
constexpr int kTileStride = kTile + kVectorBytes / 4;  // row stride of S^T and Q^T in elements: 64 would alias in L1
template <typename T>
constexpr T kNegInf = -std::numeric_limits<T>::infinity();

template <typename T>
constexpr int64_t padded(int64_t cols) {  // row stride of a tile of `cols` columns
  return (cols + kLanes<T> - 1) / kLanes<T> * kLanes<T> + 16;
}

// Up to 64 query rows that share one K and V head: queries of one head, or (decode) the few queries of several heads.
struct RowTile {
  int rows = 0;
  int64_t batch = 0;
  int64_t head[kTile];
  int64_t query[kTile];
  int64_t query_min = 0, query_max = 0;
  bool one_head = true;
  uint64_t each_head = 1;  // bit h * seq_q set for each head h: times the bits of one head's queries, those of the tile

  static RowTile of_head(int64_t batch, int64_t head, int64_t first, int64_t seq_q) {
    RowTile t;
    t.batch = batch;
    t.rows = int(std::min<int64_t>(kTile, seq_q - first));
    for (int r = 0; r < t.rows; ++r) t.head[r] = head, t.query[r] = first + r;
    t.query_min = first;
    t.query_max = first + t.rows - 1;
    return t;
  }
  static RowTile of_group(int64_t batch, int64_t first_head, int64_t heads, int64_t seq_q) {
    RowTile t;
    t.batch = batch;
    t.rows = int(heads * seq_q);
    for (int r = 0; r < t.rows; ++r) t.head[r] = first_head + r / seq_q, t.query[r] = r % seq_q;
    t.query_max = seq_q - 1;
    t.one_head = heads == 1;
    t.each_head = 0;
    for (int r = 0; r < t.rows; r += int(seq_q)) t.each_head |= uint64_t(1) << r;
    return t;
  }
};

template <typename In>
inline const In* row_of(const ConstView& x, int64_t b, int64_t h, int64_t s) {
  return static_cast<const In*>(x.data) + b * x.stride[0] + h * x.stride[1] + s * x.stride[2];
}
template <typename In>
inline In* row_of(const View& x, int64_t b, int64_t h, int64_t s) {
  return static_cast<In*>(x.data) + b * x.stride[0] + h * x.stride[1] + s * x.stride[2];
}

// dst (rows x stride) = x[b, h, first ..., 0 .. cols)
template <typename In, typename T>
inline void load_tile(T* dst, int64_t stride, const ConstView& x, int64_t b, int64_t h, int64_t first, int rows,
                      int64_t cols) {
  for (int r = 0; r < rows; ++r) load_row(dst + r * stride, row_of<In>(x, b, h, first + r), cols);
}

// dst (cols x kTileStride) = the tile's rows of x, transposed and scaled; missing rows up to the next vector are zero.
template <typename In, typename T>
inline void load_transposed(T* dst, const ConstView& x, const RowTile& tile, int64_t cols, T scale) {
  const int64_t step = x.stride[3];
  for (int r = 0; r < tile.rows; r += 8) {
    const In* row[8];
    for (int i = 0; i < 8; ++i) {
      const int at = std::min(r + i, tile.rows - 1);
      row[i] = row_of<In>(x, tile.batch, tile.head[at], tile.query[at]);
    }
    for (int64_t c = 0; c < cols; c += 8) {
      const int count = int(std::min<int64_t>(8, cols - c));
      Octet<T> block[8];
      for (int i = 0; i < 8; ++i)
        block[i] = r + i < tile.rows ? octet(row[i] + c * step, step, count) * scale : Octet<T>{};
      transpose8(block);
      for (int i = 0; i < count; ++i) store8(dst + (c + i) * kTileStride + r, block[i]);
    }
  }
  for (int r = (tile.rows + 7) / 8 * 8; r % kLanes<T> != 0; ++r)
    for (int64_t c = 0; c < cols; ++c) dst[c * kTileStride + r] = T(0);
}

// The keys a tile's band admits at all, in key tiles [first, last).
struct KeyRange {
  int64_t first, last;
};
inline KeyRange key_range(const Problem& p, const RowTile& tile) {
  const int64_t lo = std::max<int64_t>(0, tile.query_min + p.band.lo);
  const int64_t hi = std::min<int64_t>(p.seq_k - 1, tile.query_max + p.band.hi);
  return hi < lo ? KeyRange{0, 0} : KeyRange{lo / kTile, hi / kTile + 1};
}

// Walks one row of the plan: the class of key tile kb, for kb ascending.
class PlanCursor {
 public:
  PlanCursor() = default;
  PlanCursor(const Problem& p, const RowTile& tile) {
    const MaskView& m = p.mask;
    if (!has_mask(p)) return;
    fixed_ = kMixed;
    if (!p.plan.data || (!tile.one_head && m.size[1] > 1)) return;
    const int64_t row = m.size[2] == 1 ? 0 : tile.query_min / kGranule;
    const int32_t* list = p.plan.data + (m.size[0] == 1 ? 0 : tile.batch) * p.plan.stride_batch +
                          (m.size[1] == 1 ? 0 : tile.head[0]) * p.plan.stride_head +
                          plan_row_offset(row, plan_granules(m.size[3]));
    if (m.size[3] == 1) {
      fixed_ = list[0] ? list[1] & 3 : kEmpty;
      return;
    }
    fixed_ = -1;
    next_ = list + 1;
    end_ = next_ + list[0];
  }
  int at(int64_t kb) {
    if (fixed_ >= 0) return fixed_;
    while (next_ != end_ && (*next_ >> 2) < kb) ++next_;
    return next_ != end_ && (*next_ >> 2) == kb ? *next_ & 3 : kEmpty;
  }

 private:
  int fixed_ = kFull;
  const int32_t* next_ = nullptr;
  const int32_t* end_ = nullptr;
};

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
