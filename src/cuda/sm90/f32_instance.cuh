// One head-dim class of the float32 kernels: what each f32_*_d*.cu instantiates.
#pragma once

#include "f32_backward.cuh"
#include "f32_forward.cuh"
#include "f32_instances.h"
#include "f32_pre.cuh"
#include "shared_memory.h"

namespace flashsdpa {

// A kernel, as a template argument: one grant of shared memory for each.
template <auto kKernel, typename Tile>
const char* f32_run(const F32Args& args, uint32_t blocks, int device, cudaStream_t stream) {
  static SharedMemoryGrant grant;
  if (const char* error = grant.ask(kKernel, Tile::kSharedBytes, device)) return error;
  kKernel<<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(args);
  return error_text(cudaGetLastError());
}

template <int kDim, F32Sums kSums, bool kExact, bool kTerms>
constexpr F32Run kF32RunBackward =
    f32_run<flashsdpa_bwd_f32_sm90<kDim, kSums, kExact, kTerms>, F32BwdTile<kDim, kSums, kTerms>>;

template <int kDim, bool kExact, bool kTerms>
const char* f32_run_keys(const F32Args& args, uint32_t blocks, int device, cudaStream_t stream) {
  if constexpr (kDim <= 128) {
    return kF32RunBackward<kDim, F32Sums::kKeys, kExact, kTerms>(args, blocks, device, stream);
  } else {
    const char* error = kF32RunBackward<kDim, F32Sums::kKeysAlone, kExact, kTerms>(args, blocks, device, stream);
    return error ? error : kF32RunBackward<kDim, F32Sums::kValuesAlone, kExact, kTerms>(args, blocks, device, stream);
  }
}

template <int kDim, bool kTerms = false>
constexpr F32Instance f32_make_instance() {
  using Forward = F32FwdTile<kDim, kTerms>;
  using Queries = F32BwdTile<kDim, F32Sums::kQueries, kTerms>;
  using Keys = F32BwdTile<kDim, kDim <= 128 ? F32Sums::kKeys : F32Sums::kKeysAlone, kTerms>;
  return {kDim,
          {Forward::kBlockM, Forward::kBlockN, f32_run<flashsdpa_fwd_f32_sm90<kDim, true, kTerms>, Forward>,
           f32_run<flashsdpa_fwd_f32_sm90<kDim, false, kTerms>, Forward>},
          {Forward::kBlockM, Forward::kBlockN, f32_run<flashsdpa_bwd_pre_f32_sm90<kDim, true, kTerms>, Forward>,
           f32_run<flashsdpa_bwd_pre_f32_sm90<kDim, false, kTerms>, Forward>},
          {Queries::kRows, Queries::kTurn, kF32RunBackward<kDim, F32Sums::kQueries, true, kTerms>,
           kF32RunBackward<kDim, F32Sums::kQueries, false, kTerms>},
          {Keys::kRows, Keys::kTurn, f32_run_keys<kDim, true, kTerms>, f32_run_keys<kDim, false, kTerms>}};
}

}  // namespace flashsdpa
