// Kernel of the mask's gradient with terms: q and k up to 256 columns, v and out up to 256.
#include "bwd_mask_gradient.cuh"

namespace flashsdpa {

extern const BwdMaskInstance kBwdMaskTermsD256 = bwd_make_mask_instance<256, 256, /*kTerms=*/true>();

}  // namespace flashsdpa
