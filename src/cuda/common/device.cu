// What the binding asks about a CUDA device before it chooses a kernel.
#include "../launchers.h"
#include "status.h"

namespace flashsdpa {

int cuda_compute_capability(int device) {
  DeviceFacts facts;
  return device_facts(device, &facts) ? 0 : facts.compute_capability;
}

}  // namespace flashsdpa
