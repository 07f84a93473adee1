// The compiled head-dim classes of the forward kernel, one translation unit each.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"
#include "fwd_args.h"

namespace flashsdpa {

struct FwdInstance {
  int block_m, block_n, stages;
  // `blocks` thread blocks of the current device share the tiles. Null, or an error text.
  const char* (*launch_bfloat16)(const FwdArgs& args, uint32_t blocks, int device, cudaStream_t stream);
  const char* (*launch_float16)(const FwdArgs& args, uint32_t blocks, int device, cudaStream_t stream);
};

extern const FwdInstance kFwdD64, kFwdD64Short, kFwdD96, kFwdD128, kFwdD192V128, kFwdD192, kFwdD256;

}  // namespace flashsdpa
