// Programmatic dependent launch: a grid launched behind another one of its stream (launch_behind.h) starts while that still runs.
#pragma once

namespace flashsdpa::ptx {

// By any thread of a block, for the block. Once all blocks of this grid have said it, or have ended, the grid behind may start; it
// says nothing of what has been written.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until the grid before has ended and all it wrote can be read; at once where none is waited for. A grid ends only after this
// wait of each of its blocks, so the grids before that one have ended too.
__device__ inline void wait_for_grid_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace flashsdpa::ptx
