// Float32 kernels for head dims up to 256.
#include "f32_instance.cuh"

namespace flashsdpa {

extern const F32Instance kF32D256 = f32_make_instance<256>();

}  // namespace flashsdpa
