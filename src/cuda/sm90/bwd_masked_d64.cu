// Backward kernel with a mask: q and k up to 64 columns, v and out up to 64.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdMaskedD64 = bwd_make_instance<64, 64, /*kMasked=*/true>();

}  // namespace flashsdpa
