// The mask-plan launcher with flat arguments, for tests that build it without torch. `sizes`, `strides`: of the mask, a
// stride of 0 where a size is 1.
#include "src/cuda/launchers.h"

using namespace flashsdpa;

extern "C" __attribute__((visibility("default"))) const char* mask_plan(const void* mask, int dtype, const int64_t* sizes,
                                                                         const int64_t* strides, int32_t* plan, void* stream) {
  MaskPlanParams p{};
  p.mask.data = mask;
  p.mask.dtype = static_cast<DType>(dtype);
  for (int axis = 0; axis < 4; ++axis) {
    p.mask.size[axis] = sizes[axis];
    p.mask.stride[axis] = strides[axis];
  }
  p.plan = plan;
  Launch launch;
  launch.stream = stream;
  return launch_mask_plan_sm90(&p, launch);
}
