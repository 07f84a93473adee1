// Float32 kernels for head dims up to 64.
#include "f32_instance.cuh"

namespace flashsdpa {

extern const F32Instance kF32D64 = f32_make_instance<64>();

}  // namespace flashsdpa
