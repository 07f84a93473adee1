// Forward kernel for few queries: tiles of 64 rows, up to 64 columns.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdFew64D64 = fwd_make_instance<64, 64, 1, true>();

}  // namespace flashsdpa
