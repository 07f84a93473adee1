// Kernel of the mask's gradient: q and k up to 128 columns, v and out up to 128. Float16 has a file of its own, as both would
// take long to compile.
#include "bwd_mask_gradient.cuh"

namespace flashsdpa {

extern template const char* bwd_launch_mask_instance<DType::kFloat16, 128, 128, false>(const BwdMaskArgs&, uint32_t, int, cudaStream_t);
extern const BwdMaskInstance kBwdMaskD128 = bwd_make_mask_instance<128, 128>();

}  // namespace flashsdpa
