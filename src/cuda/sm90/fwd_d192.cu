// Forward kernel: q and k up to 192 columns, v and out up to 192.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdD192 = fwd_make_instance<192, 192, 2>();

}  // namespace flashsdpa
