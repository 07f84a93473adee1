// How the work on the gradient of an additive mask is shared out: in tiles of it, and in parts of their visits
// (bwd_mask_gradient.h).
#pragma once

#include <algorithm>

#include "tensors.h"

namespace flashsdpa {

inline int64_t mask_elements(const MaskView& mask) { return mask.size[0] * mask.size[1] * mask.size[2] * mask.size[3]; }

struct BwdMaskShare {
  int64_t tiles, parts, tiles_m, tiles_n, batches, heads, blocks_m, blocks_n;  // BwdMaskArgs

  // Among so many processors, in tiles of block_m x block_n.
  BwdMaskShare(const Problem& p, int block_m, int block_n, int processors) {
    // With fewer tiles than this many for each processor, several parts share the visits of a tile.
    constexpr int64_t kUnitsForProcessor = 4;
    const int64_t* size = p.mask.size;
    const int64_t all_m = ceil_div(p.seq_q, block_m), all_n = ceil_div(p.seq_k, block_n);
    tiles_m = size[2] == 1 ? 1 : all_m;
    tiles_n = size[3] == 1 ? 1 : all_n;
    batches = size[0] == 1 ? p.batch : 1;
    heads = size[1] == 1 ? p.heads_q : 1;
    blocks_m = size[2] == 1 ? all_m : 1;
    blocks_n = size[3] == 1 ? all_n : 1;
    tiles = size[0] * size[1] * tiles_m * tiles_n;
    const int64_t visits = batches * heads * blocks_m * blocks_n, enough = kUnitsForProcessor * processors;
    const int64_t planned = size[0] == 1 ? tiles : tiles / size[0] * planned_batch(p);
    parts = std::clamp<int64_t>(ceil_div(enough, planned), 1, visits);
  }

  template <typename Args>
  void tell(const Problem& p, Args* args) const {
    args->tiles = static_cast<int32_t>(tiles);
    args->parts = static_cast<int32_t>(parts);
    args->grad_heads = static_cast<int32_t>(p.mask.size[1]);
    args->tiles_m = static_cast<int32_t>(tiles_m);
    args->tiles_n = static_cast<int32_t>(tiles_n);
    args->batches = static_cast<int32_t>(batches);
    args->heads = static_cast<int32_t>(heads);
    args->blocks_m = static_cast<int32_t>(blocks_m);
    args->blocks_n = static_cast<int32_t>(blocks_n);
  }
};

}  // namespace flashsdpa
