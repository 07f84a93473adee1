// flashsdpa_decode_cpu: few queries. The queries of all heads of a group share one pass over their K and V head, and
// the keys are split over the workers; partial results are merged by their log-sum-exp.
#pragma once

#include "few_rows.h"
#include "forward.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

template <typename In>
const char* decode(const void* params, const Launch& launch) {
  using T = Accumulate<In>;
  const auto& a = *static_cast<const ForwardParams*>(params);
  const Problem& p = a.problem;
  const int64_t group = p.heads_q / p.heads_kv, rows = group * p.seq_q;
  if (rows > kFewRows) return "flashsdpa_decode_cpu takes at most 16 query rows per K/V head";
  const int64_t k_tiles = (p.seq_k + kTile - 1) / kTile, pairs = p.batch * p.heads_kv;
  const int64_t planned_pairs = planned_batch(p) * p.heads_kv, wished = 2 * planned_workers(p, 2, launch);
  // Each split reads at least 8 key tiles; splitting stops once every worker has two items.
  const int64_t splits =
      std::clamp<int64_t>((wished + planned_pairs - 1) / planned_pairs, 1, std::max<int64_t>(1, k_tiles / 8));
  const int64_t slot_size = p.dim_v + 2;  // an unnormalised output row, its maximum and its sum

  const int64_t bytes = FewRows<In>::bytes(p);
  const Block block = allocate(pairs * rows * splits * slot_size * int64_t(sizeof(T)));
  T* const slots = reinterpret_cast<T*>(block.get());  // (pairs, rows, splits, slot_size)

  for_each_item(launch.pool, pairs * splits, worthwhile_workers(p, 2), [&](int64_t item, int) {
    Arena arena(thread_scratch(bytes));
    const int64_t pair = item / splits, split = item % splits;
    const RowTile tile = RowTile::of_group(pair / p.heads_kv, pair % p.heads_kv * group, group, p.seq_q);
    const KeyRange range = key_range(p, tile);
    const int64_t span = (range.last - range.first + splits - 1) / splits;
    const int64_t first = std::min(range.last, range.first + split * span);
    FewRows<In> few(arena, p);
    few.attend(a, tile, first, std::min(range.last, first + span));
    for (int r = 0; r < tile.rows; ++r) {
      T* slot = slots + ((pair * rows + r) * splits + split) * slot_size;
      std::memcpy(slot, few.output(r), p.dim_v * sizeof(T));
      slot[p.dim_v] = few.max(r);
      slot[p.dim_v + 1] = few.sum(r);
    }
  });

  for (int64_t row = 0; row < pairs * rows; ++row) {
    T* const merged = slots + row * splits * slot_size;  // the first partial becomes the merged row
    T max = kNegInf<T>, sum = T(0);
    for (int64_t s = 0; s < splits; ++s) max = std::max(max, merged[s * slot_size + p.dim_v]);
    for (int64_t s = 0; s < splits; ++s) {
      const T* slot = merged + s * slot_size;
      // A split without a key has maximum -inf and weighs nothing, unless NaN scores hide in its sum.
      const bool no_max = slot[p.dim_v] == kNegInf<T>;
      const T weight = no_max ? (slot[p.dim_v + 1] == T(0) ? T(0) : T(1)) : std::exp(slot[p.dim_v] - max);
      sum += weight * slot[p.dim_v + 1];
      for (int64_t c = 0; c < p.dim_v; ++c) merged[c] = (s == 0 ? T(0) : merged[c]) + weight * slot[c];
    }
    const int64_t pair = row / rows, r = row % rows;
    write_row<In>(a, pair / p.heads_kv, pair % p.heads_kv * group + r / p.seq_q, r % p.seq_q, merged, max, sum);
  }
  return nullptr;
}

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
