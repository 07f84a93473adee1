// Backward kernel: q and k up to 192 columns, v and out up to 192.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdD192 = bwd_make_instance<192, 192>();

}  // namespace flashsdpa
