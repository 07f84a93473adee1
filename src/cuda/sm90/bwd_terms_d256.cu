// Backward kernel with terms, and a mask or none: q and k up to 256 columns, v and out up to 256.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdTermsD256 = bwd_make_instance<256, 256, Masks::kValues, /*kTerms=*/true>();

}  // namespace flashsdpa
