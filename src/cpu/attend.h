// Forward attention of a few row tiles over a range of key tiles: the body of the forward and of decode.
// Online softmax (Milakov and Gimelshein 2018), tiled as FlashAttention (Dao et al. 2022, algorithm 1).
#pragma once

#include <cmath>

#include "float_engine.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// The softmax of one row tile so far.
template <typename T> struct SoftmaxState {
  T max[kTile];  // of the scores
  T sum[kTile];  // of exp(score - max)
  bool started;
};

// S^T becomes P^T = exp(S^T - max); updates max and sum. alpha: the factor for what was accumulated before, per row.
// Returns whether any factor differs from 1.
template <typename T>
inline bool online_softmax(T* st, int rows, int keys, SoftmaxState<T>& state, T* alpha) {
  IntVec<T> moved{};
  for (int r = 0; r < rows; r += kLanes<T>) {
    const Vec<T> before = load(state.max + r);
    Vec<T> even = before, odd = before;
    int j = 0;
    for (; j + 2 <= keys; j += 2) {
      even = max_keep(load(st + j * kTileStride + r), even);
      odd = max_keep(load(st + (j + 1) * kTileStride + r), odd);
    }
    if (j < keys) even = max_keep(load(st + j * kTileStride + r), even);
    const Vec<T> top = max_keep(even, odd);
    const Vec<T> safe = top == splat(kNegInf<T>) ? Vec<T>{} : top;  // no key yet: exp(-inf - 0) = 0, never NaN
    Vec<T> total{};
    for (j = 0; j < keys; ++j) {
      const Vec<T> e = exp_nonpositive(load(st + j * kTileStride + r) - safe);
      total += e;
      store(st + j * kTileStride + r, e);
    }
    const Vec<T> a = exp_nonpositive(before - safe);
    store(alpha + r, a);
    store(state.max + r, top);
    store(state.sum + r, load(state.sum + r) * a + total);
    moved |= top != before;
  }
  return any(moved);
}

// Attends `count` row tiles (same batch and K/V head) to key tiles [first_kb, last_kb), kKeyTiles of the engine at a
// time. st: (kKeyTiles * 64 x kTileStride) scratch.
template <typename Engine, typename T = typename Engine::T>
inline void attend(const ForwardParams& a, const RowTile* tiles, int count, int64_t first_kb, int64_t last_kb,
                   Engine& engine, SoftmaxState<T>* states, T* st) {
  constexpr int kSlots = Engine::kKeyTiles;
  const Problem& p = a.problem;
  const int64_t kv_head = tiles[0].head[0] / (p.heads_q / p.heads_kv);
  PlanCursor plan[kMaxTiles];
  KeyRange range[kMaxTiles];
  for (int t = 0; t < count; ++t) {
    plan[t] = PlanCursor(p, tiles[t]);
    range[t] = key_range(p, tiles[t]);
    states[t].started = false;
    for (int r = 0; r < kTile; ++r) states[t].max[r] = kNegInf<T>, states[t].sum[r] = T(0);
    engine.load_queries(t, a.q, tiles[t], p.scale);
  }
  for (int64_t kb = first_kb; kb < last_kb; kb += kSlots) {
    const auto keys_of = [&](int slot) { return int(std::min<int64_t>(kTile, p.seq_k - (kb + slot) * kTile)); };
    bool loaded[kSlots] = {};
    for (int t = 0; t < count; ++t) {
      const RowTile& tile = tiles[t];
      // Scores of the key tiles this row tile attends, one behind the other: only the last can be short.
      int slots[kSlots], visited = 0, keys = 0;
      for (int slot = 0; slot < kSlots && kb + slot < last_kb; ++slot) {
        const int granule = plan[t].at(kb + slot);
        if (granule == kEmpty || kb + slot < range[t].first || kb + slot >= range[t].last) continue;
        const int64_t first_key = (kb + slot) * kTile;
        if (!loaded[slot]) engine.load_keys(slot, a.k, a.v, tile.batch, kv_head, first_key, keys_of(slot));
        loaded[slot] = true;
        T* scores = st + keys * kTileStride;
        engine.scores(t, slot, tile.rows, keys_of(slot), scores);
        mask_scores(scores, p, tile, granule, first_key, keys_of(slot));
        slots[visited++] = slot;
        keys += keys_of(slot);
      }
      if (visited == 0) continue;
      T alpha[kTile];
      const bool moved = online_softmax(st, tile.rows, keys, states[t], alpha);
      if (moved && states[t].started) engine.rescale(t, tile.rows, alpha);
      for (int i = 0, j; i < visited; i = j) {  // neighbouring slots in one product
        j = i + 1;
        while (j < visited && slots[j] == slots[j - 1] + 1) ++j;
        const int run = j == visited ? keys - i * kTile : (j - i) * kTile;
        engine.accumulate(t, slots[i], tile.rows, run, st + i * kTile * kTileStride, !states[t].started);
        states[t].started = true;
      }
    }
  }
}

// Normalises one row and writes it: out = o / sum, lse = max + log(sum); a row with no key gives 0 and -inf.
template <typename In, typename T>
inline void write_row(const ForwardParams& a, int64_t b, int64_t h, int64_t s, const T* o, T max, T sum) {
  const Problem& p = a.problem;
  In* out = row_of<In>(a.out, b, h, s);
  if (sum == T(0)) {
    for (int64_t c = 0; c < p.dim_v; ++c) narrow(T(0), out + c);
  } else {
    store_row(out, o, p.dim_v, T(1) / sum);
  }
  static_cast<T*>(a.lse)[(b * p.heads_q + h) * p.seq_q + s] = max + std::log(sum);
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
