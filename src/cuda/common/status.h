// What a launcher asks of the CUDA runtime and how it reports failure: as a static text, the error cleared.
#pragma once

#include <cuda_runtime_api.h>

namespace flashsdpa {

inline const char* error_text(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(status);
}

// Null if the current device runs sm_90a code (which runs on compute capability 9.0 and no other).
inline const char* refuse_unless_sm90() {
  int device = 0, major = 0, minor = 0;
  const char* error = error_text(cudaGetDevice(&device));
  if (!error) error = error_text(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (!error) error = error_text(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (error) return error;
  if (major == 9 && minor == 0) return nullptr;
  return "this kernel needs a GPU of compute capability 9.0 (H100, H200), which the current device is not; "
         "use the stock backend on it";
}

}  // namespace flashsdpa
