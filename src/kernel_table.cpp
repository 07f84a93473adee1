#include "kernel_table.h"

#include <iterator>

#include "cpu/isa.h"
#include "cpu/launchers.h"
#if defined(FLASHSDPA_HAVE_CUDA)
#include "cuda/launchers.h"
#endif

namespace flashsdpa {
namespace {

constexpr uint32_t bit(DType t) { return 1u << int(t); }
constexpr uint32_t kFloats = bit(DType::kFloat32) | bit(DType::kBFloat16) | bit(DType::kFloat16) | bit(DType::kFloat64);
constexpr uint32_t kMasks = kFloats | bit(DType::kBool);
constexpr uint32_t kExtras = kSoftcap | kAlibi | kSinks | kBatchInvariant | kDropout;
constexpr uint32_t kCommon = kCausal | kBand | kBoolMask | kBias | kGqa | kDeterministic;
constexpr uint32_t kForwardFeatures = kCommon | kExtras;
constexpr uint32_t kBackwardFeatures = kForwardFeatures | kBiasGrad | kLseGrad;

#if defined(FLASHSDPA_HAVE_CUDA)
bool always(const void*) { return true; }
#endif

// One CPU instruction set: four entries.
// clang-format off
#define FLASHSDPA_CPU_ENTRIES(set, isa)                                                                                \
  {"flashsdpa_fwd_cpu_" #set, "src/cpu/forward.h", Pass::kForward, Device::kCpu, isa, kFloats, kForwardFeatures, 256,  \
   64, 64, "online softmax, up to 256 queries share each K/V tile, longest first", set::forward_any},                  \
  {"flashsdpa_decode_cpu_" #set, "src/cpu/decode.h", Pass::kDecode, Device::kCpu, isa, kFloats, kForwardFeatures, 256, \
   64, 64, "up to 16 rows share one pass over K/V, read in place; keys split over threads", set::decode_any},          \
  {"flashsdpa_bwd_cpu_" #set, "src/cpu/backward.h", Pass::kBackward, Device::kCpu, isa, kFloats, kBackwardFeatures,    \
   256, 64, 64, "five products per tile, no atomics", set::backward_any},                                              \
  {"flashsdpa_mask_plan_cpu_" #set, "src/cpu/mask_plan_cpu.h", Pass::kMaskPlan, Device::kCpu, isa, kMasks,             \
   kBoolMask | kBias, 0, 64, 64, "one pass over the mask", set::mask_plan_any}
// clang-format on

// In ascending order of preference.
constexpr KernelEntry kTable[] = {
    FLASHSDPA_CPU_ENTRIES(portable, Isa::kPortable),
#if defined(FLASHSDPA_HAVE_X86)
    FLASHSDPA_CPU_ENTRIES(avx2, Isa::kAvx2),
    FLASHSDPA_CPU_ENTRIES(avx512, Isa::kAvx512),
    {"flashsdpa_fwd_cpu_amx", "src/cpu/amx_engine.h", Pass::kForward, Device::kCpu, Isa::kAmx, bit(DType::kBFloat16),
     kForwardFeatures, 256, 64, 64, "online softmax, products on AMX tiles, up to 512 queries share each K/V tile",
     amx::forward_any},
    {"flashsdpa_bwd_cpu_amx", "src/cpu/amx_engine.h", Pass::kBackward, Device::kCpu, Isa::kAmx, bit(DType::kBFloat16),
     kBackwardFeatures, 256, 64, 64, "five products per tile on AMX tiles, no atomics", amx::backward_any},
#endif
#if defined(FLASHSDPA_HAVE_CUDA)
    {"flashsdpa_fwd_sm90", "src/cuda/sm90/fwd_kernel.cuh", Pass::kForward, Device::kCuda, Isa::kSm90,
     bit(DType::kBFloat16) | bit(DType::kFloat16), kForwardFeatures, 256, 128, 128,
     "TMA producer, up to three wgmma consumers in turn, softmax under the products, longest first",
     launch_forward_sm90, describe_forward_sm90, forward_scratch_sm90, forward_needs_plan_sm90},
    {"flashsdpa_bwd_sm90", "src/cuda/sm90/bwd_kernel.cuh", Pass::kBackward, Device::kCuda, Isa::kSm90,
     bit(DType::kBFloat16) | bit(DType::kFloat16), kBackwardFeatures, 256, 64, 128,
     "a block of keys a tile, P and dS in registers up to 128 columns, dQ added up in float32; a mask's gradient in a pass of its own",
     launch_backward_sm90, nullptr, scratch_backward_sm90, backward_needs_plan_sm90},
    {"flashsdpa_fwd_f32_sm90", "src/cuda/sm90/f32_forward.cuh", Pass::kForward, Device::kCuda, Isa::kSm90, bit(DType::kFloat32),
     kForwardFeatures, 256, 64, 64,
     "mma.sync on TF32, three products for float32 or one where torch allows it, up to two blocks a processor",
     launch_forward_f32_sm90, describe_forward_f32_sm90, nullptr, always},
    {"flashsdpa_bwd_f32_sm90", "src/cuda/sm90/f32_backward.cuh", Pass::kBackward, Device::kCuda, Isa::kSm90, bit(DType::kFloat32),
     kBackwardFeatures, 256, 128, 64,
     "mma.sync on TF32, three products for float32 or one where torch allows it; dQ by queries, dK and dV by keys, a mask's "
     "gradient by its tiles, no atomics",
     launch_backward_f32_sm90, nullptr, scratch_backward_f32_sm90, always},
    {"flashsdpa_mask_plan_sm90", "src/cuda/sm90/mask_plan_kernel.cuh", Pass::kMaskPlan, Device::kCuda, Isa::kSm90,
     kMasks, kBoolMask | kBias, 0, 64, 64, "one pass over the mask, then lists", launch_mask_plan_sm90},
#endif
};

bool matches(const KernelEntry& e, Pass pass, Device device, DType dtype, int compute_capability) {
  if (e.pass != pass || e.device != device || !(e.dtypes & bit(dtype))) return false;
  return device == Device::kCuda ? compute_capability == 90 : isa_available(e.isa);
}

}  // namespace

const KernelEntry* kernel_table(int* count) {
  *count = int(std::size(kTable));
  return kTable;
}

int compute_capability([[maybe_unused]] int cuda_device) {
#if defined(FLASHSDPA_HAVE_CUDA)
  return cuda_compute_capability(cuda_device);
#else
  return 0;
#endif
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kPortable: return "portable";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAmx: return "amx";
    case Isa::kSm80: return "sm80";
    case Isa::kSm90: return "sm90";
  }
  return "unknown";
}

bool isa_available(Isa isa) {
  static const Isa cap = cpu_isa_cap();
  return isa <= cap && cpu_runs(isa);
}

const KernelEntry* find_kernel(Pass pass, Device device, DType dtype, int compute_capability) {
  // The search is short, but a small call should not pay for it: CPU answers are fixed for the process.
  static const auto cpu_choice = [] {
    struct Choice {
      const KernelEntry* entry[4][kDTypeCount];
    } choice{};
    for (int p = 0; p < 4; ++p)
      for (int t = 0; t < kDTypeCount; ++t)
        for (const KernelEntry& e : kTable)
          if (matches(e, Pass(p), Device::kCpu, DType(t), 0)) choice.entry[p][t] = &e;
    return choice;
  }();
  if (device == Device::kCpu) return cpu_choice.entry[int(pass)][int(dtype)];
  const KernelEntry* best = nullptr;
  for (const KernelEntry& e : kTable)
    if (matches(e, pass, device, dtype, compute_capability)) best = &e;
  return best;
}

const char* library_version() { return "0.1.0"; }

#define FLASHSDPA_TEXT_(x) #x
#define FLASHSDPA_TEXT(x) FLASHSDPA_TEXT_(x)
const char* library_build() {
  return "g++ " __VERSION__
#if defined(FLASHSDPA_HAVE_CUDA)
         ", CUDA " FLASHSDPA_TEXT(FLASHSDPA_CUDA_VERSION);
#else
         ", CUDA none";
#endif
}

}  // namespace flashsdpa
