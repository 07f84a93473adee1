// Which scores of a tile a mask or band removes: found before the products, so that these skip what is removed at the
// ends of a strip of rows, and applied to S^T after them.
#pragma once

#include "score_terms.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

constexpr uint64_t low_bits(int count) { return count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1; }

// The rows of a tile in strips as wide as the usual micro-tile of gemm.h; keys [first, last) of a strip take part.
template <typename T>
constexpr int kStripRows = std::max(8, 2 * kLanes<T>);
template <typename T>
struct Spans {
  static constexpr int kStrips = kTile / kStripRows<T>;
  int first[kStrips], last[kStrips];
  bool uniform = true;  // every strip has the span of the first

  static Spans none() {
    Spans s;
    for (int i = 0; i < kStrips; ++i) s.first[i] = INT32_MAX, s.last[i] = 0;
    return s;
  }
  // Widens strip i by [lo, hi), if that is not empty.
  void join(int i, int lo, int hi) {
    if (lo < hi) first[i] = std::min(first[i], lo), last[i] = std::max(last[i], hi);
  }
  // Ends of spans to multiples of `step`, inside [0, keys); empty spans become [0, 0).
  void finish(int rows, int step, int keys) {
    uniform = true;
    for (int i = 0; i * kStripRows<T> < rows; ++i) {
      if (first[i] >= last[i]) first[i] = last[i] = 0;
      first[i] = first[i] / step * step;
      last[i] = std::min((last[i] + step - 1) / step * step, keys);
      uniform &= first[i] == first[0] && last[i] == last[0];
    }
  }
  // Calls visit(first row, last row, first key, last key) for as few blocks as cover the spans within rows [r0, r1),
  // which begin with a strip, and keys [lo, hi).
  template <typename Visit>
  void for_each_block(int r0, int r1, int lo, int hi, const Visit& visit) const {
    const int width = uniform ? r1 - r0 : kStripRows<T>;
    for (int r = r0; r < r1; r += width) {
      const int a = std::max(first[r / kStripRows<T>], lo), b = std::min(last[r / kStripRows<T>], hi);
      if (a < b) visit(r, std::min(r1, r + width), a, b);
    }
  }
};

// Rows to columns: bit c of word r becomes bit r of word c. Swaps blocks of 32, 16, ... (Hacker's Delight, 7-3).
inline void transpose_bits(uint64_t (&w)[kTile]) {
  uint64_t low = low_bits(32);
  for (int size = 32; size > 0; size >>= 1, low ^= low << size)
    for (int base = 0; base < kTile; base += 2 * size)
      for (int i = base; i < base + size; ++i) {
        const uint64_t moved = ((w[i] >> size) ^ w[i + size]) & low;
        w[i + size] ^= moved;
        w[i] ^= moved << size;
      }
}

// Bit i: whether byte i of `count` (at most 64) contiguous ones is not zero.
inline uint64_t nonzero_bits(const uint8_t* bytes, int count) {
  uint8_t whole[kTile] = {};
  if (count < kTile) bytes = static_cast<const uint8_t*>(std::memcpy(whole, bytes, size_t(count)));
  uint64_t bits = 0;
#if defined(__AVX2__)
  for (int i = 0; i < kTile; i += 32) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
    const uint32_t zero = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())));
    bits |= uint64_t(~zero) << i;
  }
#else
  for (int i = 0; i < kTile; ++i) bits |= uint64_t(bytes[i] != 0) << i;
#endif
  return bits;
}

// Lane i: whether bit r + i of the word is set.
template <typename T>
inline IntVec<T> lanes_of(uint64_t word, int r) {
  IntVec<T> lane_bit;
  for (int i = 0; i < kLanes<T>; ++i) lane_bit[i] = 1 << i;
  const auto bits = typename SimdOf<T>::Lane(word >> r);
  return ((bits - IntVec<T>{}) & lane_bit) != 0;
}

// The scores of one S^T tile (keys x rows) that stay: bit r of word j for row r, key j.
struct KeptScores {
  bool all;  // the words are not filled then
  uint64_t of_key[kTile];

  void start(const RowTile& tile) {
    if (!all) return;
    all = false;
    for (uint64_t& word : of_key) word = low_bits(tile.rows);
  }

  // The band: for each key, a run of queries.
  void cut_band(const Problem& p, const RowTile& tile, int64_t first_key, int keys) {
    if (first_key >= tile.query_max + p.band.lo && first_key + keys - 1 <= tile.query_min + p.band.hi) return;
    start(tile);
    const int64_t queries = tile.query_max - tile.query_min + 1;
    for (int j = 0; j < keys; ++j) {
      const int64_t key = first_key + j - tile.query_min;
      const int low = int(std::clamp<int64_t>(key - p.band.hi, 0, queries));
      const int high = int(std::clamp<int64_t>(key - p.band.lo + 1, low, queries));
      of_key[j] &= (low_bits(high) & ~low_bits(low)) * tile.each_head;
    }
  }

  // The bits of the plan.
  void cut_bits(const Problem& p, const RowTile& tile, int64_t first_key, int keys) {
    const MaskView& m = p.mask;
    const int64_t rows = plan_granules(m.size[2]), cols = plan_granules(m.size[3]), step = plan_bits_stride(cols);
    const int32_t* bits = p.plan.data + (m.size[0] == 1 ? 0 : tile.batch) * p.plan.stride_batch +
                          plan_bits_offset(rows, cols) + (m.size[3] == 1 ? 0 : first_key / kGranule * 2);
    uint64_t words[kTile] = {};
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t head = m.size[1] == 1 ? 0 : tile.head[r], query = m.size[2] == 1 ? 0 : tile.query[r];
      std::memcpy(&words[r], bits + head * p.plan.stride_head + query * step, sizeof words[r]);
    }
    transpose_bits(words);
    start(tile);
    for (int j = 0; j < keys; ++j) of_key[j] &= words[j];
  }

  // A bool mask, whatever its strides: along rows, along columns, or neither.
  void cut_mask(const Problem& p, const RowTile& tile, int64_t first_key, int keys) {
    const MaskView& m = p.mask;
    const auto at = [&](int r, int j) {
      return static_cast<const uint8_t*>(m.data) + tile.batch * m.stride[0] + tile.head[r] * m.stride[1] +
             tile.query[r] * m.stride[2] + (first_key + j) * m.stride[3];
    };
    start(tile);
    if (m.stride[2] == 1 && m.stride[3] != 1 && tile.one_head) {
      for (int j = 0; j < keys; ++j) of_key[j] &= nonzero_bits(at(0, j), tile.rows);
      return;
    }
    uint64_t words[kTile] = {};
    for (int r = 0; r < tile.rows; ++r) {
      if (m.stride[3] == 1) {
        words[r] = r > 0 && at(r, 0) == at(r - 1, 0) ? words[r - 1] : nonzero_bits(at(r, 0), keys);
      } else {
        for (int j = 0; j < keys; ++j) words[r] |= uint64_t(*at(r, j) != 0) << j;
      }
    }
    transpose_bits(words);
    for (int j = 0; j < keys; ++j) of_key[j] &= words[j];
  }

  // Adds the tile's keys, `offset` further on, to the spans; false if nothing stays.
  template <typename T>
  bool join_spans(const RowTile& tile, int keys, int offset, Spans<T>& spans) const {
    bool any_stays = false;
    for (int i = 0; i * kStripRows<T> < tile.rows; ++i) {
      int lo = 0, hi = keys;
      if (!all) {
        const uint64_t strip = low_bits(kStripRows<T>) << i * kStripRows<T>;
        while (lo < hi && !(of_key[lo] & strip)) ++lo;
        while (lo < hi && !(of_key[hi - 1] & strip)) --hi;
      }
      any_stays |= lo < hi;
      spans.join(i, offset + lo, offset + hi);
    }
    return any_stays;
  }

  // S^T = -inf where a score of rows [r0, r1) goes, whatever it held.
  template <typename T>
  void apply(T* st, const RowTile& tile, int r0, int r1, int keys) const {
    if (all) return;
    for (int j = 0; j < keys; ++j) {
      if (of_key[j] == low_bits(tile.rows)) continue;
      T* row = st + j * kTileStride;
      for (int r = r0; r < r1; r += kLanes<T>)
        store(row + r, lanes_of<T>(of_key[j], r) ? load(row + r) : splat(kNegInf<T>));
    }
  }
};

// Calls visit with a value of the bias's type.
template <typename Visit>
inline void with_bias_type(const MaskView& mask, const Visit& visit) {
  switch (mask.dtype) {
    case DType::kFloat32: return visit(float());
    case DType::kBFloat16: return visit(BFloat16());
    case DType::kFloat16: return visit(Float16());
    case DType::kFloat64: return visit(double());
    case DType::kBool: return;
  }
}

// S^T += bias^T in rows [r0, r1). A removed score (-inf) stays removed, whatever K held.
template <typename Bias, typename T>
inline void add_bias(T* st, const Problem& p, const RowTile& tile, int r0, int r1, int64_t first_key, int keys) {
  const MaskView& m = p.mask;
  const int64_t step = m.stride[3];
  for (int r = r0; r < r1; r += 8) {
    const Bias* row[8];
    for (int i = 0; i < 8; ++i) {
      const int at = std::min(r + i, tile.rows - 1);
      row[i] = static_cast<const Bias*>(m.data) + tile.batch * m.stride[0] + tile.head[at] * m.stride[1] +
               tile.query[at] * m.stride[2] + first_key * step;
    }
    for (int j = 0; j < keys; j += 8) {
      const int count = std::min(8, keys - j);
      Octet<T> block[8];
      for (int i = 0; i < 8; ++i) block[i] = __builtin_convertvector(octet(row[i] + j * step, step, count), Octet<T>);
      transpose8(block);
      for (int i = 0; i < count; ++i) {
        T* score = st + (j + i) * kTileStride + r;
        store8(score, block[i] == kNegInf<T> ? block[i] : load8(score) + block[i]);
      }
    }
  }
}

// What one (row tile, key tile) loses: kept scores first, the bias of a mixed granule after the product, behind the cap
// and the slopes.
struct TileMask {
  KeptScores kept;
  bool biased;

  void find(const Problem& p, const RowTile& tile, int granule_class, int64_t first_key, int keys) {
    kept.all = true;
    biased = granule_class == kMixed && p.mask.data && p.mask.dtype != DType::kBool;
    if (granule_class == kBits || (granule_class == kMixed && !biased)) {
      if (p.plan.data) {
        kept.cut_bits(p, tile, first_key, keys);
      } else {
        kept.cut_mask(p, tile, first_key, keys);
      }
    }
    kept.cut_band(p, tile, first_key, keys);
  }
  template <typename T>
  void apply(T* st, const Problem& p, const RowTile& tile, int r0, int r1, int64_t first_key, int keys,
             T* tanhs = nullptr) const {
    if (p.softcap > 0.0) cap_scores(st, T(p.softcap), r0, r1, keys, tanhs);
    if (p.slopes.data) add_slopes(st, p, tile, r0, r1, first_key, keys);
    if (biased)
      with_bias_type(p.mask, [&](auto type) { add_bias<decltype(type)>(st, p, tile, r0, r1, first_key, keys); });
    kept.apply(st, tile, r0, r1, keys);
  }
};

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
