// Derivatives of flashsdpa::forward, and what autocast does to its inputs.

#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include "call.h"
#include "checks.h"

// Declared here because ATen/autocast_mode.h includes all of ATen, which would double this file's compile time.
namespace at::autocast {
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace flashsdpa {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Options that are rarely set are stored only when set: a small call's host time is mostly bookkeeping.
enum Flag : int64_t {
  kIsCausal = 1,
  kBottomRight = 2,
  kIsDeterministic = 4,
  kIsBatchInvariant = 8,
  kHasMask = 16,
  kHasPlan = 32,
  kHasRngState = 64,
  kHasAlibi = 128,
  kHasSinks = 256,
};

// The plan of the call. CUDA kernels take no mask without one: made once, for forward and backward.
OptTensor plan_of(const Call& call) {
  const Options& o = call.options;
  if (!call.query.is_cuda() || !given(o.attn_mask) || given(o.mask_plan)) return o.mask_plan;
  return call_mask_plan(*o.attn_mask);
}

Options with_mask(const Options& o, const OptTensor& mask, const OptTensor& plan) {
  return {mask,           plan,    o.rng_state,     o.dropout_p,      o.is_causal,
          o.bottom_right, o.scale, o.window_left,   o.window_right,   o.softcap,
          o.alibi_slopes, o.sinks, o.deterministic, o.batch_invariant};
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptTensor& attn_mask, const OptTensor& sinks, const Call& call) {
    ForwardResult result;
    const Options& o = call.options;
    OptTensor plan;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      plan = plan_of(call);
      const Options planned = with_mask(o, attn_mask, plan);
      result = call_forward({query, key, value, planned});
    }
    auto& [out, lse] = result;
    ctx->set_materialize_grads(false);
    // Optional tensors are saved where given; the flags tell which.
    variable_list tensors{query, key, value, out, lse};
    tensors.reserve(10);
    int64_t flags = (o.is_causal ? kIsCausal : 0) | (o.bottom_right ? kBottomRight : 0) |
                    (o.deterministic ? kIsDeterministic : 0) | (o.batch_invariant ? kIsBatchInvariant : 0);
    const auto keep = [&](const OptTensor& t, Flag flag) {
      if (!given(t)) return;
      tensors.push_back(*t);
      flags |= flag;
    };
    keep(attn_mask, kHasMask);
    keep(plan, kHasPlan);
    keep(o.rng_state, kHasRngState);
    keep(o.alibi_slopes, kHasAlibi);
    keep(sinks, kHasSinks);
    ctx->save_for_backward(std::move(tensors));
    auto& saved = ctx->saved_data;
    saved["flags"] = flags;
    if (o.scale) saved["scale"] = *o.scale;
    if (o.dropout_p != 0.0) saved["dropout_p"] = o.dropout_p;
    if (o.softcap != 0.0) saved["softcap"] = o.softcap;
    if (o.window_left.is_symbolic() || o.window_left != -1) saved["window_left"] = o.window_left;
    if (o.window_right.is_symbolic() || o.window_right != -1) saved["window_right"] = o.window_right;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(6);
    const auto saved = ctx->get_saved_variables();
    const auto& data = ctx->saved_data;
    const auto number = [&](const char* name) {
      const auto it = data.find(name);
      return it == data.end() ? 0.0 : it->second.toDouble();
    };
    const auto window = [&](const char* name) {
      const auto it = data.find(name);
      return it == data.end() ? c10::SymInt(-1) : it->second.toSymInt();
    };
    const int64_t flags = data.at("flags").toInt();
    size_t next = 5;
    const auto kept = [&](Flag flag) { return flags & flag ? OptTensor(saved[next++]) : OptTensor(); };
    const OptTensor attn_mask = kept(kHasMask), mask_plan = kept(kHasPlan), rng_state = kept(kHasRngState),
                    alibi_slopes = kept(kHasAlibi), sinks = kept(kHasSinks);
    const Options options{attn_mask,
                          mask_plan,
                          rng_state,
                          number("dropout_p"),
                          (flags & kIsCausal) != 0,
                          (flags & kBottomRight) != 0,
                          data.count("scale") ? std::optional<double>(number("scale")) : std::nullopt,
                          window("window_left"),
                          window("window_right"),
                          number("softcap"),
                          alibi_slopes,
                          sinks,
                          (flags & kIsDeterministic) != 0,
                          (flags & kIsBatchInvariant) != 0};

    // needs_input_grad counts the tensor arguments of forward that were given: query, key, value, attn_mask, sinks.
    const bool mask_grad = attn_mask && ctx->needs_input_grad(3);
    const bool sinks_grad = sinks && ctx->needs_input_grad(attn_mask ? 4 : 3);
    const std::array<bool, 5> wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                     mask_grad, sinks_grad};
    const Call call{saved[0], saved[1], saved[2], options};
    const auto optional = [](const Tensor& t) { return t.defined() ? OptTensor(t) : OptTensor(); };
    const auto run = [&] {
      return call_backward(optional(grads[0]), optional(grads[1]), call, saved[3], saved[4], wanted);
    };
    BackwardResult result;
    if (at::GradMode::is_enabled()) {  // create_graph=True: let the op's own autograd kernel refuse differentiation
      result = run();
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      result = run();
    }
    const auto& [dq, dk, dv, dmask, dsinks] = result;
    const auto pick = [](bool wanted, const Tensor& grad) { return wanted ? grad : Tensor(); };
    return {pick(wanted[0], dq),    pick(wanted[1], dk),      pick(wanted[2], dv),
            pick(mask_grad, dmask), pick(sinks_grad, dsinks), Tensor()};
  }
};

// As torch casts the arguments of scaled_dot_product_attention: floating-point tensors, masks too, to the lower type.
ForwardResult forward_autocast(const Call& call, c10::DispatchKey autocast_key, c10::DeviceType device) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key);
  const auto type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, device); };
  const Options& o = call.options;
  const OptTensor mask = given(o.attn_mask) ? OptTensor(cast(*o.attn_mask)) : OptTensor();
  const Options options = with_mask(o, mask, o.mask_plan);
  return call_forward({cast(call.query), cast(call.key), cast(call.value), options});
}

}  // namespace

ForwardResult forward_autograd(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  // Refused here, since below autograd a tangent is out of sight, a missing backward is noticed too late, and the
  // dispatcher speaks less clearly of layouts.
  const bool grad = needs_grad(call);
  Reasons reasons;
  check_transforms(call, reasons);
  const auto dense = [](const OptTensor& t) { return !given(t) || is_dense(*t); };
  if (!reasons.ok() || (grad && !has_backward(call)) || !is_dense(query) || !is_dense(key) || !is_dense(value) ||
      !dense(attn_mask) || !dense(mask_plan) || !dense(rng_state) || !dense(alibi_slopes) || !dense(sinks))
    raise("flashsdpa::forward", call);
  if (grad) {
    auto outputs = Attention::apply(query, key, value, attn_mask, sinks, call);
    return {std::move(outputs[0]), std::move(outputs[1])};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return call_forward(call);
}

ForwardResult forward_autocast_cpu(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  return forward_autocast({query, key, value, options}, c10::DispatchKey::AutocastCPU, at::kCPU);
}

ForwardResult forward_autocast_cuda(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  return forward_autocast({query, key, value, options}, c10::DispatchKey::AutocastCUDA, at::kCUDA);
}

}  // namespace flashsdpa
