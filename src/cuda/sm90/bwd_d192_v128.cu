// Backward kernel: q and k up to 192 columns, v and out up to 128.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdD192V128 = bwd_make_instance<192, 128>();

}  // namespace flashsdpa
