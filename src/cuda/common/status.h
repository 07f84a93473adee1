// What a launcher asks of the CUDA runtime and how it reports failure: as a static text, the error cleared.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace flashsdpa {

inline const char* error_text(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(status);
}

// The current device: its number, and how many processors it has. An error text unless it runs sm_90a code, which needs
// compute capability 9.0 and nothing else. What a device is does not change, so the runtime is asked once for each.
struct CurrentDevice {
  int number = 0, processors = 0;
};

inline const char* find_sm90_device(CurrentDevice* current) {
  constexpr int kCached = 64, kOther = -1;
  static std::atomic<int> cached[kCached];  // processors; 0: not asked yet; kOther: another compute capability
  if (const char* error = error_text(cudaGetDevice(&current->number))) return error;
  const int device = current->number;
  int processors = device < kCached ? cached[device].load(std::memory_order_relaxed) : 0;
  if (processors == 0) {
    int major = 0, minor = 0;
    const char* error = error_text(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (!error) error = error_text(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    if (!error) error = error_text(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    if (error) return error;
    if (major != 9 || minor != 0) processors = kOther;
    if (device < kCached) cached[device].store(processors, std::memory_order_relaxed);
  }
  current->processors = processors;
  if (processors != kOther) return nullptr;
  return "this kernel needs a GPU of compute capability 9.0 (H100, H200), which the current device is not; "
         "use the stock backend on it";
}

}  // namespace flashsdpa
