// Float16 of fwd_masked_d128.cu.
#include "fwd_instance.cuh"

namespace flashsdpa {

template const char* fwd_launch_instance<DType::kFloat16, 128, 128, 2, false, Masks::kValues>(
    const FwdArgs&, uint32_t, int, cudaStream_t);

}  // namespace flashsdpa
