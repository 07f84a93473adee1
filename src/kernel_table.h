// The one table of kernels. Dispatch, refusal reasons, doctor, explain, the README's support table and the tests read
// it.
#pragma once

#include <cstdint>

#include "params.h"

namespace flashsdpa {

enum class Pass : int32_t { kForward = 0, kBackward = 1, kDecode = 2, kMaskPlan = 3 };
enum class Device : int32_t { kCpu = 0, kCuda = 1 };

// Instruction sets in ascending order of preference. CPU variants are chosen at run time.
enum class Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3, kSm80 = 10, kSm90 = 11 };

enum Feature : uint32_t {
  kCausal = 1 << 0,
  kBand = 1 << 1,  // windows and bottom-right causal
  kBoolMask = 1 << 2,
  kBias = 1 << 3,  // additive mask
  kBiasGrad = 1 << 4,
  kGqa = 1 << 5,
  kLseGrad = 1 << 6,
  kDeterministic = 1 << 7,
  kSoftcap = 1 << 8,
  kAlibi = 1 << 9,
  kSinks = 1 << 10,  // and, in a backward, their gradient
  kBatchInvariant = 1 << 11,
  kDropout = 1 << 12,
};

struct Launch {
  void* stream = nullptr;            // cudaStream_t; null on the CPU
  const ThreadPool* pool = nullptr;  // CPU only
};

// What a kernel would do with one call, for explain.
struct KernelDetail {
  int32_t block_m, block_n, stages;  // queries and keys of a tile, stages of K and of V; 0 stages: all there is at once
  const char* order;  // in which its tiles are visited
  bool uses_tma;      // where alignment and strides allow it
  bool tma[4];        // whether q, k, v and out go by TMA; else by ordinary loads and stores
  int32_t key_splits;    // parts of the keys that go to blocks of their own; 1: none
  int32_t packed_heads;  // query heads of a group whose rows share a tile; 1: none
  const char* kernel = nullptr;    // what the profiler shows, where that is not the entry's name
  const char* schedule = nullptr;  // one phrase, where the entry's is not that kernel's
};

struct KernelEntry {
  const char* name;    // what the profiler shows, e.g. flashsdpa_fwd_cpu_avx2
  const char* source;  // the file to read first
  Pass pass;
  Device device;
  Isa isa;
  uint32_t dtypes;           // bit per DType
  uint32_t features;         // Feature bits
  int32_t max_dim;           // of q/k and of v
  int32_t block_m, block_n;  // tile: queries x keys
  const char* schedule;      // one phrase for explain
  // params: ForwardParams (kForward, kDecode), BackwardParams, MaskPlanParams. Returns null, or an error text.
  const char* (*launch)(const void* params, const Launch& launch);
  // Null where the entry says it all. Reads no memory of the tensors: data may be any address of their alignment.
  void (*describe)(const void* params, KernelDetail* detail) = nullptr;
  // Bytes of params.scratch on the current device, of params that hold all but it; null: none.
  int64_t (*scratch_bytes)(const void* params) = nullptr;
  // Whether it takes the mask of params, which has none, only with a plan; null: with or without. Reads sizes, dtypes and options.
  bool (*needs_plan)(const void* params) = nullptr;
};

// All entries of this build, and whether this machine can run one.
const KernelEntry* kernel_table(int* count);
bool isa_available(Isa isa);  // a CPU set: this processor (and TORCH_FLASHSDPA_CPU_ISA, a cap) allows it
const char* isa_name(Isa isa);
// The best entry of `pass` on `device` for `dtype` that this machine can run; null if none. For CUDA the caller gives
// the compute capability (90); CPU ignores it.
const KernelEntry* find_kernel(Pass pass, Device device, DType dtype, int compute_capability);
// The compute capability of a CUDA device (90 for 9.0); 0 without such a device, or in a build without CUDA kernels.
int compute_capability(int cuda_device);
const char* library_version();
const char* library_build();  // compilers, CUDA version or "none", one line

}  // namespace flashsdpa
