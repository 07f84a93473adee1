// Forward kernel with terms, with a mask and without: q, k, v and out up to 128 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdTermsD128 = fwd_make_instance<128, 128, 2, /*kFew=*/false, Masks::kValues, /*kTerms=*/true>();

}  // namespace flashsdpa
