// Forward kernel with a bool mask: q and k up to 64 columns, v and out up to 64.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdBitsD64 = fwd_make_instance<64, 64, 2, /*kFew=*/false, Masks::kBits>();

}  // namespace flashsdpa
