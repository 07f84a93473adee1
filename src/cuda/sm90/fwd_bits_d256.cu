// Forward kernel with a bool mask: q and k up to 256 columns, v and out up to 256.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdBitsD256 = fwd_make_instance<256, 256, 2, /*kFew=*/false, Masks::kBits>();

}  // namespace flashsdpa
