// Backward kernel with a bool mask: q and k up to 256 columns, v and out up to 256.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdBitsD256 = bwd_make_instance<256, 256, Masks::kBits>();

}  // namespace flashsdpa
