// The gradient of an additive mask in float32: what the host gives its kernels.
#pragma once

#include "f32_instances.h"

namespace flashsdpa {

// Tiles, visits and parts are those of bwd_mask_gradient.h. But parts do not wait for each other: each has the gradient
// to itself, and a second kernel adds them up.
struct F32MaskArgs {
  F32Args bwd;  // with values in its mask, stats and terms; of dq, dk, dv nothing is read
  float* grad;  // (batch|1, heads_q|1, seq_q|1, seq_k|1) contiguous; every element is written
  float* sums;  // (parts, elements), any content before; not used by one part
  int64_t elements;
  int32_t tiles, parts;
  int32_t grad_heads, tiles_m, tiles_n;
  int32_t batches, heads, blocks_m, blocks_n;
};

using F32MaskRun = const char* (*)(const F32MaskArgs& args, uint32_t blocks, int device, cudaStream_t stream);

// One class of head dims, with terms or without.
struct F32MaskInstance {
  int block_m, block_n;
  F32MaskRun exact, tf32;  // `blocks`: tiles * parts
};

extern const F32MaskInstance kF32MaskD64, kF32MaskD128, kF32MaskD256;

}  // namespace flashsdpa
