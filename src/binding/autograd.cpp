// Derivatives of forward, backward and jvp, in both modes. Nodes are written out, as torch's own are: a C++
// torch::autograd::Function refuses torch.func, and costs a small call more.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <atomic>
#include <type_traits>

#include "call_node.h"
#include "checks.h"
#include "jvp.h"
#include "mask_plan.h"

namespace flashsdpa {

namespace {

// torch counts references to nodes by shared_ptr up to 2.11, and later in the node.
template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>)
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  else
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
}

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }
OptTensor tangent(const OptTensor& t) {
  return given(t) ? optional(t->_fw_grad(/*level=*/0)) : OptTensor();
}
Tensor primal(const Tensor& t) { return has_tangent(t) ? t._fw_primal(/*level=*/0) : t; }
OptTensor primal(const OptTensor& t) { return given(t) ? OptTensor(primal(*t)) : t; }
void set_tangent(const Tensor& t, const Tensor& tangent) {
  t._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}

template <class... Ts>
bool any_tangent(const Ts&... tensors) {
  return (has_tangent(tensors) || ...);
}
template <class... Ts>
bool any_requires_grad(const Ts&... tensors) {
  return at::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

// Those of the outputs that were asked for; of the others the ops return placeholders.
template <class Tuple, size_t kCount>
variable_list chosen(Tuple&& outputs, const std::array<bool, kCount>& wanted) {
  variable_list list = std::apply([](auto&&... t) { return variable_list{std::move(t)...}; }, std::move(outputs));
  for (size_t i = 0; i < kCount; ++i)
    if (!wanted[i]) list[i] = Tensor();
  return list;
}

// Whether queries and keys are known to be one granule of a plan each.
bool one_granule(const Tensor& query, const Tensor& key) {
  const auto fits = [](const Tensor& t) {
    const auto length = t.sym_size(2).maybe_as_int();
    return length && *length <= kGranule;
  };
  return fits(query) && fits(key);
}

// Edges: query, key, value, attn_mask, sinks.
struct ForwardNode final : CallNode<ForwardNode, 0, 5> {
  using CallNode::CallNode;
  static constexpr const char* kName = "FlashsdpaForwardBackward";
  static constexpr bool kTraceable = true;
  static variable_list gradients(const variable_list& grads, const Saved& s, const Wanted& wanted) {
    const Options options = s.options();
    return chosen(call_backward(optional(grads[0]), optional(grads[1]), {s.query, s.key, s.value, options}, s.out, s.lse,
                                wanted),
                  wanted);
  }
};

// Edges: grad_out, grad_lse, query, key, value, attn_mask, sinks; jvp.cpp says why its tangents are their gradients. None to
// out and lse, which are functions of query, key, ...: their share is in the gradients of those.
struct BackwardNode final : CallNode<BackwardNode, 2, 7> {
  using CallNode::CallNode;
  static constexpr const char* kName = "FlashsdpaBackwardBackward";
  static constexpr bool kTraceable = true;
  static variable_list gradients(const variable_list& grads, const Saved& s, const Wanted& wanted) {
    const Options options = s.options();
    const OptTensor query = optional(grads[0]), key = optional(grads[1]), value = optional(grads[2]),
                    attn_mask = optional(grads[3]), sinks = optional(grads[4]);
    const Tangents along{.query = query, .key = key, .value = value, .attn_mask = attn_mask, .sinks = sinks};
    return chosen(call_jvp(s.own[0], s.own[1], {s.query, s.key, s.value, options}, s.out, s.lse, along, wanted), wanted);
  }
};

std::atomic<GilReleaser> gil_releaser{[](const std::function<void()>& f) { f(); }};

// The differentiable inputs of jvp, in the order of its edges.
constexpr size_t kJvpInputs = 16;

// Derivatives of jvp: the composite once more, this time recorded. What is kept until then is linear in the lengths.
struct JvpNode final : CallNode<JvpNode, 9, kJvpInputs> {
  using CallNode::CallNode;
  static constexpr const char* kName = "FlashsdpaJvpBackward";
  static constexpr bool kTraceable = false;  // it records and differentiates a graph of its own
  static variable_list gradients(const variable_list& grads, Saved s, const Wanted& wanted) {
    bool again = false;  // whether a derivative of the result can be asked for
    const bool allowed = at::GradMode::is_enabled();
    at::AutoGradMode recording(true);
    variable_list leaves;
    size_t edge = 0;
    const auto leaf = [&](Tensor& t) {
      if (!wanted[edge++]) return;
      t = at::alias(t);  // the gradient stops here
      if (t.requires_grad())
        again = allowed;
      else  // a transform of torch.func that is over: its tensors stand for what they wrapped
        t.set_requires_grad(true);
      leaves.push_back(t);
    };
    const auto optional_leaf = [&](OptTensor& t) {
      if (given(t))
        leaf(*t);
      else
        ++edge;
    };
    for (Tensor* t : {&s.query, &s.key, &s.value, &s.out, &s.lse}) leaf(*t);
    optional_leaf(s.tensors.attn_mask);
    optional_leaf(s.tensors.sinks);
    for (OptTensor& t : s.own) optional_leaf(t);
    const Options options = s.options();
    const auto& [grad_out, grad_lse, t0, t1, t2, t3, t4, t5, t6] = s.own;
    std::array<bool, 7> asked;
    for (size_t i = 0; i < asked.size(); ++i) asked[i] = grads[i].defined();
    const auto results = chosen(jvp_composite(grad_out, grad_lse, {s.query, s.key, s.value, options}, s.out, s.lse,
                                              {t0, t1, t2, t3, t4, t5, t6}, asked),
                                asked);
    variable_list outputs, cotangents;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].defined() || !results[i].requires_grad()) continue;
      outputs.push_back(results[i]);
      cotangents.push_back(grads[i]);
    }
    variable_list found(leaves.size());
    if (!outputs.empty() && !leaves.empty())
      gil_releaser.load()([&] {
        found = torch::autograd::grad(outputs, leaves, cotangents, /*retain_graph=*/std::nullopt, /*create_graph=*/again,
                                      /*allow_unused=*/true);
      });
    variable_list gradients(kJvpInputs);
    for (size_t i = 0, next = 0; i < kJvpInputs; ++i)
      if (wanted[i]) gradients[i] = found[next++];
    return gradients;
  }
};

void check_outputs_alone(const char* op, bool differentiated) {
  TORCH_CHECK(!differentiated, op,
              ": out or lse is differentiated and no input is; they are differentiated as functions of query, key, value, "
              "attn_mask and sinks: let one of those require the gradient, or carry the tangent");
}

}  // namespace

void set_gil_releaser(GilReleaser releaser) { gil_releaser.store(releaser); }

ForwardResult forward_autograd(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  // Refused here, since below autograd a missing backward is noticed too late, and the dispatcher speaks less clearly of
  // layouts.
  const bool grad = needs_grad(call);
  const Tensor &mask = tensor_or_undefined(attn_mask), &sink = tensor_or_undefined(sinks);
  Reasons reasons;
  check_slopes(call, reasons);
  const auto dense = [](const OptTensor& t) { return !given(t) || is_dense(*t); };
  if (!reasons.ok() || (grad && !has_backward(call)) || !is_dense(query) || !is_dense(key) || !is_dense(value) ||
      !dense(attn_mask) || !dense(mask_plan) || !dense(rng_state) || !dense(alibi_slopes) || !dense(sinks))
    raise("flashsdpa::forward", call);
  const bool tangents = any_tangent(query, key, value, mask, sink);
  if (!grad && !tangents) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_forward(call);
  }

  decltype(make_node<ForwardNode>(options)) node;
  if (grad) {
    node = make_node<ForwardNode>(options);
    node->set_next_edges(torch::autograd::collect_next_edges(query, key, value, mask, sink));
  }
  // CUDA kernels take no mask of more than a granule without a plan: made once, for forward and backward.
  OptTensor plan = mask_plan;
  ForwardResult result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (query.is_cuda() && mask.defined() && !given(mask_plan) && !one_granule(query, key)) plan = call_mask_plan(mask);
    result = call_forward({query, key, value, with_tensors(options, attn_mask, plan, rng_state, alibi_slopes, sinks)});
  }
  auto& [out, lse] = result;
  if (grad) {
    torch::autograd::set_history(out, node);
    torch::autograd::set_history(lse, node);
  }
  if (tangents) {
    const OptTensor plain_mask = primal(attn_mask), plain_sinks = primal(sinks);
    const Options plain = with_tensors(options, plain_mask, plan, rng_state, alibi_slopes, plain_sinks);
    const OptTensor t_query = tangent(query), t_key = tangent(key), t_value = tangent(value), t_mask = tangent(attn_mask),
                    t_sinks = tangent(sinks);
    const auto t = call_jvp(
        kNoTensor, kNoTensor, {primal(query), primal(key), primal(value), plain}, out, lse,
        {.query = t_query, .key = t_key, .value = t_value, .attn_mask = t_mask, .sinks = t_sinks}, {true, true});
    set_tangent(out, std::get<0>(t));
    set_tangent(lse, std::get<1>(t));
  }
  if (grad) {
    // An inference tensor cannot be saved. What has no gradient is copied: stock saves a bool mask as numbers, and so takes one.
    const auto savable = [](const OptTensor& t) { return given(t) && t->is_inference() ? OptTensor(t->clone()) : t; };
    const OptTensor kept_mask = mask.defined() && mask.scalar_type() == at::kBool ? savable(attn_mask) : attn_mask,
                    kept_plan = savable(plan), kept_slopes = savable(alibi_slopes);
    node->save({query, key, value, with_tensors(options, kept_mask, kept_plan, rng_state, kept_slopes, sinks)}, out, lse,
               /*out_is_mine=*/true);
  }
  return result;
}

BackwardResult backward_autograd(FLASHSDPA_BACKWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  const auto backward = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(grad_out, grad_lse, call, out, lse, output_mask);
  };
  const Tensor &g_out = tensor_or_undefined(grad_out), &g_lse = tensor_or_undefined(grad_lse),
               &mask = tensor_or_undefined(attn_mask), &sink = tensor_or_undefined(sinks);
  const bool grad = any_requires_grad(g_out, g_lse, query, key, value, mask, sink);
  const bool tangents = any_tangent(g_out, g_lse, query, key, value, mask, sink);
  if (!grad) check_outputs_alone("flashsdpa::backward", any_requires_grad(out, lse));
  if (!tangents) check_outputs_alone("flashsdpa::backward", any_tangent(out, lse));
  if (!grad && !tangents) return backward();
  Reasons reasons;
  check_slopes(call, reasons);
  if (!reasons.ok()) raise("flashsdpa::backward", call);

  decltype(make_node<BackwardNode>(options)) node;
  if (grad) {
    node = make_node<BackwardNode>(options);
    node->set_next_edges(torch::autograd::collect_next_edges(g_out, g_lse, query, key, value, mask, sink));
    node->save(call, out, lse, /*out_is_mine=*/false);
    node->save(grad_out);
    node->save(grad_lse);
  }
  BackwardResult result = backward();
  auto& [dq, dk, dv, dmask, dsinks] = result;
  const std::array<Tensor*, 5> gradients{&dq, &dk, &dv, &dmask, &dsinks};
  const std::array<bool, 5> made{output_mask[0], output_mask[1], output_mask[2], output_mask[3] && mask.defined(),
                                 output_mask[4] && sink.defined()};
  if (grad)
    for (size_t i = 0; i < 5; ++i) torch::autograd::set_history(made[i] ? *gradients[i] : Tensor(), node);
  if (tangents) {
    const OptTensor plain_mask = primal(attn_mask), plain_sinks = primal(sinks), plain_grad_out = primal(grad_out),
                    plain_grad_lse = primal(grad_lse);
    const Options plain = with_tensors(options, plain_mask, mask_plan, rng_state, alibi_slopes, plain_sinks);
    const OptTensor t_grad_out = tangent(grad_out), t_grad_lse = tangent(grad_lse), t_query = tangent(query),
                    t_key = tangent(key), t_value = tangent(value), t_mask = tangent(attn_mask), t_sinks = tangent(sinks);
    const auto t = chosen(
        call_jvp(plain_grad_out, plain_grad_lse, {primal(query), primal(key), primal(value), plain}, primal(out),
                 primal(lse), {t_grad_out, t_grad_lse, t_query, t_key, t_value, t_mask, t_sinks},
                 {false, false, made[0], made[1], made[2], made[3], made[4]}),
        std::array<bool, 0>{});
    for (size_t i = 0; i < 5; ++i)
      if (made[i]) set_tangent(*gradients[i], t[2 + i]);
  }
  return result;
}

JvpResult jvp_autograd(FLASHSDPA_JVP_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  const Tangents along{tangent_grad_out, tangent_grad_lse,  tangent_query, tangent_key,
                       tangent_value,    tangent_attn_mask, tangent_sinks};
  Reasons reasons;
  check_slopes(call, reasons);
  if (!reasons.ok()) raise("flashsdpa::jvp", call);
  const auto with_inputs = [&](const auto& f) {  // in the order of JvpNode's edges
    const auto& t = tensor_or_undefined;
    return f(query, key, value, out, lse, t(attn_mask), t(sinks), t(grad_out), t(grad_lse), t(tangent_grad_out),
             t(tangent_grad_lse), t(tangent_query), t(tangent_key), t(tangent_value), t(tangent_attn_mask),
             t(tangent_sinks));
  };
  // A tangent of a tangent: torch's own rules of the composite's ops.
  if (with_inputs([](const auto&... t) { return any_tangent(t...); })) {
    require_jvp(call, grad_out, grad_lse, out, lse, along);
    return jvp_composite(grad_out, grad_lse, call, out, lse, along, output_mask);
  }
  const bool grad = with_inputs([](const auto&... t) { return any_requires_grad(t...); });
  decltype(make_node<JvpNode>(options)) node;
  if (grad) {
    node = make_node<JvpNode>(options);
    node->set_next_edges(
        with_inputs([](const auto&... t) { return torch::autograd::collect_next_edges(t...); }));
    node->save(call, out, lse, /*out_is_mine=*/false);
    for (const OptTensor* t : {&grad_out, &grad_lse, &tangent_grad_out, &tangent_grad_lse, &tangent_query, &tangent_key,
                               &tangent_value, &tangent_attn_mask, &tangent_sinks})
      node->save(*t);
  }
  JvpResult result;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    result = call_jvp(grad_out, grad_lse, call, out, lse, along, output_mask);
  }
  if (grad)
    for (const Tensor& t : chosen(JvpResult(result), output_mask)) torch::autograd::set_history(t, node);
  return result;
}

}  // namespace flashsdpa
