// Float32 kernels with terms, for head dims up to 128.
#include "f32_instance.cuh"

namespace flashsdpa {

extern const F32Instance kF32TermsD128 = f32_make_instance<128, /*kTerms=*/true>();

}  // namespace flashsdpa
