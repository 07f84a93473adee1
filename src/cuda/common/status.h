// What a launcher asks of the CUDA runtime and how it reports failure: as a static text, the error cleared.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace flashsdpa {

inline const char* error_text(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(status);
}

// What a device is does not change, so the runtime is asked once for each.
struct DeviceFacts {
  int compute_capability = 0;  // 90 for 9.0
  int processors = 0;
};

inline const char* device_facts(int device, DeviceFacts* facts) {
  constexpr int kCached = 64;
  static std::atomic<uint32_t> cached[kCached];  // compute capability << 16 | processors; 0: not asked yet
  uint32_t both = device < kCached ? cached[device].load(std::memory_order_relaxed) : 0;
  if (both == 0) {
    int major = 0, minor = 0, processors = 0;
    const char* error = error_text(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (!error) error = error_text(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    if (!error) error = error_text(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    if (error) return error;
    both = static_cast<uint32_t>(major * 10 + minor) << 16 | static_cast<uint32_t>(processors);
    if (device < kCached) cached[device].store(both, std::memory_order_relaxed);
  }
  *facts = {static_cast<int>(both >> 16), static_cast<int>(both & 0xffff)};
  return nullptr;
}

struct CurrentDevice {
  int number = 0, processors = 0;
};

// The current device; an error text unless it runs sm_90a code, which needs compute capability 9.0 and nothing else.
inline const char* find_sm90_device(CurrentDevice* current) {
  DeviceFacts facts;
  const char* error = error_text(cudaGetDevice(&current->number));
  if (!error) error = device_facts(current->number, &facts);
  if (error) return error;
  current->processors = facts.processors;
  if (facts.compute_capability == 90) return nullptr;
  return "this kernel needs a GPU of compute capability 9.0 (H100, H200), which the current device is not; "
         "use the stock backend on it";
}

}  // namespace flashsdpa
