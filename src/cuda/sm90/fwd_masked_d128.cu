// Forward kernel with a mask: q and k up to 128 columns, v and out up to 128. Float16 has a file of its own, as both would
// take long to compile.
#include "fwd_instance.cuh"

namespace flashsdpa {

extern template const char* fwd_launch_instance<DType::kFloat16, 128, 128, 2, false, Masks::kValues>(
    const FwdArgs&, uint32_t, int, cudaStream_t);
extern const FwdInstance kFwdMaskedD128 = fwd_make_instance<128, 128, 2, /*kFew=*/false, Masks::kValues>();

}  // namespace flashsdpa
