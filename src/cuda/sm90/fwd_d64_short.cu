// Forward kernel: up to 64 columns, short sequences: tiles of 128 queries waste less of the diagonal than tiles of 192.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern const FwdInstance kFwdD64Short = fwd_make_instance<64, 64, 2>();

}  // namespace flashsdpa
