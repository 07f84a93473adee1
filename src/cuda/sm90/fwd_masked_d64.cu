// Forward kernel with a mask: q and k up to 64 columns, v and out up to 64.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdMaskedD64 = fwd_make_instance<64, 64, 2, /*kFew=*/false, Masks::kValues>();

}  // namespace flashsdpa
