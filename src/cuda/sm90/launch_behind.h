// Launches a kernel that may start before the one before it in the stream has ended (src/ptx/grid.cuh).
#pragma once

#include "../common/status.h"

namespace flashsdpa {

// The kernel waits for the one before (ptx::wait_for_grid_before) ahead of all that it has to do with that one's memory. What is
// before must be a kernel, as a graph that records the stream has such edges between kernels only. Null, or an error text.
template <typename Args>
const char* launch_behind(void (*kernel)(Args), uint32_t blocks, int threads, int shared_bytes, cudaStream_t stream, const Args& args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return error_text(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace flashsdpa
