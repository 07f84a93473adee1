// Forward kernel for few queries: tiles of 128 rows, up to 64 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdFew128D64 = fwd_make_instance<64, 64, 2, true>();

}  // namespace flashsdpa
