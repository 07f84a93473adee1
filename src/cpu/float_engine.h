// The products of a tile in float (double for float64 inputs) vectors: half types are widened when a tile is loaded.
// amx_engine.h offers the same two classes on bfloat16 matrix units.
#pragma once

#include "gemm.h"
#include "masking.h"
#include "workspace.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// st (keys x rows) = K Q^T. Long dot products are summed in parts: the backward, which computes them again, then comes
// closer to the scores behind the log-sum-exp, whatever kernel made it.
template <typename T>
inline void score_tile(int keys, int rows, int64_t dim, const T* k, int64_t ldk, const T* qt, T* st) {
  const int64_t part = dim > 128 ? 64 : 128;
  gemm<false>(keys, rows, std::min(part, dim), k, ldk, 1, qt, kTileStride, st, kTileStride);
  for (int64_t c = part; c < dim; c += part)
    gemm<true>(keys, rows, std::min(part, dim - c), k + c, ldk, 1, qt + c * kTileStride, kTileStride, st, kTileStride);
}

template <typename In_>
class FloatForward {
 public:
  using In = In_;
  using T = Accumulate<In>;
  static constexpr int kRowTiles = 4;       // that share one pass over K and V
  static constexpr int kKeyTiles = 2;       // of K and V at a time: S^T then stays in the first-level cache
  static constexpr int kScoreRows = kTile;  // of S^T at a time
  static constexpr int kKeyStep = 2;        // spans are multiples of it

  FloatForward(Arena& arena, const Problem& p, int tiles)
      : dim_(p.dim), dim_v_(p.dim_v), ldk_(padded<T>(p.dim)), ldv_(padded<T>(p.dim_v)) {
    for (int t = 0; t < tiles; ++t) {
      qt_[t] = arena.take<T>(dim_ * kTileStride);
      out_[t] = arena.take<T>(kTile * ldv_);
    }
    k_ = arena.take<T>(kKeyTiles * kTile * ldk_);
    v_ = arena.take<T>(kKeyTiles * kTile * ldv_);
  }
  void load_queries(int t, const ConstView& q, const RowTile& tile, double scale) {
    load_transposed<In>(qt_[t], q, tile, dim_, T(scale));
  }
  void load_keys(int slot, const ConstView& k, const ConstView& v, int64_t batch, int64_t head, int64_t first,
                 int keys) {
    load_tile<In>(k_ + slot * kTile * ldk_, ldk_, k, batch, head, first, keys, dim_);
    load_tile<In>(v_ + slot * kTile * ldv_, ldv_, v, batch, head, first, keys, dim_v_);
  }
  // st (keys x rows) = K Q^T, of rows [r0, r1) and keys [j0, j1)
  void scores(int t, int slot, int r0, int r1, int j0, int j1, T* st) {
    score_tile(j1 - j0, r1 - r0, dim_, k_ + (slot * kTile + j0) * ldk_, ldk_, qt_[t] + r0, st + j0 * kTileStride + r0);
  }
  T factor() const { return T(1); }  // of the scores: Q holds the scale
  // P^T takes the place of S^T.
  void keep(T* st, int j, int r, Vec<T> p0, Vec<T> p1) {
    store(st + j * kTileStride + r, p0);
    store(st + (j + 1) * kTileStride + r, p1);
  }
  // out *= alpha, a factor per row
  void rescale(int t, int rows, const T* alpha) {
    for (int r = 0; r < rows; ++r) {
      if (alpha[r] == T(1)) continue;
      T* out = out_[t] + r * ldv_;
      for (int64_t c = 0; c < dim_v_; c += kLanes<T>) store(out + c, load(out + c) * alpha[r]);
    }
  }
  void clear(int t) { std::memset(out_[t], 0, kTile * ldv_ * sizeof(T)); }
  // out (+)= P V of rows [r0, r1) and keys [j0, j1) of P^T, whose key j is key j + shift of V
  void accumulate(int t, int shift, int r0, int r1, int j0, int j1, const T* pt, bool first) {
    const T* p = pt + j0 * kTileStride + r0;
    const T* v = v_ + (j0 + shift) * ldv_;
    T* out = out_[t] + r0 * ldv_;
    if (first) {
      gemm<false>(r1 - r0, dim_v_, j1 - j0, p, 1, kTileStride, v, ldv_, out, ldv_);
    } else {
      gemm<true>(r1 - r0, dim_v_, j1 - j0, p, 1, kTileStride, v, ldv_, out, ldv_);
    }
  }
  const T* output(int t) { return out_[t]; }  // (rows x output_stride), unnormalised
  int64_t output_stride() const { return ldv_; }

 private:
  int64_t dim_, dim_v_, ldk_, ldv_;
  T* qt_[kRowTiles];   // (dim x kTileStride): Q^T, scaled
  T* out_[kRowTiles];  // (64 x ldv)
  T* k_;               // (kKeyTiles * 64 x ldk)
  T* v_;               // (kKeyTiles * 64 x ldv)
};

template <typename In_>
class FloatBackward {
 public:
  using In = In_;
  using T = Accumulate<In>;
  static constexpr int kKeyStep = 2;

  FloatBackward(Arena& arena, const Problem& p)
      : dim_(p.dim), dim_v_(p.dim_v), ldk_(padded<T>(p.dim)), ldv_(padded<T>(p.dim_v)) {
    qt_ = arena.take<T>(dim_ * kTileStride);
    gt_ = arena.take<T>(dim_v_ * kTileStride);
    q_ = arena.take<T>(kTile * ldk_);
    g_ = arena.take<T>(kTile * ldv_);
    k_ = arena.take<T>(kTile * ldk_);
    v_ = arena.take<T>(kTile * ldv_);
    dq_ = arena.take<T>(kTile * ldk_);
  }
  void load_pair(const BackwardParams&, int64_t, int64_t) {}
  void load_rows(const BackwardParams& a, const RowTile& tile) {
    load_transposed<In>(qt_, a.q, tile, dim_, T(a.problem.scale));
    load_transposed<In>(gt_, a.grad_out, tile, dim_v_, T(1));
    load_tile<In>(q_, ldk_, a.q, tile.batch, tile.head[0], tile.query_min, tile.rows, dim_);
    for (int r = 0; r < tile.rows; ++r)  // from dO^T: the rows of dO may have any strides
      for (int64_t c = 0; c < ldv_ - 16; ++c) g_[r * ldv_ + c] = c < dim_v_ ? gt_[c * kTileStride + r] : T(0);
    std::memset(dq_, 0, sizeof(T) * tile.rows * ldk_);
  }
  void load_keys(const BackwardParams& a, int64_t batch, int64_t head, int64_t first, int keys) {
    load_tile<In>(k_, ldk_, a.k, batch, head, first, keys, dim_);
    load_tile<In>(v_, ldv_, a.v, batch, head, first, keys, dim_v_);
  }
  // (keys x rows), of rows [r0, r1) and keys [j0, j1): st = K Q^T, dt = V dO^T
  void scores(int r0, int r1, int j0, int j1, T* st) {
    score_tile(j1 - j0, r1 - r0, dim_, k_ + j0 * ldk_, ldk_, qt_ + r0, st + j0 * kTileStride + r0);
  }
  T factor() const { return T(1); }  // of the scores: Q holds the scale
  void grad_probabilities(int r0, int r1, int j0, int j1, T* dt) {
    gemm<false>(j1 - j0, r1 - r0, dim_v_, v_ + j0 * ldv_, ldv_, 1, gt_ + r0, kTileStride, dt + j0 * kTileStride + r0,
                kTileStride);
  }
  // dv += P^T dO, dk += dS^T Q (rows of row_stride elements), dq += dS K
  void add_gradients(int r0, int r1, int j0, int j1, const T* pt, const T* dt, T* dk, T* dv) {
    const int64_t at = j0 * kTileStride + r0;
    gemm<true>(j1 - j0, dim_v_, r1 - r0, pt + at, kTileStride, 1, g_ + r0 * ldv_, ldv_, dv + j0 * ldv_, ldv_);
    gemm<true>(j1 - j0, dim_, r1 - r0, dt + at, kTileStride, 1, q_ + r0 * ldk_, ldk_, dk + j0 * ldk_, ldk_);
    gemm<true>(r1 - r0, dim_, j1 - j0, dt + at, 1, kTileStride, k_ + j0 * ldk_, ldk_, dq_ + r0 * ldk_, ldk_);
  }
  const T* dq() { return dq_; }
  static int64_t row_stride(int64_t cols) { return padded<T>(cols); }  // of dq, dk, dv

 private:
  int64_t dim_, dim_v_, ldk_, ldv_;
  T* qt_;  // (dim x kTileStride): Q^T, scaled
  T* gt_;  // (dim_v x kTileStride): dO^T
  T* q_;   // (64 x ldk)
  T* g_;   // (64 x ldv): dO
  T* k_;   // (64 x ldk)
  T* v_;   // (64 x ldv)
  T* dq_;  // (64 x ldk)
};

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
