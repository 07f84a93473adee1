// Forward kernel with terms, with a mask and without: q, k, v and out up to 64 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdTermsD64 = fwd_make_instance<64, 64, 2, /*kFew=*/false, Masks::kValues, /*kTerms=*/true>();

}  // namespace flashsdpa
