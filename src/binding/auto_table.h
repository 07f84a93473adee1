// Recorded runs that answer, under "auto", whether our kernels are faster than stock for a call.
#pragma once

#include <string>
#include <vector>

#include "call.h"
#include "checks.h"

namespace flashsdpa {

enum class MaskKind : int32_t { kFull = 0, kCausalOnly = 1, kMask = 2, kBias = 3, kDropout = 4 };
// A bool mask, an additive one; with dropout, whatever else is given.
const char* mask_kind_name(MaskKind kind);

struct AutoRow {
  Isa isa;
  DType dtype;
  MaskKind kind;
  bool grad;  // forward and backward together
  int64_t dim, seq_q, seq_k;
  double ratio;  // stock time / our time
};

void set_auto_table(const std::vector<AutoRow>& rows);

// Looks up the nearest recorded run, in log2 of (dim, seq_q, seq_k). Symbolic sizes count as large.
void check_auto(const Call& call, Reasons& reasons);

}  // namespace flashsdpa
