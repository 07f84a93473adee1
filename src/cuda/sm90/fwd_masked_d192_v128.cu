// Forward kernel with a mask: q and k up to 192 columns, v and out up to 128.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdMaskedD192V128 = fwd_make_instance<192, 128, 2, /*kFew=*/false, Masks::kValues>();

}  // namespace flashsdpa
