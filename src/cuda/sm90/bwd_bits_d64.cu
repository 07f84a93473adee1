// Backward kernel with a bool mask: q and k up to 64 columns, v and out up to 64.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdBitsD64 = bwd_make_instance<64, 64, Masks::kBits>();

}  // namespace flashsdpa
