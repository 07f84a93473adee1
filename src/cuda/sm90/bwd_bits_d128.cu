// Backward kernel with a bool mask: q and k up to 128 columns, v and out up to 128.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdBitsD128 = bwd_make_instance<128, 128, Masks::kBits>();

}  // namespace flashsdpa
