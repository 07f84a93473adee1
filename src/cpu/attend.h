// Forward attention of a few row tiles over a range of key tiles: the body of the forward and of decode.
// Online softmax (Milakov and Gimelshein 2018), tiled as FlashAttention (Dao et al. 2022, algorithm 1).
#pragma once

#include <cmath>

#include "dropout_bits.h"
#include "float_engine.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// The softmax of one row tile so far.
template <typename T>
struct SoftmaxState {
  T max[kTile];  // of the scores before the factor
  T sum[kTile];  // of exp(score - max)
  bool started;
};

// The running maximum and sum of rows [r0, r1) over S^T (keys x rows) within the spans, and P^T = exp(S^T * factor -
// maximum), which keep(key, row, P of the key, P of the next key) stores for pairs of keys; pairs go on, with zeros, up
// to a multiple of kKeyStep. alpha: the factor for what was accumulated before, per row. Returns whether any differs
// from 1.
template <int kKeyStep, typename T, typename Keep>
inline bool online_softmax(const T* st, int r0, int r1, const Spans<T>& spans, T factor, SoftmaxState<T>& state,
                           T* alpha, const Keep& keep) {
  IntVec<T> moved{};
  for (int r = r0; r < r1; r += kLanes<T>) {
    const int first = spans.first[r / kStripRows<T>], last = spans.last[r / kStripRows<T>];
    const auto score = [&](int j) { return load(st + j * kTileStride + r); };
    const Vec<T> before = load(state.max + r);
    Vec<T> even = splat(kNegInf<T>), odd = even;
    int j = first;
    for (; j + 2 <= last; j += 2) {
      even = max_keep(score(j), even);
      odd = max_keep(score(j + 1), odd);
    }
    if (j < last) even = max_keep(score(j), even);
    const Vec<T> top = max_keep(max_keep(even, odd), before);
    const Vec<T> safe = top == splat(kNegInf<T>) ? Vec<T>{} : top;  // no key yet: exp(-inf - 0) = 0, never NaN
    Vec<T> total{};
    for (j = first; j + 2 <= last; j += 2) {
      // The difference first: of scores beyond 1 / epsilon a fused multiply and subtract would leave any remainder.
      const Vec<T> e0 = exp_nonpositive((score(j) - safe) * factor),
                   e1 = exp_nonpositive((score(j + 1) - safe) * factor);
      total += e0 + e1;
      keep(j, r, e0, e1);
    }
    for (; j < (last + kKeyStep - 1) / kKeyStep * kKeyStep; j += 2) {
      const Vec<T> e = j < last ? exp_nonpositive((score(j) - safe) * factor) : Vec<T>{};
      total += e;
      keep(j, r, e, Vec<T>{});
    }
    const Vec<T> a = exp_nonpositive((before - safe) * factor);
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
  PlanCursor plan[Engine::kRowTiles];
  KeyRange range[Engine::kRowTiles];
  const bool drops = p.dropout.seed != nullptr;
  DropoutStream streams[Engine::kRowTiles];
  uint64_t undropped[kSlots * kTile];  // of the row tile at hand, where drops
  for (int t = 0; t < count; ++t) {
    plan[t] = PlanCursor(p, tiles[t]);
    range[t] = key_range(p, tiles[t]);
    states[t].started = false;
    if (drops) streams[t] = DropoutStream(p.dropout, tiles[t].batch, tiles[t].head[0]);
    for (int r = 0; r < kTile; ++r) states[t].max[r] = kNegInf<T>, states[t].sum[r] = T(0);
    engine.load_queries(t, a.q, tiles[t], p.scale);
  }
  TileMask masks[kSlots];
  for (int64_t kb = first_kb; kb < last_kb; kb += kSlots) {
    const auto keys_of = [&](int slot) { return int(std::min<int64_t>(kTile, p.seq_k - (kb + slot) * kTile)); };
    bool loaded[kSlots] = {};
    for (int t = 0; t < count; ++t) {
      const RowTile& tile = tiles[t];
      // The key tiles this row tile attends; their scores lie one behind the other, and only the last can be short.
      int slots[kSlots], visited = 0, keys = 0;
      auto spans = Spans<T>::none();
      for (int slot = 0; slot < kSlots && kb + slot < last_kb; ++slot) {
        const int granule = plan[t].at(kb + slot);
        if (granule == kEmpty || kb + slot < range[t].first || kb + slot >= range[t].last) continue;
        TileMask& mask = masks[visited];
        mask.find(p, tile, granule, (kb + slot) * kTile, keys_of(slot));
        if (!mask.kept.join_spans(tile, keys_of(slot), keys, spans)) continue;
        slots[visited++] = slot;
        keys += keys_of(slot);
      }
      if (visited == 0) continue;
      spans.finish(tile.rows, Engine::kKeyStep, keys);
      for (int i = 0; i < visited; ++i) {
        const int slot = slots[i];
        if (!loaded[slot]) engine.load_keys(slot, a.k, a.v, tile.batch, kv_head, (kb + slot) * kTile, keys_of(slot));
        loaded[slot] = true;
        if (drops)
          streams[t].find(tile.query_min, tile.rows, (kb + slot) * kTile, keys_of(slot), undropped + i * kTile);
      }
      T alpha[kTile];
      bool moved = false;
      for (int r = 0; r < tile.rows; r += Engine::kScoreRows) {
        const int r_end = std::min(tile.rows, r + Engine::kScoreRows);
        for (int i = 0; i < visited; ++i) {
          const int slot = slots[i], at = i * kTile;
          T* scores = st + at * kTileStride;
          spans.for_each_block(r, r_end, at, at + keys_of(slot), [&](int r0, int r1, int j0, int j1) {
            engine.scores(t, slot, r0, r1, j0 - at, j1 - at, scores);
          });
          masks[i].apply(scores, p, tile, r, r_end, (kb + slot) * kTile, keys_of(slot));
        }
        const auto softmax = [&](const auto& keep) {
          moved |= online_softmax<Engine::kKeyStep>(st, r, r_end, spans, engine.factor(), states[t], alpha, keep);
        };
        if (drops) {
          softmax([&](int j, int row, Vec<T> p0, Vec<T> p1) {
            engine.keep(st, j, row, lanes_of<T>(undropped[j], row) ? p0 : Vec<T>{},
                        lanes_of<T>(undropped[j + 1], row) ? p1 : Vec<T>{});
          });
        } else {
          softmax([&](int j, int row, Vec<T> p0, Vec<T> p1) { engine.keep(st, j, row, p0, p1); });
        }
      }
      if (moved && states[t].started) engine.rescale(t, tile.rows, alpha);
      if (!states[t].started && !spans.uniform) {
        engine.clear(t);
        states[t].started = true;
      }
      for (int i = 0, j; i < visited; i = j) {  // neighbouring slots in one product
        j = i + 1;
        while (j < visited && slots[j] == slots[j - 1] + 1) ++j;
        const auto product = [&](int r0, int r1, int j0, int j1) {
          engine.accumulate(t, (slots[i] - i) * kTile, r0, r1, j0, j1, st, !states[t].started);
        };
        spans.for_each_block(0, tile.rows, i * kTile, j == visited ? keys : j * kTile, product);
        states[t].started = true;
      }
    }
  }
}

// Normalises one row and writes it: out = o / sum, rescaled for dropout, and lse = max + log(sum), the sink among them; a
// row with no key gives 0 and -inf, or its sink.
template <typename In, typename T>
inline void write_row(const ForwardParams& a, int64_t b, int64_t h, int64_t s, const T* o, T max, T sum) {
  const Problem& p = a.problem;
  In* out = row_of<In>(a.out, b, h, s);
  const bool empty = sum == T(0);
  const T kept = p.sinks.data ? add_sink(T(p.sinks.at(b, h)), max, sum) : T(1);
  if (empty) {
    for (int64_t c = 0; c < p.dim_v; ++c) narrow(T(0), out + c);
  } else {
    store_row(out, o, p.dim_v, kept / sum * T(p.dropout.rescale));
  }
  static_cast<T*>(a.lse)[(b * p.heads_q + h) * p.seq_q + s] = max + std::log(sum);
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
