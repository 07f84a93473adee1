// Forward kernel for few queries: tiles of 128 rows, up to 256 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdFew128D256 = fwd_make_instance<256, 256, 2, true>();

}  // namespace flashsdpa
