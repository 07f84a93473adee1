// The gradient of an additive mask in float32, for head dims up to 128.
#include "f32_mask_gradient.cuh"

namespace flashsdpa {

extern const F32MaskInstance kF32MaskD128 = f32_make_mask_instance<128>();

}  // namespace flashsdpa
