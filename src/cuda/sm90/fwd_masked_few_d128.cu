// Forward kernel with a mask, few queries: q, k, v and out up to 128 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdMaskedFewD128 = fwd_make_instance<128, 128, 1, /*kFew=*/true, Masks::kValues>();

}  // namespace flashsdpa
