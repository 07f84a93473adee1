// Forward kernel for few queries: tiles of 64 rows, up to 128 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdFew64D128 = fwd_make_instance<128, 128, 1, true>();

}  // namespace flashsdpa
