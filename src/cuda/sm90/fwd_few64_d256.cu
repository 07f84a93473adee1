// Forward kernel for few queries: tiles of 64 rows, up to 256 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdFew64D256 = fwd_make_instance<256, 256, 1, true>();

}  // namespace flashsdpa
