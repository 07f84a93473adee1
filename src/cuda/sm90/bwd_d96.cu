// Backward kernel: q and k up to 96 columns, v and out up to 96.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern const BwdInstance kBwdD96 = bwd_make_instance<96, 96>();

}  // namespace flashsdpa
