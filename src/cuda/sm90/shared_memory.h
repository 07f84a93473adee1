// Dynamic shared memory beyond 48 KB has to be asked for, once for each kernel and device.
#pragma once

#include "../common/status.h"

namespace flashsdpa {

class SharedMemoryGrant {
 public:
  // Null, or an error text.
  template <typename Kernel>
  const char* ask(Kernel kernel, int bytes, int device) {
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (granted_.load(std::memory_order_relaxed) & bit) return nullptr;
    const char* error = error_text(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    if (!error) granted_.fetch_or(bit, std::memory_order_relaxed);
    return error;
  }

 private:
  std::atomic<uint64_t> granted_{0};  // bit per device
};

}  // namespace flashsdpa
