// Backward kernel with a mask: q and k up to 64 columns, v and out up to 64. Float16 has a file of its own, as both would take
// long to compile.
#include "bwd_instance.cuh"

namespace flashsdpa {

extern template const char* bwd_launch_instance<DType::kFloat16, 64, 64, Masks::kValues, false>(const BwdArgs&, uint32_t, int, cudaStream_t);
extern const BwdInstance kBwdMaskedD64 = bwd_make_instance<64, 64, Masks::kValues>();

}  // namespace flashsdpa
