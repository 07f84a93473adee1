// Backward kernel with terms, and a mask or none: q and k up to 128 columns, v and out up to 128.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdTermsD128 = bwd_make_instance<128, 128, Masks::kValues, /*kTerms=*/true>();

}  // namespace flashsdpa
