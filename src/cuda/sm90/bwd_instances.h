// The compiled kernels of the backward pass: one translation unit for each head-dim class, one for the row kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"
#include "bwd_args.h"

namespace flashsdpa {

// Terms that are part of a score; and those that kernels which compute scores must know. Of sinks the log-sum-exp says it all.
inline bool has_terms_in_scores(const Problem& p) { return p.softcap > 0 || p.slopes.data; }
inline bool takes_terms(const Problem& p) { return has_terms_in_scores(p) || has_dropout(p); }

struct BwdInstance {
  int block_m, block_n, stages;
  int adders;  // that add to one block of dQ, each to its own part, and so the words of BwdArgs::turns it has
  int dim;       // the class: columns of q and k
  bool by_keys;  // so that dQ is summed as queries x columns; else as columns x queries
  // `blocks` thread blocks of the current device share the tiles. Null, or an error text.
  const char* (*launch_bfloat16)(const BwdArgs& args, uint32_t blocks, int device, cudaStream_t stream);
  const char* (*launch_float16)(const BwdArgs& args, uint32_t blocks, int device, cudaStream_t stream);
};

extern const BwdInstance kBwdD64, kBwdD96, kBwdD128, kBwdD192V128, kBwdD192, kBwdD256;
extern const BwdInstance kBwdMaskedD64, kBwdMaskedD128, kBwdMaskedD256;
extern const BwdInstance kBwdBitsD64, kBwdBitsD128, kBwdBitsD256;  // with a bool mask alone
extern const BwdInstance kBwdTermsD64, kBwdTermsD128, kBwdTermsD256;  // with terms, with a mask or without

// flashsdpa_bwd_pre_sm90 and flashsdpa_bwd_post_sm90, over `blocks` blocks of queries. `terms`: a call has any (score_terms.h).
// `behind`: what is before in the stream is a kernel (launch_behind.h).
const char* bwd_launch_pre(const BwdPreArgs& args, DType dtype, bool terms, uint32_t blocks, cudaStream_t stream);
const char* bwd_launch_post(const BwdPostArgs& args, DType dtype, bool by_keys, bool behind, uint32_t blocks, cudaStream_t stream);
// flashsdpa_bwd_sinks_sm90, behind flashsdpa_bwd_pre_sm90.
const char* bwd_launch_sinks(const BwdSinksArgs& args, cudaStream_t stream);

}  // namespace flashsdpa
