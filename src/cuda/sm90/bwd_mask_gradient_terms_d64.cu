// Kernel of the mask's gradient with terms: q and k up to 64 columns, v and out up to 64.
#include "bwd_mask_gradient.cuh"

namespace flashsdpa {

extern const BwdMaskInstance kBwdMaskTermsD64 = bwd_make_mask_instance<64, 64, /*kTerms=*/true>();

}  // namespace flashsdpa
