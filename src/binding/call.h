// The arguments of flashsdpa::forward, bundled by reference: what the checks, the kernels, Meta and autograd read.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

namespace flashsdpa {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

// The keyword arguments that forward and backward share, in the order of the schema.
#define FLASHSDPA_OPTION_PARAMS                                                                            \
  const ::flashsdpa::OptTensor &attn_mask, const ::flashsdpa::OptTensor &mask_plan,                        \
      const ::flashsdpa::OptTensor &rng_state, double dropout_p, bool is_causal, bool bottom_right,        \
      std::optional<double> scale, c10::SymInt window_left, c10::SymInt window_right, double softcap,      \
      const ::flashsdpa::OptTensor &alibi_slopes, const ::flashsdpa::OptTensor &sinks, bool deterministic, \
      bool batch_invariant
#define FLASHSDPA_OPTION_NAMES                                                                                    \
  attn_mask, mask_plan, rng_state, dropout_p, is_causal, bottom_right, scale, window_left, window_right, softcap, \
      alibi_slopes, sinks, deterministic, batch_invariant

#define FLASHSDPA_FORWARD_PARAMS \
  const at::Tensor &query, const at::Tensor &key, const at::Tensor &value, FLASHSDPA_OPTION_PARAMS
#define FLASHSDPA_BACKWARD_PARAMS                                                                          \
  const ::flashsdpa::OptTensor &grad_out, const ::flashsdpa::OptTensor &grad_lse, const at::Tensor &query, \
      const at::Tensor &key, const at::Tensor &value, const at::Tensor &out, const at::Tensor &lse,        \
      FLASHSDPA_OPTION_PARAMS, std::array<bool, 5> output_mask

// flashsdpa::jvp: what backward takes, a direction for each of its differentiable inputs, and the options.
#define FLASHSDPA_JVP_PARAMS                                                                                        \
  const ::flashsdpa::OptTensor &grad_out, const ::flashsdpa::OptTensor &grad_lse, const at::Tensor &query,           \
      const at::Tensor &key, const at::Tensor &value, const at::Tensor &out, const at::Tensor &lse,                  \
      const ::flashsdpa::OptTensor &tangent_grad_out, const ::flashsdpa::OptTensor &tangent_grad_lse,                \
      const ::flashsdpa::OptTensor &tangent_query, const ::flashsdpa::OptTensor &tangent_key,                        \
      const ::flashsdpa::OptTensor &tangent_value, const ::flashsdpa::OptTensor &tangent_attn_mask,                  \
      const ::flashsdpa::OptTensor &tangent_sinks, FLASHSDPA_OPTION_PARAMS, std::array<bool, 7> output_mask

inline const OptTensor kNoTensor;

struct Options {
  const OptTensor& attn_mask = kNoTensor;
  const OptTensor& mask_plan = kNoTensor;
  const OptTensor& rng_state = kNoTensor;
  double dropout_p = 0.0;
  bool is_causal = false;
  bool bottom_right = false;
  std::optional<double> scale = std::nullopt;
  c10::SymInt window_left = -1;
  c10::SymInt window_right = -1;
  double softcap = 0.0;
  const OptTensor& alibi_slopes = kNoTensor;
  const OptTensor& sinks = kNoTensor;
  bool deterministic = false;
  bool batch_invariant = false;
};

// The options `o` with other tensors.
inline Options with_tensors(const Options& o, const OptTensor& attn_mask, const OptTensor& mask_plan,
                            const OptTensor& rng_state, const OptTensor& alibi_slopes, const OptTensor& sinks) {
  return {attn_mask,    mask_plan, rng_state,     o.dropout_p,    o.is_causal, o.bottom_right,  o.scale,
          o.window_left, o.window_right, o.softcap, alibi_slopes, sinks,       o.deterministic, o.batch_invariant};
}

struct Call {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const Options& options;
  at::Device device = query.defined() ? query.device() : at::Device(at::kMeta);  // explain may ask for another one
};

using ForwardResult = std::tuple<Tensor, Tensor>;                           // out, lse
using BackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // query, key, value, attn_mask, sinks

// Directions along which flashsdpa::jvp differentiates; one that is not given is zero.
struct Tangents {
  const OptTensor& grad_out = kNoTensor;
  const OptTensor& grad_lse = kNoTensor;
  const OptTensor& query = kNoTensor;
  const OptTensor& key = kNoTensor;
  const OptTensor& value = kNoTensor;
  const OptTensor& attn_mask = kNoTensor;
  const OptTensor& sinks = kNoTensor;
};

// Tangents of (out, lse, grad_query, grad_key, grad_value, grad_attn_mask, grad_sinks).
using JvpResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline bool given(const OptTensor& t) { return t.has_value() && t->defined(); }
inline const Tensor& tensor_or_undefined(const OptTensor& t) {
  static const Tensor undefined;
  return t.has_value() ? *t : undefined;
}

// Calls through the dispatcher, by cached typed handles (ops.cpp).
ForwardResult call_forward(const Call& call);
BackwardResult call_backward(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out,
                             const Tensor& lse, std::array<bool, 5> output_mask);
JvpResult call_jvp(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out,
                   const Tensor& lse, const Tangents& tangents, std::array<bool, 7> output_mask);
Tensor call_mask_plan(const Tensor& attn_mask);
Tensor call_rng_state(const at::Device& device);

// Implementations, registered in ops.cpp: on devices (execute.cpp, jvp.cpp), of derivatives (autograd.cpp), vmap
// (batching.cpp) and autocast (autocast.cpp).
ForwardResult forward_on_device(FLASHSDPA_FORWARD_PARAMS);
BackwardResult backward_on_device(FLASHSDPA_BACKWARD_PARAMS);
JvpResult jvp_on_device(FLASHSDPA_JVP_PARAMS);
Tensor mask_plan_on_device(const Tensor& attn_mask);
ForwardResult forward_autograd(FLASHSDPA_FORWARD_PARAMS);
BackwardResult backward_autograd(FLASHSDPA_BACKWARD_PARAMS);
JvpResult jvp_autograd(FLASHSDPA_JVP_PARAMS);
ForwardResult forward_batched(FLASHSDPA_FORWARD_PARAMS);
BackwardResult backward_batched(FLASHSDPA_BACKWARD_PARAMS);
JvpResult jvp_batched(FLASHSDPA_JVP_PARAMS);
Tensor mask_plan_batched(const Tensor& attn_mask);
ForwardResult forward_autocast_cpu(FLASHSDPA_FORWARD_PARAMS);
ForwardResult forward_autocast_cuda(FLASHSDPA_FORWARD_PARAMS);

}  // namespace flashsdpa
