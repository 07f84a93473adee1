// The CPU kernels of each instruction set, as the kernel table sees them.
#pragma once

#include "../kernel_table.h"

namespace flashsdpa {

using Launcher = const char* (*)(const void* params, const Launch& launch);

#define FLASHSDPA_DECLARE_CPU(isa)                                     \
  namespace isa {                                                      \
  const char* forward_any(const void* params, const Launch& launch);   \
  const char* decode_any(const void* params, const Launch& launch);    \
  const char* backward_any(const void* params, const Launch& launch);  \
  const char* mask_plan_any(const void* params, const Launch& launch); \
  }
FLASHSDPA_DECLARE_CPU(portable)
FLASHSDPA_DECLARE_CPU(avx2)
FLASHSDPA_DECLARE_CPU(avx512)
FLASHSDPA_DECLARE_CPU(amx)  // bfloat16 forward and backward only
#undef FLASHSDPA_DECLARE_CPU

}  // namespace flashsdpa
