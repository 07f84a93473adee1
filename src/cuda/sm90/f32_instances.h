// The float32 kernels by class of head dims: q and k, v and out up to that many columns.
#pragma once

#include "../../params.h"
#include "../common/status.h"
#include "f32_args.h"

namespace flashsdpa {

using F32Run = const char* (*)(const F32Args& args, uint32_t blocks, int device, cudaStream_t stream);

// One kernel; `tf32`: with operands of one TF32 number.
struct F32Kernel {
  int block_m, block_n;  // rows that a block owns, and of a tile that it visits
  F32Run exact, tf32;
};

struct F32Instance {
  int dim;
  F32Kernel forward, pre, queries, keys;  // queries: dQ by blocks of queries; keys: dK and dV by blocks of keys
};

extern const F32Instance kF32D64, kF32D128, kF32D256;
extern const F32Instance kF32TermsD64, kF32TermsD128, kF32TermsD256;  // with terms (score_terms.h)

// What follows is for the backward, behind `pre`.

// flashsdpa_bwd_sinks_f32_sm90, into (heads_q).
const char* f32_run_sinks(const F32Args& args, float* dsinks, int64_t batch, cudaStream_t stream);

// The gradient of an additive mask, into BackwardParams::dmask. scratch: f32_mask_scratch(b) floats.
int64_t f32_mask_scratch(const BackwardParams& b, int processors);
const char* f32_run_mask(const BackwardParams& b, const F32Args& args, float* scratch, const CurrentDevice& device,
                         cudaStream_t stream);

}  // namespace flashsdpa
