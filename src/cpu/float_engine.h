// The products of a tile in float (double for float64 inputs) vectors: half types are widened when a tile is loaded.
// amx_engine.h offers the same two classes on bfloat16 matrix units.
#pragma once

#include "gemm.h"
#include "tile.h"
#include "workspace.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

constexpr int kMaxTiles = 4;  // row tiles that share one pass over K and V

template <typename In_> class FloatForward {
 public:
  using In = In_;
  using T = Accumulate<In>;
  static constexpr int kKeyTiles = 2;  // of K and V at a time: S^T then stays in the first-level cache

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
  // st (keys x rows) = K Q^T
  void scores(int t, int slot, int rows, int keys, T* st) {
    gemm<false>(keys, rows, dim_, k_ + slot * kTile * ldk_, ldk_, 1, qt_[t], kTileStride, st, kTileStride);
  }
  // out *= alpha, a factor per row
  void rescale(int t, int rows, const T* alpha) {
    for (int r = 0; r < rows; ++r) {
      if (alpha[r] == T(1)) continue;
      T* out = out_[t] + r * ldv_;
      for (int64_t c = 0; c < dim_v_; c += kLanes<T>) store(out + c, load(out + c) * alpha[r]);
    }
  }
  // out += P V, from P^T; `keys` may run over several slots
  void accumulate(int t, int slot, int rows, int keys, const T* pt, bool first) {
    const T* v = v_ + slot * kTile * ldv_;
    if (first) {
      gemm<false>(rows, dim_v_, keys, pt, 1, kTileStride, v, ldv_, out_[t], ldv_);
    } else {
      gemm<true>(rows, dim_v_, keys, pt, 1, kTileStride, v, ldv_, out_[t], ldv_);
    }
  }
  const T* output(int t) { return out_[t]; }  // (rows x output_stride), unnormalised
  int64_t output_stride() const { return ldv_; }

 private:
  int64_t dim_, dim_v_, ldk_, ldv_;
  T* qt_[kMaxTiles];   // (dim x kTileStride): Q^T, scaled
  T* out_[kMaxTiles];  // (64 x ldv)
  T* k_;               // (kKeyTiles * 64 x ldk)
  T* v_;               // (kKeyTiles * 64 x ldv)
};

template <typename In_> class FloatBackward {
 public:
  using In = In_;
  using T = Accumulate<In>;

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
  // (keys x rows): st = K Q^T, dt = V dO^T
  void scores(int rows, int keys, T* st) {
    gemm<false>(keys, rows, dim_, k_, ldk_, 1, qt_, kTileStride, st, kTileStride);
  }
  void grad_probabilities(int rows, int keys, T* dt) {
    gemm<false>(keys, rows, dim_v_, v_, ldv_, 1, gt_, kTileStride, dt, kTileStride);
  }
  // dv += P^T dO, dk += dS^T Q (rows of row_stride elements), dq += dS K
  void add_gradients(int rows, int keys, const T* pt, const T* dt, T* dk, T* dv) {
    gemm<true>(keys, dim_v_, rows, pt, kTileStride, 1, g_, ldv_, dv, ldv_);
    gemm<true>(keys, dim_, rows, dt, kTileStride, 1, q_, ldk_, dk, ldk_);
    gemm<true>(rows, dim_, keys, dt, 1, kTileStride, k_, ldk_, dq_, ldk_);
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
