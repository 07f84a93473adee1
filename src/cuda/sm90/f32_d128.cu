// Float32 kernels for head dims up to 128.
#include "f32_instance.cuh"

namespace flashsdpa {

extern const F32Instance kF32D128 = f32_make_instance<128>();

}  // namespace flashsdpa
