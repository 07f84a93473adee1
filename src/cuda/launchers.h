// Host entry points of the CUDA kernels, for the kernel table. Each takes the params struct of its pass
// (params.h) and a stream, launches without waiting, allocates nothing, and may be captured. Returns null, or
// a static error text; no CUDA error is left behind for the caller's next call to find.
#pragma once

#include "../kernel_table.h"

namespace flashsdpa {

int cuda_compute_capability(int device);  // 90 for 9.0; 0 if there is no such device

const char* launch_forward_sm90(const void* params, const Launch& launch);    // ForwardParams
void describe_forward_sm90(const void* params, KernelDetail* detail);
int64_t forward_scratch_sm90(const void* params);
bool forward_needs_plan_sm90(const void* params);
const char* launch_backward_sm90(const void* params, const Launch& launch);   // BackwardParams
int64_t scratch_backward_sm90(const void* params);
bool backward_needs_plan_sm90(const void* params);
const char* launch_forward_f32_sm90(const void* params, const Launch& launch);   // ForwardParams
void describe_forward_f32_sm90(const void* params, KernelDetail* detail);
const char* launch_backward_f32_sm90(const void* params, const Launch& launch);  // BackwardParams
int64_t scratch_backward_f32_sm90(const void* params);
const char* launch_mask_plan_sm90(const void* params, const Launch& launch);  // MaskPlanParams

}  // namespace flashsdpa
