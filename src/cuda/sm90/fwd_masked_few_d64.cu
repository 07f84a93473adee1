// Forward kernel with a mask, few queries: q, k, v and out up to 64 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdMaskedFewD64 = fwd_make_instance<64, 64, 1, /*kFew=*/true, /*kMasked=*/true>();

}  // namespace flashsdpa
