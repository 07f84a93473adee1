// Forward kernel with terms, with a mask and without: q, k, v and out up to 256 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdTermsD256 = fwd_make_instance<256, 256, 2, /*kFew=*/false, Masks::kValues, /*kTerms=*/true>();

}  // namespace flashsdpa
