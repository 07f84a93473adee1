// Float16 of fwd_masked_few_d64.cu.
#include "fwd_instance.cuh"

namespace flashsdpa {

template const char* fwd_launch_instance<DType::kFloat16, 64, 64, 1, true, Masks::kValues>(
    const FwdArgs&, uint32_t, int, cudaStream_t);

}  // namespace flashsdpa
