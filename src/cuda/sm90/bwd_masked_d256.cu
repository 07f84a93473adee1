// Backward kernel with a mask: q and k up to 256 columns, v and out up to 256.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdMaskedD256 = bwd_make_instance<256, 256, Masks::kValues>();

}  // namespace flashsdpa
