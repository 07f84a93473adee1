// Forward kernel for few queries: tiles of 128 rows, up to 128 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdFew128D128 = fwd_make_instance<128, 128, 2, true>();

}  // namespace flashsdpa
