// Forward kernel with a mask, few queries: q, k, v and out up to 256 columns. Float16 has a file of its own, as both would
// take long to compile.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern template const char* fwd_launch_instance<DType::kFloat16, 256, 256, 1, true, Masks::kValues>(
    const FwdArgs&, uint32_t, int, cudaStream_t);
extern const FwdInstance kFwdMaskedFewD256 = fwd_make_instance<256, 256, 1, /*kFew=*/true, Masks::kValues>();

}  // namespace flashsdpa
