// Backward kernel with terms, and a mask or none: q and k up to 64 columns, v and out up to 64.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdTermsD64 = bwd_make_instance<64, 64, Masks::kValues, /*kTerms=*/true>();

}  // namespace flashsdpa
