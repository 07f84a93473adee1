// How the shims are given sizes: batch, heads_q, heads_kv, seq_q, seq_k, dim, dim_v.
#pragma once

#include "src/params.h"

namespace flashsdpa {

inline Problem problem_of(const int64_t* sizes) {
  Problem p{};
  p.batch = sizes[0];
  p.heads_q = sizes[1];
  p.heads_kv = sizes[2];
  p.seq_q = sizes[3];
  p.seq_k = sizes[4];
  p.dim = sizes[5];
  p.dim_v = sizes[6];
  return p;
}

}  // namespace flashsdpa
