// The gradient of an additive mask in float32, for head dims up to 256.
#include "f32_mask_gradient.cuh"

namespace flashsdpa {

extern const F32MaskInstance kF32MaskD256 = f32_make_mask_instance<256>();

}  // namespace flashsdpa
