// Emulated src/ptx/grid.cuh.
#pragma once

#include "../../emulation/device.h"

namespace flashsdpa::ptx {

inline void launch_dependents() { emulation::launch_dependents(); }
inline void wait_for_grid_before() { emulation::wait_for_grid_before(); }

}  // namespace flashsdpa::ptx
