// Forward kernel for few queries: tiles of 128 rows, up to 256 columns. Float16 has a file of its own, as both would take long
// to compile.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern template const char* fwd_launch_instance<DType::kFloat16, 256, 256, 2, true, Masks::kNone>(
    const FwdArgs&, uint32_t, int, cudaStream_t);
extern const FwdInstance kFwdFew128D256 = fwd_make_instance<256, 256, 2, true>();

}  // namespace flashsdpa
