// Forward kernel with a mask, few queries: q, k, v and out up to 256 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdMaskedFewD256 = fwd_make_instance<256, 256, 1, /*kFew=*/true, /*kMasked=*/true>();

}  // namespace flashsdpa
