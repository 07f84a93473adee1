// What autocast does to the inputs of flashsdpa::forward.

#include <ATen/core/LegacyTypeDispatch.h>

#include "call.h"

// Declared here because ATen/autocast_mode.h includes all of ATen, which would double this file's compile time.
namespace at::autocast {
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace flashsdpa {

namespace {

// As torch casts the arguments of scaled_dot_product_attention: floating-point tensors, masks too, to the lower type.
ForwardResult forward_autocast(const Call& call, c10::DispatchKey autocast_key, c10::DeviceType device) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key);
  const auto type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, device); };
  const Options& o = call.options;
  const OptTensor mask = given(o.attn_mask) ? OptTensor(cast(*o.attn_mask)) : OptTensor();
  return call_forward(
      {cast(call.query), cast(call.key), cast(call.value),
       with_tensors(o, mask, o.mask_plan, o.rng_state, o.alibi_slopes, o.sinks)});
}

}  // namespace

ForwardResult forward_autocast_cpu(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  return forward_autocast({query, key, value, options}, c10::DispatchKey::AutocastCPU, at::kCPU);
}

ForwardResult forward_autocast_cuda(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  return forward_autocast({query, key, value, options}, c10::DispatchKey::AutocastCUDA, at::kCUDA);
}

}  // namespace flashsdpa
