// Attention of the few query rows of a decoding step: bound by reading K and V, which are read once, in place where
// their rows are whole vectors. Vectors run along the head dim here: tiles of S^T would leave most lanes idle.
#pragma once

#include "attend.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

constexpr int kFewRows = 16;  // beyond them the tiles of attend.h are faster

// The lanes folded by `op`, halves onto halves.
template <typename T, typename Op>
inline T fold_lanes(const Vec<T>& v, const Op& op) {
  T x[kLanes<T>];
  store(x, v);
#pragma GCC unroll 4
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = op(x[i], x[i + half]);
  return x[0];
}
template <typename T>
inline T sum_lanes(const Vec<T>& v) {
  return fold_lanes<T>(v, [](T a, T b) { return a + b; });
}
template <typename T>
inline Octet<T> halves_added(const Vec<T>& v) {
  if constexpr (kLanes<T> == 16)
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  else
    return v;
}

// part[r * 8 + j] = lanes whose sum is q[r] . k[j], for kRows rows and kKeys keys.
template <int kRows, int kKeys, typename E, typename T>
inline void dot_lanes(const T* q, int64_t ldq, const E* const* k, int64_t cols, Vec<T>* part) {
  Vec<T> acc[kRows][kKeys] = {};
  for (int64_t c = 0; c < cols; c += kLanes<T>) {
    Vec<T> x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) x[r] = load(q + r * ldq + c);
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) {
      const Vec<T> y = widen_vector(k[j] + c);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) acc[r][j] += x[r] * y;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) part[r * 8 + j] = acc[r][j];
}

// scores[r * kTile + j] = q[r] . k[j] for kRows rows and 8 keys, kKeys of them in registers at a time. Of a tile with
// fewer keys the last one stands in for those that are missing.
template <int kRows, int kKeys, typename E, typename T>
inline void dot_products(const T* q, int64_t ldq, const E* k, int64_t ldk, int64_t cols, int keys, T* scores) {
  const E* row[8];
  for (int j = 0; j < 8; ++j) row[j] = k + std::min(j, keys - 1) * ldk;
  Vec<T> part[kRows * 8];
  for (int j = 0; j < 8; j += kKeys) dot_lanes<kRows, kKeys>(q, ldq, row + j, cols, part + j);
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kLanes<T> >= 8) {
      Octet<T> x[8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) x[j] = halves_added<T>(part[r * 8 + j]);
      transpose8(x);
      store8(scores + r * kTile, ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])));
    } else {
      for (int j = 0; j < 8; ++j) scores[r * kTile + j] = sum_lanes<T>(part[r * 8 + j]);
    }
  }
}

// out[r] += sum over keys of weights[r * kTile + j] * v[j], kVecs vectors of columns at a time.
template <int kRows, int kVecs, typename E, typename T>
inline void weighted_sum(const T* weights, int keys, const E* v, int64_t ldv, int64_t cols, T* out, int64_t ldo) {
  constexpr int kWidth = kVecs * kLanes<T>;
  int64_t c = 0;
  for (; c + kWidth <= cols; c += kWidth) {
    Vec<T> acc[kRows][kVecs] = {};
    for (int j = 0; j < keys; ++j) {
      Vec<T> x[kVecs];
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) x[i] = widen_vector(v + j * ldv + c + i * kLanes<T>);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) acc[r][i] += weights[r * kTile + j] * x[i];
    }
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kVecs; ++i) {
        T* at = out + r * ldo + c + i * kLanes<T>;
        store(at, load(at) + acc[r][i]);
      }
  }
  if constexpr (kVecs > 1)
    if (c < cols) weighted_sum<kRows, kVecs / 2>(weights, keys, v + c, ldv, cols - c, out + c, ldo);
}

// The few rows of a tile, and what they have attended so far.
template <typename In>
class FewRows {
 public:
  using T = Accumulate<In>;

  FewRows(Arena& arena, const Problem& p)
      : dim_(whole(p.dim)), dim_v_(whole(p.dim_v)), in_place_(dim_ == p.dim && dim_v_ == p.dim_v) {
    q_ = arena.take<T>(kFewRows * dim_);
    out_ = arena.take<T>(kFewRows * dim_v_);
    weights_ = arena.take<T>(kFewRows * kTile);
    k_ = arena.take<T>(in_place_ ? 0 : kTile * dim_);
    v_ = arena.take<T>(in_place_ ? 0 : kTile * dim_v_);
  }
  static int64_t bytes(const Problem& p) {
    Arena measure;
    FewRows few(measure, p);
    return measure.used();
  }

  void attend(const ForwardParams& a, const RowTile& tile, int64_t first_kb, int64_t last_kb) {
    const Problem& p = a.problem;
    const int64_t kv_head = tile.head[0] / (p.heads_q / p.heads_kv);
    for (int r = 0; r < tile.rows; ++r) {
      const In* q = row_of<In>(a.q, tile.batch, tile.head[r], tile.query[r]);
      for (int64_t c = 0; c < dim_; ++c) q_[r * dim_ + c] = c < p.dim ? widen(q[c * a.q.stride[3]]) * T(p.scale) : T(0);
      max_[r] = kNegInf<T>, sum_[r] = T(0);
    }
    std::memset(out_, 0, tile.rows * dim_v_ * sizeof(T));
    PlanCursor plan(p, tile);
    for (int64_t kb = first_kb; kb < last_kb; ++kb) {
      const int granule = plan.at(kb);
      if (granule == kEmpty) continue;
      const int64_t first = kb * kTile;
      const int keys = int(std::min<int64_t>(kTile, p.seq_k - first));
      if (in_place_) {
        add_keys(p, tile, granule, first, keys, row_of<In>(a.k, tile.batch, kv_head, first), a.k.stride[2],
                 row_of<In>(a.v, tile.batch, kv_head, first), a.v.stride[2]);
      } else {
        load_tile<In>(k_, dim_, a.k, tile.batch, kv_head, first, keys, p.dim);
        load_tile<In>(v_, dim_v_, a.v, tile.batch, kv_head, first, keys, p.dim_v);
        add_keys(p, tile, granule, first, keys, k_, dim_, v_, dim_v_);
      }
    }
  }
  const T* output(int r) const { return out_ + r * dim_v_; }  // unnormalised
  T max(int r) const { return max_[r]; }
  T sum(int r) const { return sum_[r]; }

 private:
  static int64_t whole(int64_t cols) { return (cols + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }

  // visit(first row, rows as a constant) over blocks of 4, 2 and 1 rows
  template <typename Visit>
  static void for_each_block(int rows, const Visit& visit) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) visit(r, std::integral_constant<int, 4>());
    if (r + 2 <= rows) visit(r, std::integral_constant<int, 2>()), r += 2;
    if (r < rows) visit(r, std::integral_constant<int, 1>());
  }

  template <typename E>
  void add_keys(const Problem& p, const RowTile& tile, int granule, int64_t first, int keys, const E* k, int64_t ldk,
                const E* v, int64_t ldv) {
    for_each_block(tile.rows, [&](int r, auto count) {
      for (int j = 0; j < keys; j += 8)
        dot_products<count(), 8 / count()>(q_ + r * dim_, dim_, k + j * ldk, ldk, dim_, keys - j,
                                           weights_ + r * kTile + j);
    });
    mask_scores(p, tile, granule, first, keys);
    for (int r = 0; r < tile.rows; ++r) add_row(r, keys);
    if (p.dropout.seed) drop_weights(p, tile, first, keys);
    for_each_block(tile.rows, [&](int r, auto count) {
      weighted_sum<count(), 8 / count()>(weights_ + r * kTile, keys, v, ldv, dim_v_, out_ + r * dim_v_, dim_v_);
    });
  }

  void mask_scores(const Problem& p, const RowTile& tile, int granule, int64_t first, int keys) {
    TileMask mask;
    mask.find(p, tile, granule, first, keys);
    for (int r = 0; r < tile.rows; ++r) {
      T* scores = weights_ + r * kTile;
      if (p.softcap > 0.0)
        for (int j = 0; j < kTile; j += kLanes<T>)
          store(scores + j, tanh_of(load(scores + j) / T(p.softcap)) * T(p.softcap));
      if (p.slopes.data) {
        const T slope = T(p.slopes.at(tile.batch, tile.head[r]));
        const int64_t place = place_among_keys(p, tile.query[r], first);
        for (int j = 0; j < keys; ++j) scores[j] -= slope * T(std::abs(place - j));
      }
      if (mask.biased)
        with_bias_type(p.mask, [&](auto type) {
          const MaskView& m = p.mask;
          const auto* bias = static_cast<const decltype(type)*>(m.data) + tile.batch * m.stride[0] +
                             tile.head[r] * m.stride[1] + tile.query[r] * m.stride[2] + first * m.stride[3];
          for (int j = 0; j < keys; ++j) {
            const T b = T(widen(bias[j * m.stride[3]]));
            scores[j] = b == kNegInf<T> ? b : scores[j] + b;
          }
        });
      if (!mask.kept.all)
        for (int j = 0; j < keys; ++j)
          if (!(mask.kept.of_key[j] >> r & 1)) scores[j] = kNegInf<T>;
      for (int j = keys; j < kTile; ++j) scores[j] = kNegInf<T>;
    }
  }

  // Scores of one row become weights; what the row had before is rescaled.
  void add_row(int r, int keys) {
    T* scores = weights_ + r * kTile;
    Vec<T> top_lanes = splat(max_[r]);
    for (int j = 0; j < keys; j += kLanes<T>) top_lanes = max_keep(load(scores + j), top_lanes);
    const T top = fold_lanes<T>(top_lanes, [](T a, T b) { return a > b ? a : b; });
    const T safe = top == kNegInf<T> ? T(0) : top;  // no key yet: exp(-inf - 0) = 0, never NaN
    Vec<T> total{};
    for (int j = 0; j < keys; j += kLanes<T>) {
      const Vec<T> e = exp_nonpositive(load(scores + j) - safe);
      total += e;
      store(scores + j, e);
    }
    if (top != max_[r]) {
      const T alpha = std::exp(max_[r] - safe);
      sum_[r] *= alpha;
      for (int64_t c = 0; c < dim_v_; c += kLanes<T>) {
        T* at = out_ + r * dim_v_ + c;
        store(at, load(at) * alpha);
      }
    }
    max_[r] = top;
    sum_[r] += sum_lanes<T>(total);
  }

  // The queries of a head are few enough for the words of one tile.
  void drop_weights(const Problem& p, const RowTile& tile, int64_t first, int keys) {
    uint64_t undropped[kTile];
    for (int r = 0; r < tile.rows; ++r) {
      const int query = int(tile.query[r]);
      if (query == 0)
        DropoutStream(p.dropout, tile.batch, tile.head[r]).find(0, int(p.seq_q), first, keys, undropped);
      for (int j = 0; j < keys; ++j)
        if (!(undropped[j] >> query & 1)) weights_[r * kTile + j] = T(0);
    }
  }

  int64_t dim_, dim_v_;  // in whole vectors
  bool in_place_;
  T max_[kFewRows], sum_[kFewRows];
  T* q_;        // (rows x dim), scaled
  T* out_;      // (rows x dim_v)
  T* weights_;  // (rows x 64): scores, then weights
  T* k_;        // (64 x dim), where K is not read in place
  T* v_;        // (64 x dim_v)
};

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
