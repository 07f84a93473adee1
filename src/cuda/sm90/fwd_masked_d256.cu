// Forward kernel with a mask: q and k up to 256 columns, v and out up to 256.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdMaskedD256 = fwd_make_instance<256, 256, 2, /*kFew=*/false, Masks::kValues>();

}  // namespace flashsdpa
