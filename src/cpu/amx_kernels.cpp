// The bfloat16 kernels on AMX: the forward and backward of forward.h and backward.h over the AMX engine.
#include "amx_engine.h"
#include "backward.h"

namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE {

const char* forward_any(const void* params, const Launch& launch) { return forward<AmxForward>(params, launch); }
const char* backward_any(const void* params, const Launch& launch) { return backward<AmxBackward>(params, launch); }

}  // namespace flashsdpa::FLASHSDPA_ISA_NAMESPACE
