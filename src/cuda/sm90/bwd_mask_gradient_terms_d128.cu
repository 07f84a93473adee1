// Kernel of the mask's gradient with terms: q and k up to 128 columns, v and out up to 128.
#include "bwd_mask_gradient.cuh"

namespace flashsdpa {

extern const BwdMaskInstance kBwdMaskTermsD128 = bwd_make_mask_instance<128, 128, /*kTerms=*/true>();

}  // namespace flashsdpa
