#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashsdpa {

#if defined(__x86_64__)
namespace {

// AMX needs the processor (CPUID leaf 7: AMX-BF16 bit 22, AMX-TILE bit 24) and the kernel's leave to use tile state.
bool amx_granted() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace
#endif

bool cpu_runs(Isa isa) {
  if (isa == Isa::kPortable) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512) return avx512;
  if (isa == Isa::kAmx) {
    static const bool amx = avx512 && __builtin_cpu_supports("avx512bf16") && amx_granted();
    return amx;
  }
#endif
  return false;
}

Isa cpu_isa_cap() {
  const char* cap = std::getenv("TORCH_FLASHSDPA_CPU_ISA");
  if (cap)
    for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512})
      if (std::strcmp(cap, isa_name(isa)) == 0) return isa;
  return Isa::kAmx;
}

}  // namespace flashsdpa
