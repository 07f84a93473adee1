// Float16 of bwd_mask_gradient_d128.cu.
#include "bwd_mask_gradient.cuh"

namespace flashsdpa {

template const char* bwd_launch_mask_instance<DType::kFloat16, 128, 128, false>(const BwdMaskArgs&, uint32_t, int, cudaStream_t);

}  // namespace flashsdpa
