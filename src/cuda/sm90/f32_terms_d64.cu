// Float32 kernels with terms, for head dims up to 64.
#include "f32_instance.cuh"

namespace flashsdpa {

extern const F32Instance kF32TermsD64 = f32_make_instance<64, /*kTerms=*/true>();

}  // namespace flashsdpa
