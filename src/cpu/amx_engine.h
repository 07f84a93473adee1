// The products of a tile on AMX (amx_tile.h), for bfloat16 inputs: the counterpart of float_engine.h.
//
// Scores stay transposed (S^T, keys x rows), so that masks and the softmax are shared with the float engine. K and V
// are A operands as they lie in memory; Q^T, dO^T and P^T are B operands ("pairs"). The forward accumulates O^T = V^T
// P^T, the backward dQ^T = K^T dS^T: V^T and K^T are transposed once and serve every row tile.
#pragma once

#include "amx_tile.h"
#include "float_engine.h"

#if defined(__AMX_BF16__)

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

constexpr int64_t kPairStride = kTile;  // columns of a B operand over row tiles

// Two floats rounded to bfloat16, `low` in the low half of each lane.
inline __m512i round_pair(Vec<float> low, Vec<float> high) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);  // low's 16, then high's
  alignas(64) static constexpr auto kOrder = [] {
    struct {
      uint16_t at[32];
    } order{};
    for (int i = 0; i < 16; ++i) order.at[2 * i] = uint16_t(i), order.at[2 * i + 1] = uint16_t(16 + i);
    return order;
  }();
  return _mm512_permutexvar_epi16(_mm512_load_si512(&kOrder), both);
}

// B operand from float rows: dst[(j/2, r)] = (src[j][r], src[j+1][r]); rows up to the next 32 are zero.
inline void pack_pairs(BFloat16* dst, const float* src, int64_t ld, int rows, int cols) {
  for (int j = 0; j < amx_padded(rows); j += 2)
    for (int r = 0; r < cols; r += kLanes<float>) {
      const Vec<float> low = j < rows ? load(src + j * ld + r) : Vec<float>{};
      const Vec<float> high = j + 1 < rows ? load(src + (j + 1) * ld + r) : Vec<float>{};
      _mm512_storeu_si512(dst + (j / 2 * kPairStride + r) * 2, round_pair(low, high));
    }
}

// A operand from float rows: dst (padded rows x kTile stride) = src; rows and columns up to the next 32 are zero.
inline void pack_rows(BFloat16* dst, const float* src, int64_t ld, int rows, int cols) {
  for (int j = 0; j < amx_padded(rows); ++j)
    for (int r = 0; r < amx_padded(cols); r += 2 * kLanes<float>) {
      const auto part = [&](int c) { return (__m512)(j < rows && c < cols ? load(src + j * ld + c) : Vec<float>{}); };
      _mm512_storeu_si512(dst + j * kTile + r, (__m512i)_mm512_cvtne2ps_pbh(part(r + kLanes<float>), part(r)));
    }
}

// A operand: `rows` rows of x, zero up to (64, padded cols).
inline void copy_rows(BFloat16* dst, int64_t ld, const ConstView& x, int64_t b, int64_t h, int64_t first, int rows,
                      int64_t cols) {
  for (int r = 0; r < kTile; ++r) {
    BFloat16* row = dst + r * ld;
    const int64_t filled = r < rows ? cols : 0;
    if (filled) std::memcpy(row, row_of<BFloat16>(x, b, h, first + r), filled * sizeof(BFloat16));
    std::memset(row + filled, 0, (ld - filled) * sizeof(BFloat16));
  }
}

// dst (cols x ld) = 64 rows of src (row stride `stride`), transposed; cols a multiple of 32.
inline void transpose_rows(BFloat16* dst, int64_t ld, const BFloat16* src, int64_t stride, int64_t cols) {
  for (int r = 0; r < kTile; r += 8)
    for (int64_t c = 0; c < cols; c += 8) {
      typedef uint16_t Halves __attribute__((vector_size(16)));
      Halves block[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&block[i], src + (r + i) * stride + c, 16);
      for (int round = 0; round < 3; ++round) {  // three perfect shuffles of the rows: one unpack instruction each
        Halves next[8];
        for (int i = 0; i < 4; ++i) {
          next[2 * i] = __builtin_shufflevector(block[i], block[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
          next[2 * i + 1] = __builtin_shufflevector(block[i], block[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        std::memcpy(block, next, sizeof block);
      }
      for (int i = 0; i < 8; ++i) std::memcpy(dst + (c + i) * ld + r, &block[i], 16);
    }
}

// dst (64 x ld) = src^T, src (cols x kTileStride); cols a multiple of 8.
inline void untranspose(float* dst, int64_t ld, const float* src, int64_t cols) {
  for (int64_t c = 0; c < cols; c += 8)
    for (int r = 0; r < kTile; r += 8) {
      Octet<float> block[8];
      for (int i = 0; i < 8; ++i) block[i] = load8(src + (c + i) * kTileStride + r);
      transpose8(block);
      for (int i = 0; i < 8; ++i) store8(dst + (r + i) * ld + c, block[i]);
    }
}

// B operands of a tile's rows of x, from x^T in float (cols x kTileStride):
//   over columns, as pairs along x's columns (for K Q^T, V dO^T): depth is padded cols
inline void pack_transposed(BFloat16* dst, const float* xt, int rows, int64_t cols) {
  const int64_t width = (rows + kLanes<float> - 1) / kLanes<float> * kLanes<float>;
  for (int64_t c = 0; c < amx_padded(cols); c += 2)
    for (int64_t r = 0; r < kTile; r += kLanes<float>) {
      const bool inside = r < width;
      const Vec<float> low = inside && c < cols ? load(xt + c * kTileStride + r) : Vec<float>{};
      const Vec<float> high = inside && c + 1 < cols ? load(xt + (c + 1) * kTileStride + r) : Vec<float>{};
      _mm512_storeu_si512(dst + (c / 2 * kPairStride + r) * 2, round_pair(low, high));
    }
}

//   over rows, as pairs of x's rows (for P^T dO, dS^T Q): depth is 64, `width` columns
inline void pack_row_pairs(BFloat16* dst, const ConstView& x, const RowTile& tile, int64_t cols, int64_t width) {
  const int64_t step = x.stride[3];
  std::memset(dst, 0, kTile * width * sizeof(BFloat16));
  for (int r = 0; r < tile.rows; ++r) {
    const BFloat16* row = row_of<BFloat16>(x, tile.batch, tile.head[r], tile.query[r]);
    BFloat16* out = dst + r / 2 * width * 2 + r % 2;
    for (int64_t c = 0; c < cols; ++c) out[c * 2] = row[c * step];
  }
}

// Where the scale is applied: to scale Q would round it again. A positive one, which keeps the order of scores and
// their -inf, waits for the exponential, where it is free, unless a cap, slopes or a bias come before.
struct AmxScaling {
  float now = 1.0f, later = 1.0f;

  explicit AmxScaling(const Problem& p) {
    const bool biased = p.mask.data && p.mask.dtype != DType::kBool;
    const bool waits = p.scale > 0 && !biased && p.softcap == 0.0 && !p.slopes.data;
    (waits ? later : now) = float(p.scale);
  }
  void apply(float* st, int rows, int keys) const {
    if (now == 1.0f) return;
    for (int j = 0; j < keys; ++j)
      for (int r = 0; r < rows; r += kLanes<float>)
        store(st + j * kTileStride + r, load(st + j * kTileStride + r) * now);
  }
};

class AmxForward {
 public:
  using In = BFloat16;
  using T = float;
  static constexpr int kRowTiles = 8;           // that share one transposed V
  static constexpr int kKeyTiles = 4;           // of K and V at a time: O^T is read and written once for 256 keys
  static constexpr int kScoreRows = kAmxBlock;  // of S^T at a time: they stay in the first-level cache
  static constexpr int kKeyStep = kAmxBlock;

  AmxForward(Arena& arena, const Problem& p, int tiles)
      : scaling_(p), dim_(p.dim), dim_v_(p.dim_v), depth_(amx_padded(p.dim)), width_(amx_padded(p.dim_v)) {
    for (int t = 0; t < tiles; ++t) {
      qt_[t] = arena.take<BFloat16>(depth_ * kPairStride);
      out_[t] = arena.take<float>(width_ * kTileStride);
    }
    scratch_ = arena.take<float>(std::max(dim_, dim_v_) * kTileStride);
    k_ = arena.take<BFloat16>(kKeyTiles * kTile * depth_);
    v_ = arena.take<BFloat16>(kTile * width_);
    vt_ = arena.take<BFloat16>(width_ * kKeyTiles * kTile);
    pt_ = arena.take<BFloat16>(kKeyTiles * kTile * kPairStride);
    rows_ = arena.take<float>(kTile * width_);
  }
  void load_queries(int t, const ConstView& q, const RowTile& tile, double) {
    load_transposed<BFloat16>(scratch_, q, tile, dim_, 1.0f);  // exact: scaling Q here would round it again
    pack_transposed(qt_[t], scratch_, tile.rows, dim_);
  }
  void load_keys(int slot, const ConstView& k, const ConstView& v, int64_t batch, int64_t head, int64_t first,
                 int keys) {
    copy_rows(k_ + slot * kTile * depth_, depth_, k, batch, head, first, keys, dim_);
    copy_rows(v_, width_, v, batch, head, first, keys, dim_v_);
    transpose_rows(vt_ + slot * kTile, kKeyTiles * kTile, v_, width_, width_);
  }
  void scores(int t, int slot, int r0, int r1, int j0, int j1, float* st) {
    float* block = st + j0 * kTileStride + r0;
    amx_gemm<false>(amx_padded(j1 - j0), amx_padded(r1 - r0), depth_, k_ + (slot * kTile + j0) * depth_, depth_,
                    qt_[t] + r0 * 2, kPairStride, block, kTileStride);
    scaling_.apply(block, r1 - r0, j1 - j0);
  }
  float factor() const { return scaling_.later; }
  void keep(float*, int j, int r, Vec<float> p0, Vec<float> p1) {
    _mm512_storeu_si512(pt_ + (j / 2 * kPairStride + r) * 2, round_pair(p0, p1));
  }
  void rescale(int t, int rows, const float* alpha) {
    for (int64_t c = 0; c < dim_v_; ++c)
      for (int r = 0; r < rows; r += kLanes<float>) {
        float* out = out_[t] + c * kTileStride + r;
        store(out, load(out) * load(alpha + r));
      }
  }
  void clear(int t) { std::memset(out_[t], 0, width_ * kTileStride * sizeof(float)); }
  void accumulate(int t, int shift, int r0, int r1, int j0, int j1, const float*, bool first) {
    const BFloat16* vt = vt_ + j0 + shift;
    const BFloat16* p = pt_ + (j0 / 2 * kPairStride + r0) * 2;
    const int64_t cols = amx_padded(r1 - r0), depth = amx_padded(j1 - j0);
    if (first) {
      amx_gemm<false>(width_, cols, depth, vt, kKeyTiles * kTile, p, kPairStride, out_[t] + r0, kTileStride);
    } else {
      amx_gemm<true>(width_, cols, depth, vt, kKeyTiles * kTile, p, kPairStride, out_[t] + r0, kTileStride);
    }
  }
  const float* output(int t) {
    untranspose(rows_, width_, out_[t], width_);
    return rows_;
  }
  int64_t output_stride() const { return width_; }

 private:
  AmxTiles tiles_;
  AmxScaling scaling_;
  int64_t dim_, dim_v_, depth_, width_;
  BFloat16* qt_[kRowTiles];  // B (depth x 64): Q^T
  float* out_[kRowTiles];    // (width x kTileStride): O^T
  float* scratch_;           // (dim x kTileStride): Q^T in float
  BFloat16* k_;              // A (kKeyTiles * 64 x depth)
  BFloat16* v_;              // (64 x width)
  BFloat16* vt_;             // A (width x kKeyTiles * 64): V^T
  BFloat16* pt_;             // B (kKeyTiles * 64 x 64): P^T
  float* rows_;              // (64 x width): the finished output
};

class AmxBackward {
 public:
  using In = BFloat16;
  using T = float;
  static constexpr int kKeyStep = kAmxBlock;

  AmxBackward(Arena& arena, const Problem& p)
      : scaling_(p),
        dim_(p.dim),
        dim_v_(p.dim_v),
        depth_(amx_padded(p.dim)),
        width_(amx_padded(p.dim_v)),
        seq_k_(p.seq_k) {
    qt_ = arena.take<BFloat16>(depth_ * kPairStride);
    gt_ = arena.take<BFloat16>(width_ * kPairStride);
    q_ = arena.take<BFloat16>(kTile * depth_);
    g_ = arena.take<BFloat16>(kTile * width_);
    scratch_ = arena.take<float>(std::max(dim_, dim_v_) * kTileStride);
    v_ = arena.take<BFloat16>(kTile * width_);
    pt_ = arena.take<BFloat16>(kTile * kTile);
    dt_ = arena.take<BFloat16>(kTile * kTile);
    dt_pairs_ = arena.take<BFloat16>(kTile * kPairStride);
    dqt_ = arena.take<float>(depth_ * kTileStride);
    rows_ = arena.take<float>(kTile * row_stride(dim_));
    const int64_t k_tiles = (seq_k_ + kTile - 1) / kTile;
    k_ = arena.take<BFloat16>(kTile * depth_);
    kt_ = arena.take<BFloat16>(k_tiles * kTile * depth_);
  }
  // K^T of the pair, in tiles, for dQ: every row tile of every head of the group reads it.
  void load_pair(const BackwardParams& a, int64_t batch, int64_t head) {
    for (int64_t first = 0; first < seq_k_; first += kTile) {
      const int keys = int(std::min<int64_t>(kTile, seq_k_ - first));
      copy_rows(k_, depth_, a.k, batch, head, first, keys, dim_);
      transpose_rows(kt_ + first * depth_, kTile, k_, depth_, depth_);
    }
  }
  void load_rows(const BackwardParams& a, const RowTile& tile) {
    load_transposed<BFloat16>(scratch_, a.q, tile, dim_, 1.0f);
    pack_transposed(qt_, scratch_, tile.rows, dim_);
    load_transposed<BFloat16>(scratch_, a.grad_out, tile, dim_v_, 1.0f);
    pack_transposed(gt_, scratch_, tile.rows, dim_v_);
    pack_row_pairs(q_, a.q, tile, dim_, depth_);
    pack_row_pairs(g_, a.grad_out, tile, dim_v_, width_);
    std::memset(dqt_, 0, depth_ * kTileStride * sizeof(float));
  }
  void load_keys(const BackwardParams& a, int64_t batch, int64_t head, int64_t first, int keys) {
    first_key_ = first;
    copy_rows(k_, depth_, a.k, batch, head, first, keys, dim_);
    copy_rows(v_, width_, a.v, batch, head, first, keys, dim_v_);
  }
  void scores(int r0, int r1, int j0, int j1, float* st) {
    float* block = st + j0 * kTileStride + r0;
    amx_gemm<false>(amx_padded(j1 - j0), amx_padded(r1 - r0), depth_, k_ + j0 * depth_, depth_, qt_ + r0 * 2,
                    kPairStride, block, kTileStride);
    scaling_.apply(block, r1 - r0, j1 - j0);
  }
  float factor() const { return scaling_.later; }
  void grad_probabilities(int r0, int r1, int j0, int j1, float* dt) {
    amx_gemm<false>(amx_padded(j1 - j0), amx_padded(r1 - r0), width_, v_ + j0 * width_, width_, gt_ + r0 * 2,
                    kPairStride, dt + j0 * kTileStride + r0, kTileStride);
  }
  void add_gradients(int r0, int r1, int j0, int j1, const float* pt, const float* dt, float* dk, float* dv) {
    const int64_t m = amx_padded(j1 - j0), n = amx_padded(r1 - r0), at = j0 * kTileStride + r0;
    pack_rows(pt_, pt + at, kTileStride, j1 - j0, r1 - r0);
    pack_rows(dt_, dt + at, kTileStride, j1 - j0, r1 - r0);
    pack_pairs(dt_pairs_, dt + at, kTileStride, j1 - j0, r1 - r0);
    amx_gemm<true>(m, width_, n, pt_, kTile, g_ + r0 * width_, width_, dv + j0 * row_stride(dim_v_),
                   row_stride(dim_v_));
    amx_gemm<true>(m, depth_, n, dt_, kTile, q_ + r0 * depth_, depth_, dk + j0 * row_stride(dim_), row_stride(dim_));
    amx_gemm<true>(depth_, n, m, kt_ + first_key_ * depth_ + j0, kTile, dt_pairs_, kPairStride, dqt_ + r0, kTileStride);
  }
  const float* dq() {
    untranspose(rows_, row_stride(dim_), dqt_, depth_);
    return rows_;
  }
  static int64_t row_stride(int64_t cols) { return amx_padded(cols) + 16; }  // of dq, dk, dv

 private:
  AmxTiles tiles_;
  AmxScaling scaling_;
  int64_t dim_, dim_v_, depth_, width_, seq_k_, first_key_ = 0;
  BFloat16* qt_;        // B (depth x 64): Q^T
  BFloat16* gt_;        // B (width x 64): dO^T
  BFloat16* q_;         // B (64 x depth): Q
  BFloat16* g_;         // B (64 x width): dO
  float* scratch_;      // Q^T or dO^T in float
  BFloat16* v_;         // A (64 x width)
  BFloat16* pt_;        // A (64 x 64): P^T
  BFloat16* dt_;        // A (64 x 64): dS^T
  BFloat16* dt_pairs_;  // B (64 x 64): dS^T
  float* dqt_;          // (depth x kTileStride): dQ^T
  float* rows_;         // (64 x row_stride): the finished dQ
  BFloat16* k_;         // A (64 x depth)
  BFloat16* kt_;        // A, per key tile of the pair (depth x 64): K^T
};

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE

#endif
