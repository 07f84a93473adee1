// Float16 of bwd_masked_d64.cu.
#include "bwd_instance.cuh"

namespace flashsdpa {

template const char* bwd_launch_instance<DType::kFloat16, 64, 64, Masks::kValues, false>(const BwdArgs&, uint32_t, int, cudaStream_t);

}  // namespace flashsdpa
