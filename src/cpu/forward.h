// flashsdpa_fwd_cpu: work items are (batch, head, a few tiles of queries), longest first where the band makes them
// uneven.
#pragma once

#include "attend.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// Below this many multiply-adds a second thread costs more than it brings.
constexpr double kWorkPerThread = 1 << 19;

inline int worthwhile_workers(const Problem& p, int64_t batch, double products) {
  const double work = double(batch) * p.heads_q * p.seq_q * p.seq_k * (p.dim + p.dim_v) / 2 * products;
  return int(std::clamp(work / kWorkPerThread, 1.0, 4096.0));
}
inline int worthwhile_workers(const Problem& p, double products) { return worthwhile_workers(p, p.batch, products); }

// The workers that tiles and splits are chosen for; as many as then run, unless the call is batch invariant.
inline int planned_workers(const Problem& p, double products, const Launch& launch) {
  return std::min(worthwhile_workers(p, planned_batch(p), products), launch.pool ? launch.pool->threads : 1);
}

// Scratch of a worker: the engine's operands, the scores of a tile, the softmax of each row tile.
template <typename Engine>
struct ForwardScratch {
  Engine engine;
  typename Engine::T* st;
  SoftmaxState<typename Engine::T>* states;

  ForwardScratch(Arena& arena, const Problem& p, int tiles) : engine(arena, p, tiles) {
    st = arena.take<typename Engine::T>(Engine::kKeyTiles * kTile * kTileStride);
    states = arena.take<SoftmaxState<typename Engine::T>>(tiles);
  }
  static int64_t bytes(const Problem& p, int tiles) {
    Arena measure;
    ForwardScratch scratch(measure, p, tiles);
    return measure.used();
  }
};

template <typename Engine>
const char* forward(const void* params, const Launch& launch) {
  using In = typename Engine::In;
  const auto& a = *static_cast<const ForwardParams*>(params);
  const Problem& p = a.problem;
  const int64_t q_tiles = (p.seq_q + kTile - 1) / kTile, k_tiles = (p.seq_k + kTile - 1) / kTile;
  // Wide heads take fewer tiles at a time, so that a chunk's state stays in the second-level cache.
  const int widest = p.dim + p.dim_v > 256 ? Engine::kRowTiles / 2 : Engine::kRowTiles;
  const int64_t heads = p.batch * p.heads_q, planned_heads = planned_batch(p) * p.heads_q;
  const int planned = planned_workers(p, 2, launch);
  int per_chunk = int(std::min<int64_t>(widest, q_tiles));
  while (per_chunk > 1 && planned_heads * ((q_tiles + per_chunk - 1) / per_chunk) < 2 * planned) --per_chunk;
  const int64_t chunks = (q_tiles + per_chunk - 1) / per_chunk;

  const int64_t bytes = ForwardScratch<Engine>::bytes(p, per_chunk);
  for_each_item(launch.pool, heads * chunks, worthwhile_workers(p, 2), [&](int64_t item, int) {
    Arena arena(thread_scratch(bytes));
    ForwardScratch<Engine> scratch(arena, p, per_chunk);
    // Causal bands make late queries longest: hand those out first, over all heads.
    const int64_t chunk = chunks - 1 - item / heads, head = item % heads;
    RowTile tiles[Engine::kRowTiles];
    int count = 0;
    int64_t first_kb = k_tiles, last_kb = 0;
    for (int64_t t = chunk * per_chunk; t < std::min(q_tiles, (chunk + 1) * per_chunk); ++t, ++count) {
      tiles[count] = RowTile::of_head(head / p.heads_q, head % p.heads_q, t * kTile, p.seq_q);
      const KeyRange range = key_range(p, tiles[count]);
      if (range.first < range.last) {
        first_kb = std::min(first_kb, range.first);
        last_kb = std::max(last_kb, range.last);
      }
    }
    attend(a, tiles, count, first_kb, last_kb, scratch.engine, scratch.states, scratch.st);
    for (int t = 0; t < count; ++t) {
      const auto* out = scratch.engine.output(t);
      for (int r = 0; r < tiles[t].rows; ++r)
        write_row<In>(a, tiles[t].batch, tiles[t].head[r], tiles[t].query[r], out + r * scratch.engine.output_stride(),
                      scratch.states[t].max[r] * scratch.engine.factor(), scratch.states[t].sum[r]);
    }
  });
  return nullptr;
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
