// Which CPU instruction sets this machine runs.
#pragma once

#include "../kernel_table.h"

namespace flashsdpa {

bool cpu_runs(Isa isa);  // before the cap of TORCH_FLASHSDPA_CPU_ISA
Isa cpu_isa_cap();       // from TORCH_FLASHSDPA_CPU_ISA=portable|avx2|avx512|amx; unset or unknown: no cap

}  // namespace flashsdpa
