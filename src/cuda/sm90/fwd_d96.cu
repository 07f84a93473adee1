// Forward kernel: q and k up to 96 columns, v and out up to 96.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdD96 = fwd_make_instance<96, 96, 3>();

}  // namespace flashsdpa
