// The compiled head-dim classes of the forward kernel, one translation unit each.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"
#include "fwd_args.h"

namespace flashsdpa {

struct FwdInstance {
  bool few;        // for few queries: may pack heads and split keys
  int consumers;   // 64 rows each
  int block_n, stages;
  int dim, dim_v;  // columns carried
  int block_m() const { return consumers * kConsumerRows; }
  // `blocks` thread blocks of the current device share the tiles. Null, or an error text.
  const char* (*launch_bfloat16)(const FwdArgs& args, uint32_t blocks, int device, cudaStream_t stream);
  const char* (*launch_float16)(const FwdArgs& args, uint32_t blocks, int device, cudaStream_t stream);
};

extern const FwdInstance kFwdD64, kFwdD64Short, kFwdD96, kFwdD128, kFwdD192V128, kFwdD192, kFwdD256;
// For few queries: of 64 and of 128 rows.
extern const FwdInstance kFwdFew64D64, kFwdFew64D128, kFwdFew64D256, kFwdFew128D64, kFwdFew128D128, kFwdFew128D256;
// With a mask: for many queries, and for few; with a bool mask alone.
extern const FwdInstance kFwdMaskedD64, kFwdMaskedD128, kFwdMaskedD192V128, kFwdMaskedD256;
extern const FwdInstance kFwdMaskedFewD64, kFwdMaskedFewD128, kFwdMaskedFewD256;
extern const FwdInstance kFwdBitsD64, kFwdBitsD128, kFwdBitsD256;
// With terms (score_terms.h), with a mask and without.
extern const FwdInstance kFwdTermsD64, kFwdTermsD128, kFwdTermsD256;

// Sums the parts of a split launch into out and the log-sum-exp; args as that launch had them. Null, or an error text.
const char* fwd_combine(const FwdArgs& args, DType dtype, cudaStream_t stream);

}  // namespace flashsdpa
