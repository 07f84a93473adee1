// Forward kernel: q and k up to 64 columns, v and out up to 64.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdD64 = fwd_make_instance<64, 64, 3>();

}  // namespace flashsdpa
