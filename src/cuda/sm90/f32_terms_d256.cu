// Float32 kernels with terms, for head dims up to 256.
#include "f32_instance.cuh"

namespace flashsdpa {

extern const F32Instance kF32TermsD256 = f32_make_instance<256, /*kTerms=*/true>();

}  // namespace flashsdpa
