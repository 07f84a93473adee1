// All CPU kernels for one instruction set: this file is compiled once per set, with FLASHSDPA_ISA_NAMESPACE its name.
#include "../kernel_table.h"
#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "mask_plan_cpu.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

// Calls kernel<Of<dtype>>.
template <typename In>
using Itself = In;
#define FLASHSDPA_BY_DTYPE(kernel, Of)                                                 \
  switch (static_cast<const Problem*>(params)->dtype) {                                \
    case DType::kFloat32: return kernel<Of<float>>(params, launch);                    \
    case DType::kFloat64: return kernel<Of<double>>(params, launch);                   \
    case DType::kBFloat16: return kernel<Of<BFloat16>>(params, launch);                \
    case DType::kFloat16: return kernel<Of<Float16>>(params, launch);                  \
    default: return #kernel ": q, k, v must be float32, float64, bfloat16 or float16"; \
  }

// ForwardParams and BackwardParams begin with their Problem.
static_assert(offsetof(ForwardParams, problem) == 0 && offsetof(BackwardParams, problem) == 0);

const char* forward_any(const void* params, const Launch& launch) { FLASHSDPA_BY_DTYPE(forward, FloatForward) }
const char* decode_any(const void* params, const Launch& launch) { FLASHSDPA_BY_DTYPE(decode, Itself) }
const char* backward_any(const void* params, const Launch& launch) { FLASHSDPA_BY_DTYPE(backward, FloatBackward) }
const char* mask_plan_any(const void* params, const Launch& launch) { return mask_plan(params, launch); }

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
