// flashsdpa_bwd_cpu: recomputation from the log-sum-exp (FlashAttention, algorithm 4), five products per tile.
//
// A work item owns one (batch, K/V head) and a range of query tiles, with float accumulators for dK and dV of its own;
// ranges are split only when there are fewer pairs than workers, and then added in ascending order. dQ is finished tile
// by tile. No atomics, so the same call gives the same bits.
#pragma once

#include "forward.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// Calls visit(granule class, first key, keys) for every key tile the row tile attends.
template <typename Visit>
inline void for_each_key_tile(const Problem& p, const RowTile& tile, const Visit& visit) {
  PlanCursor plan(p, tile);
  const KeyRange range = key_range(p, tile);
  for (int64_t kb = range.first; kb < range.last; ++kb) {
    const int granule = plan.at(kb);
    if (granule != kEmpty) visit(granule, kb * kTile, int(std::min<int64_t>(kTile, p.seq_k - kb * kTile)));
  }
}

template <typename Engine>
struct BackwardScratch {
  using In = typename Engine::In;
  using T = typename Engine::T;
  Engine engine;
  TileMask mask;
  Spans<T> spans;  // of the tile at hand; P and dS are nothing outside
  T* pt;           // (64 x kTileStride): S^T, then P^T
  T* dt;           // (64 x kTileStride): dP^T, then dS^T before the scale
  T* shift;        // (64): the log-sum-exp; +inf for a row with no key, so that every probability of it is 0
  T* weight;       // (64): 1, and P = weight * exp(S - shift)
  T* delta;        // (64): rowsum(O * dO) - dLSE
  T* tanhs;        // (64 x kTileStride): of the capped scores; null without a cap
  DropoutStream stream;        // of the rows' head
  uint64_t undropped[kTile];   // of the tile at hand

  BackwardScratch(Arena& arena, const Problem& p) : engine(arena, p) {
    pt = arena.take<T>(kTile * kTileStride);
    dt = arena.take<T>(kTile * kTileStride);
    shift = arena.take<T>(kTile);
    weight = arena.take<T>(kTile);
    delta = arena.take<T>(kTile);
    tanhs = p.softcap > 0.0 ? arena.take<T>(kTile * kTileStride) : nullptr;
  }
  static int64_t bytes(const Problem& p) {
    Arena measure;
    BackwardScratch scratch(measure, p);
    return measure.used();
  }

  void load_rows(const BackwardParams& a, const RowTile& tile) {
    const Problem& p = a.problem;
    engine.load_rows(a, tile);
    if (p.dropout.seed) stream = DropoutStream(p.dropout, tile.batch, tile.head[0]);
    bool coarse = false;
    for (int r = 0; r < kTile; ++r) shift[r] = std::numeric_limits<T>::infinity(), weight[r] = T(1), delta[r] = T(0);
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t b = tile.batch, h = tile.head[r], s = tile.query[r];
      const In* out = row_of<In>(a.out, b, h, s);
      const In* grad = row_of<In>(a.grad_out, b, h, s);
      const int64_t step = a.grad_out.stride[3], at = (b * p.heads_q + h) * p.seq_q + s;
      Octet<T> sum{};
      for (int64_t c = 0; c < p.dim_v; c += 8) {
        const int count = int(std::min<int64_t>(8, p.dim_v - c));
        sum += octet(out + c, 1, count) * octet(grad + c * step, step, count);
      }
      for (int i = 0; i < 8; ++i) delta[r] += sum[i];
      if (a.grad_lse) delta[r] -= static_cast<const T*>(a.grad_lse)[at];
      const T row_lse = static_cast<const T*>(a.lse)[at];
      if (row_lse != kNegInf<T>) shift[r] = row_lse;
      coarse |= inexact(p, row_lse);
    }
    if (coarse) restore_sums(a, tile);
  }

  // A log-sum-exp of large magnitude (a row of the lowest finite bias, say) has no digits left for the logarithm of the
  // sum; that of few queries may be the decoding kernel's, whose scores were summed in another order than ours here. Such
  // rows get their maximum and sum again, from one more pass over their scores.
  static bool inexact(const Problem& p, T lse) {
    constexpr T kCoarse = T(1 << 12);
    constexpr int64_t kFewQueries = 8;  // as many as the decoding kernel takes
    return std::isfinite(lse) && (std::abs(lse) > kCoarse || p.seq_q <= kFewQueries);
  }
  void restore_sums(const BackwardParams& a, const RowTile& tile) {
    SoftmaxState<T> state;
    for (int r = 0; r < kTile; ++r) state.max[r] = kNegInf<T>, state.sum[r] = T(0);
    for_each_key_tile(a.problem, tile, [&](int granule, int64_t first_key, int keys) {
      if (!load_scores(a, tile, granule, first_key, keys)) return;
      T alpha[kTile];
      online_softmax<1>(pt, 0, tile.rows, spans, engine.factor(), state, alpha, [](int, int, Vec<T>, Vec<T>) {});
    });
    const HeadView& sinks = a.problem.sinks;
    for (int r = 0; r < tile.rows; ++r) {
      if (!inexact(a.problem, shift[r])) continue;
      T max = state.max[r] * engine.factor(), sum = state.sum[r];
      if (sinks.data) add_sink(T(sinks.at(tile.batch, tile.head[r])), max, sum);
      shift[r] = max, weight[r] = T(1) / sum;
    }
  }

  // The masked scores of a tile, in pt; false if none stays.
  bool load_scores(const BackwardParams& a, const RowTile& tile, int granule, int64_t first_key, int keys) {
    mask.find(a.problem, tile, granule, first_key, keys);
    spans = Spans<T>::none();
    if (!mask.kept.join_spans(tile, keys, 0, spans)) return false;
    spans.finish(tile.rows, Engine::kKeyStep, keys);
    engine.load_keys(a, tile.batch, tile.head[0] / (a.problem.heads_q / a.problem.heads_kv), first_key, keys);
    for_each_block(tile, keys, [&](int r0, int r1, int j0, int j1) { engine.scores(r0, r1, j0, j1, pt); });
    mask.apply(pt, a.problem, tile, 0, tile.rows, first_key, keys, tanhs);
    return true;
  }

  template <typename Visit>
  void for_each_block(const RowTile& tile, int keys, const Visit& visit) const {
    spans.for_each_block(0, tile.rows, 0, keys, visit);
  }

  // P and dS = P * (dO V^T - delta) of one tile, transposed, in pt and dt; false if there is nothing. Dropout, a factor Z
  // of 0 or rescale on each weight, makes them Z * P and P * (Z * dO V^T - delta): delta has it from the output.
  bool recompute(const BackwardParams& a, const RowTile& tile, int granule, int64_t first_key, int keys) {
    if (!load_scores(a, tile, granule, first_key, keys)) return false;
    const Dropout& dropout = a.problem.dropout;
    if (dropout.seed) {
      stream.find(tile.query_min, tile.rows, first_key, keys, undropped);
      differentiate(tile, keys, [this, rescale = T(dropout.rescale)](int j, int r, Vec<T> x) {
        return lanes_of<T>(undropped[j], r) ? x * rescale : Vec<T>{};
      });
    } else {
      differentiate(tile, keys, [](int, int, Vec<T> x) { return x; });
    }
    return true;
  }
  template <typename Drop>
  void differentiate(const RowTile& tile, int keys, const Drop& drop) {
    const T factor = engine.factor();
    for_each_block(tile, keys, [&](int r0, int r1, int j0, int j1) {
      engine.grad_probabilities(r0, r1, j0, j1, dt);
      for (int j = j0; j < j1; ++j) {
        T* p_row = pt + j * kTileStride;
        T* d_row = dt + j * kTileStride;
        for (int r = r0; r < r1; r += kLanes<T>) {
          const Vec<T> scaled = rounded<T>(load(p_row + r) * factor);  // as the shift was
          const Vec<T> e = exp_nonpositive(scaled - load(shift + r)) * load(weight + r);
          store(p_row + r, drop(j, r, e));
          store(d_row + r, e * (drop(j, r, load(d_row + r)) - load(delta + r)));
        }
      }
    });
  }

  // dS of the scores before the cap. That of a removed one is 0, whatever K held.
  void pass_cap(const RowTile& tile, int keys) {
    for_each_block(tile, keys, [&](int r0, int r1, int j0, int j1) {
      for (int j = j0; j < j1; ++j)
        for (int r = r0; r < r1; r += kLanes<T>) {
          const int at = j * kTileStride + r;
          const Vec<T> d = load(dt + at), t = load(tanhs + at);
          store(dt + at, d == 0 ? d : d * (1 - t * t));
        }
    });
  }
};

template <typename Engine>
void backward_qkv(const BackwardParams& a, const Launch& launch) {
  using In = typename Engine::In;
  using T = typename Engine::T;
  const Problem& p = a.problem;
  const int64_t q_tiles = (p.seq_q + kTile - 1) / kTile, pairs = p.batch * p.heads_kv;
  const int64_t group = p.heads_q / p.heads_kv, ldk = Engine::row_stride(p.dim), ldv = Engine::row_stride(p.dim_v);
  const int workers = worthwhile_workers(p, 5);
  const int threads = std::min(workers, launch.pool ? launch.pool->threads : 1);
  const int64_t units = group * q_tiles;  // row tiles of a pair, over the heads of its group
  const int64_t planned_pairs = planned_batch(p) * p.heads_kv, wished = planned_workers(p, 5, launch);
  const int64_t splits = std::clamp<int64_t>((wished + planned_pairs - 1) / planned_pairs, 1, units);

  const int64_t bytes = BackwardScratch<Engine>::bytes(p);
  const int64_t k_rows = (p.seq_k + kTile - 1) / kTile * kTile;  // whole tiles, which matrix units write
  const int64_t accumulator = k_rows * (ldk + ldv);              // dK then dV of one item
  // Either a worker does all splits of a pair, in a sum and one accumulator more, or every split is an item of its own and
  // keeps its accumulator until all are added. The sums are the same.
  const bool whole_pairs = pairs >= threads;
  const int64_t per_worker = std::min<int64_t>(splits, 2), kept = whole_pairs ? threads * per_worker : pairs * splits;
  const Block block = allocate(kept * accumulator * int64_t(sizeof(T)));
  T* const accumulators = reinterpret_cast<T*>(block.get());

  const auto write_pair = [&](int64_t pair, const T* dk) {
    const T* dv = dk + k_rows * ldk;
    const int64_t b = pair / p.heads_kv, h = pair % p.heads_kv;
    for (int64_t j = 0; j < p.seq_k; ++j) {
      store_row(row_of<In>(a.dk, b, h, j), dk + j * ldk, p.dim, T(p.scale));
      store_row(row_of<In>(a.dv, b, h, j), dv + j * ldv, p.dim_v, T(1));
    }
  };
  const auto add = [&](T* total, const T* part) {
    for (int64_t i = 0; i < accumulator; ++i) total[i] += part[i];
  };
  const auto run = [&](int64_t pair, int64_t split, T* dk) {
    Arena arena(thread_scratch(bytes));
    BackwardScratch<Engine> s(arena, p);
    const int64_t batch = pair / p.heads_kv, kv_head = pair % p.heads_kv;
    T* dv = dk + k_rows * ldk;
    std::memset(dk, 0, accumulator * sizeof(T));
    s.engine.load_pair(a, batch, kv_head);
    for (int64_t unit = split * units / splits; unit < (split + 1) * units / splits; ++unit) {
      const RowTile tile = RowTile::of_head(batch, kv_head * group + unit / q_tiles, unit % q_tiles * kTile, p.seq_q);
      s.load_rows(a, tile);
      for_each_key_tile(p, tile, [&](int granule, int64_t first_key, int keys) {
        if (!s.recompute(a, tile, granule, first_key, keys)) return;
        if (s.tanhs) s.pass_cap(tile, keys);
        s.for_each_block(tile, keys, [&](int r0, int r1, int j0, int j1) {
          s.engine.add_gradients(r0, r1, j0, j1, s.pt, s.dt, dk + first_key * ldk, dv + first_key * ldv);
        });
      });
      const T* dq = s.engine.dq();
      for (int r = 0; r < tile.rows; ++r)
        store_row(row_of<In>(a.dq, batch, tile.head[r], tile.query[r]), dq + r * ldk, p.dim, T(p.scale));
    }
  };
  if (whole_pairs) {
    for_each_item(launch.pool, pairs, workers, [&](int64_t pair, int worker) {
      T *total = accumulators + worker * per_worker * accumulator, *part = total + accumulator;
      run(pair, 0, total);
      for (int64_t split = 1; split < splits; ++split) run(pair, split, part), add(total, part);
      write_pair(pair, total);
    });
    return;
  }
  for_each_item(launch.pool, pairs * splits, workers,
                [&](int64_t item, int) { run(item / splits, item % splits, accumulators + item * accumulator); });
  for_each_item(launch.pool, pairs, workers, [&](int64_t pair, int) {
    T* total = accumulators + pair * splits * accumulator;
    for (int64_t s = 1; s < splits; ++s) add(total, total + s * accumulator);
    write_pair(pair, total);
  });
}

// dst[query * row_stride + key] += dS of rows [r0, r1) and keys [j0, j1).
template <typename T>
inline void add_transposed(T* dst, int64_t row_stride, const RowTile& tile, int r0, int r1, int j0, int j1, const T* dt) {
  for (int r = r0; r < r1; r += 8)
    for (int j = j0; j < j1; j += 8) {
      const int count = std::min(8, j1 - j);
      Octet<T> block[8];
      for (int i = 0; i < 8; ++i) block[i] = i < count ? load8(dt + (j + i) * kTileStride + r) : Octet<T>{};
      transpose8(block);
      for (int i = 0; i < 8 && r + i < r1; ++i) {
        T* row = dst + tile.query[r + i] * row_stride + j;
        if (count == 8) {
          store8(row, load8(row) + block[i]);
        } else {
          for (int c = 0; c < count; ++c) row[c] += block[i][c];
        }
      }
    }
}

// dst[r * row_stride + j * col_stride] += dS of rows [r0, r1) and keys [j0, j1), one of the strides or both being 0. As many
// terms as there are scores may go into one sum, which in float would stop growing: hence double, from the first on.
template <typename T>
inline void add_sums(double* dst, int64_t row_stride, int64_t col_stride, int r0, int r1, int j0, int j1, const T* dt) {
  double rows[kTile] = {}, lanes[8];
  for (int j = j0; j < j1; ++j) {
    const T* column = dt + j * kTileStride;
    if (col_stride == 0) {
      for (int r = r0; r < r1; ++r) rows[r] += double(column[r]);
      continue;
    }
    for (double& lane : lanes) lane = 0.0;
    int r = r0;
    for (; r + 8 <= r1; r += 8)
      for (int i = 0; i < 8; ++i) lanes[i] += double(column[r + i]);
    for (; r < r1; ++r) lanes[0] += double(column[r]);
    for (const double lane : lanes) dst[j] += lane;
  }
  if (col_stride == 0)
    for (int r = r0; r < r1; ++r) dst[r * row_stride] += rows[r];
}

// The bias gradient in a pass of its own: an item owns a mask row (or one granule of rows), so the sum over broadcast
// batches, heads and queries needs no atomics. dmask is zeroed by the caller: skipped granules stay 0.
template <typename Engine>
void backward_bias(const BackwardParams& a, const Launch& launch) {
  using T = typename Engine::T;
  const Problem& p = a.problem;
  const int64_t* size = p.mask.size;
  const int64_t q_tiles = (p.seq_q + kTile - 1) / kTile;
  const int64_t row_items = size[2] == 1 ? 1 : q_tiles, tiles_per_item = size[2] == 1 ? q_tiles : 1;
  const int64_t batches = size[0] == 1 ? p.batch : 1, heads = size[1] == 1 ? p.heads_q : 1;
  const bool summed = size[2] == 1 || size[3] == 1;
  const int64_t row_stride = size[2] == 1 ? 0 : 1, col_stride = size[3] == 1 ? 0 : 1;  // of an item's sums
  const int64_t count = summed ? (size[2] == 1 ? 1 : kTile) * size[3] : 0;

  const int64_t bytes = BackwardScratch<Engine>::bytes(p) + count * int64_t(sizeof(double)) + 64;
  for_each_item(launch.pool, size[0] * size[1] * row_items, worthwhile_workers(p, 2), [&](int64_t item, int) {
    Arena arena(thread_scratch(bytes));
    BackwardScratch<Engine> s(arena, p);
    const int64_t mask_batch = item / row_items / size[1], mask_head = item / row_items % size[1];
    T* plane = static_cast<T*>(a.dmask) + (mask_batch * size[1] + mask_head) * size[2] * size[3];
    double* sums = arena.take<double>(count);
    std::fill_n(sums, count, 0.0);
    for (int64_t b = mask_batch; b < mask_batch + batches; ++b)
      for (int64_t h = mask_head; h < mask_head + heads; ++h)
        for (int64_t t = item % row_items; t < item % row_items + tiles_per_item; ++t) {
          const RowTile tile = RowTile::of_head(b, h, t * kTile, p.seq_q);
          s.load_rows(a, tile);
          for_each_key_tile(p, tile, [&](int granule, int64_t first_key, int keys) {
            if (!s.recompute(a, tile, granule, first_key, keys)) return;
            s.for_each_block(tile, keys, [&](int r0, int r1, int j0, int j1) {
              if (summed)
                add_sums(sums + first_key * col_stride, row_stride, col_stride, r0, r1, j0, j1, s.dt);
              else
                add_transposed(plane + first_key, size[3], tile, r0, r1, j0, j1, s.dt);
            });
          });
        }
    if (!summed) return;
    const int64_t first = item % row_items * kTile, rows = std::min<int64_t>(kTile, size[2] - first);
    for (int64_t i = 0; i < rows * size[3]; ++i) plane[first * size[3] + i] = T(sums[i]);
  });
}

// The gradient of the sinks in a pass of its own, which visits rows and no scores. An item owns a head.
template <typename Engine>
void backward_sinks(const BackwardParams& a, const Launch& launch) {
  const Problem& p = a.problem;
  const int64_t bytes = BackwardScratch<Engine>::bytes(p);
  for_each_item(launch.pool, p.heads_q, worthwhile_workers(p, 1), [&](int64_t head, int) {
    Arena arena(thread_scratch(bytes));
    BackwardScratch<Engine> s(arena, p);
    double total = 0.0;
    for (int64_t batch = 0; batch < p.batch; ++batch)
      for (int64_t first = 0; first < p.seq_q; first += kTile) {
        const RowTile tile = RowTile::of_head(batch, head, first, p.seq_q);
        s.load_rows(a, tile);
        for (int r = 0; r < tile.rows; ++r)  // the sink's weight, whose dP is 0
          total -= double(std::exp(p.sinks.at(batch, head) - s.shift[r]) * s.weight[r]) * s.delta[r];
      }
    a.dsinks[head] = float(total);
  });
}

template <typename Engine>
const char* backward(const void* params, const Launch& launch) {
  const auto& a = *static_cast<const BackwardParams*>(params);
  if (a.dq.data || a.dv.data) backward_qkv<Engine>(a, launch);  // dq is null too where dim is 0
  if (a.dmask) backward_bias<Engine>(a, launch);
  if (a.dsinks) backward_sinks<Engine>(a, launch);
  return nullptr;
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
