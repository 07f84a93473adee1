// Forward kernel with a bool mask: q and k up to 128 columns, v and out up to 128.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdBitsD128 = fwd_make_instance<128, 128, 2, /*kFew=*/false, Masks::kBits>();

}  // namespace flashsdpa
