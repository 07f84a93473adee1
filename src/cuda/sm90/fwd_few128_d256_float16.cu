// Float16 of fwd_few128_d256.cu.
#include "fwd_instance.cuh"

namespace flashsdpa {

template const char* fwd_launch_instance<DType::kFloat16, 256, 256, 2, true, Masks::kNone>(
    const FwdArgs&, uint32_t, int, cudaStream_t);

}  // namespace flashsdpa
