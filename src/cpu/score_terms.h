// What becomes of scaled scores before masks and biases, the soft cap and then the slopes; and the sink of a row, which
// joins its softmax after the keys. Calls without them pay one branch for a tile, and one for a row.
#pragma once

#include <cmath>

#include "tile.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// tanh(x) / x - 1 over x^2, for x^2 = z and |x| < 5/8: the approximations of Cephes, to the last digit or two.
inline Vec<float> tanh_series(Vec<float> z) {
  Vec<float> p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  return p * z - 3.33332819422e-1f;
}
inline Vec<double> tanh_series(Vec<double> z) {
  const Vec<double> p = (z * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
  const Vec<double> q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
  return p / q;
}
// Near 0 the exponential would leave a remainder of 1 - 1.
template <typename V>
inline V tanh_of(V x) {
  const V size = max_keep(-x, x), e = exp_nonpositive(size * -2), far = (1 - e) / (1 + e), z = x * x;
  const V near = x + x * z * tanh_series(z);
  return size < 0.625f ? near : x < V{} ? -far : far;
}

// S^T = softcap * tanh(S^T / softcap) in rows [r0, r1); tanhs, if given, keeps the tanh for the backward.
template <typename T>
inline void cap_scores(T* st, T softcap, int r0, int r1, int keys, T* tanhs) {
  for (int j = 0; j < keys; ++j)
    for (int r = r0; r < r1; r += kLanes<T>) {
      const int at = j * kTileStride + r;
      const Vec<T> t = tanh_of(load(st + at) / softcap);
      if (tanhs) store(tanhs + at, t);
      store(st + at, t * softcap);
    }
}

// Where a query stands among the keys, counted from `first_key`: its distance to key j is |place - j|.
inline int64_t place_among_keys(const Problem& p, int64_t query, int64_t first_key) {
  return query + p.diagonal - first_key;
}

// S^T -= slope * distance in rows [r0, r1).
template <typename T>
inline void add_slopes(T* st, const Problem& p, const RowTile& tile, int r0, int r1, int64_t first_key, int keys) {
  T slope[kTile] = {}, place[kTile] = {};
  for (int r = r0; r < r1; ++r) {
    slope[r] = T(p.slopes.at(tile.batch, tile.head[r]));
    place[r] = T(place_among_keys(p, tile.query[r], first_key));
  }
  for (int j = 0; j < keys; ++j)
    for (int r = r0; r < r1; r += kLanes<T>) {
      T* score = st + j * kTileStride + r;
      const Vec<T> ahead = load(place + r) - T(j);
      store(score, load(score) - load(slope + r) * max_keep(-ahead, ahead));
    }
}

// A sink takes weight and gives no value. Returns the factor for what the row has accumulated before.
template <typename T>
inline T add_sink(T sink, T& max, T& sum) {
  if (sink == kNegInf<T>) return T(1);
  const T top = std::max(max, sink), alpha = std::exp(max - top);
  sum = sum * alpha + std::exp(sink - top);
  max = top;
  return alpha;
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
