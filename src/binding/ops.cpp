// All that is registered with torch's dispatcher: schemas, Meta kernels, implementations, the router. The schemas are
// final: exported programs name every argument.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <vector>

#include "call.h"
#include "checks.h"
#include "layout.h"
#include "router.h"

namespace flashsdpa {

namespace {

// Strides of inputs matter to the outputs' layout, so compiled graphs must keep them.
const std::vector<at::Tag> kPure{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
// A plan does not show its mask's strides. A compiler that must keep them computes the mask once more for each op.
const std::vector<at::Tag> kPureOfAnyLayout{at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
const std::vector<at::Tag> kRandom{at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};

#define FLASHSDPA_OPTION_SCHEMA                                                                   \
  "Tensor? attn_mask=None, Tensor? mask_plan=None, Tensor? rng_state=None, float dropout_p=0.0, " \
  "bool is_causal=False, bool bottom_right=False, float? scale=None, SymInt window_left=-1, "     \
  "SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "    \
  "bool deterministic=False, bool batch_invariant=False"

template <class Fn>
c10::TypedOperatorHandle<Fn> handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Fn>();
}

std::array<c10::SymInt, 4> sym_sizes_of(const Tensor& t) {
  const auto s = t.sym_sizes();
  return {s[0], s[1], s[2], s[3]};
}

Tensor dense_meta(const std::array<c10::SymInt, 4>& sizes, const Tensor& like) {
  return at::empty_strided_symint(sizes, dense_strides<c10::SymInt>(sizes, like.sym_strides()), like.options());
}

ForwardResult forward_meta(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  require("flashsdpa::forward", {query, key, value, options});
  auto sizes = sym_sizes_of(query);
  sizes[3] = value.sym_size(3);
  return {dense_meta(sizes, query), at::empty_symint({sizes[0], sizes[1], sizes[2]},
                                                     query.options().dtype(accumulation_type(query.scalar_type())))};
}

BackwardResult backward_meta(FLASHSDPA_BACKWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  require_backward({query, key, value, options}, grad_out, grad_lse, out, lse);
  const auto grad = [&](bool wanted, const Tensor& like) {
    return wanted ? dense_meta(sym_sizes_of(like), like) : at::empty({0}, query.options());
  };
  return {grad(output_mask[0], query), grad(output_mask[1], key), grad(output_mask[2], value),
          output_mask[3] && given(attn_mask) ? at::empty_symint(attn_mask->sym_sizes(), attn_mask->options())
                                             : at::empty({0}, query.options()),
          output_mask[4] && given(sinks) ? at::empty_symint(sinks->sym_sizes(), sinks->options())
                                         : at::empty({0}, query.options())};
}

JvpResult jvp_meta(FLASHSDPA_JVP_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  require_jvp({query, key, value, options}, grad_out, grad_lse, out, lse,
              {tangent_grad_out, tangent_grad_lse, tangent_query, tangent_key, tangent_value, tangent_attn_mask,
               tangent_sinks});
  const auto tangent = [&](bool wanted, const OptTensor& like) {
    return wanted && given(like) ? at::empty_symint(like->sym_sizes(), like->options())
                                 : at::empty({0}, query.options());
  };
  return {tangent(output_mask[0], out), tangent(output_mask[1], lse),       tangent(output_mask[2], query),
          tangent(output_mask[3], key), tangent(output_mask[4], value),     tangent(output_mask[5], attn_mask),
          tangent(output_mask[6], sinks)};
}

Tensor mask_plan_meta(const Tensor& attn_mask) {
  require_plannable(attn_mask);
  return at::empty_symint(plan_shape<c10::SymInt>(attn_mask.sym_sizes()), attn_mask.options().dtype(at::kInt));
}

// (seed, offset) drawn from the device's default generator: torch.manual_seed governs it, a graph replay redraws it.
Tensor rng_state(std::optional<at::Device> device) {
  return at::empty({2}, at::TensorOptions().dtype(at::kLong).device(device.value_or(at::kCPU))).random_();
}

}  // namespace

ForwardResult call_forward(const Call& call) {
  static const auto op = handle<ForwardResult(FLASHSDPA_FORWARD_PARAMS)>("flashsdpa::forward");
  const auto& o = call.options;
  return op.call(call.query, call.key, call.value, o.attn_mask, o.mask_plan, o.rng_state, o.dropout_p, o.is_causal,
                 o.bottom_right, o.scale, o.window_left, o.window_right, o.softcap, o.alibi_slopes, o.sinks,
                 o.deterministic, o.batch_invariant);
}

BackwardResult call_backward(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out,
                             const Tensor& lse, std::array<bool, 5> output_mask) {
  static const auto op = handle<BackwardResult(FLASHSDPA_BACKWARD_PARAMS)>("flashsdpa::backward");
  const auto& o = call.options;
  return op.call(grad_out, grad_lse, call.query, call.key, call.value, out, lse, o.attn_mask, o.mask_plan, o.rng_state,
                 o.dropout_p, o.is_causal, o.bottom_right, o.scale, o.window_left, o.window_right, o.softcap,
                 o.alibi_slopes, o.sinks, o.deterministic, o.batch_invariant, output_mask);
}

JvpResult call_jvp(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out,
                   const Tensor& lse, const Tangents& t, std::array<bool, 7> output_mask) {
  static const auto op = handle<JvpResult(FLASHSDPA_JVP_PARAMS)>("flashsdpa::jvp");
  const auto& o = call.options;
  return op.call(grad_out, grad_lse, call.query, call.key, call.value, out, lse, t.grad_out, t.grad_lse, t.query, t.key,
                 t.value, t.attn_mask, t.sinks, o.attn_mask, o.mask_plan, o.rng_state, o.dropout_p, o.is_causal,
                 o.bottom_right, o.scale, o.window_left, o.window_right, o.softcap, o.alibi_slopes, o.sinks,
                 o.deterministic, o.batch_invariant, output_mask);
}

Tensor call_mask_plan(const Tensor& attn_mask) {
  static const auto op = handle<Tensor(const Tensor&)>("flashsdpa::mask_plan");
  return op.call(attn_mask);
}

Tensor call_rng_state(const at::Device& device) {
  static const auto op = handle<Tensor(std::optional<at::Device>)>("flashsdpa::rng_state");
  return op.call(device);
}

TORCH_LIBRARY(flashsdpa, m) {
  m.def("forward(Tensor query, Tensor key, Tensor value, *, " FLASHSDPA_OPTION_SCHEMA ") -> (Tensor out, Tensor lse)",
        kPure);
  m.def(
      "backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
      "*, " FLASHSDPA_OPTION_SCHEMA
      ", bool[5] output_mask) -> (Tensor grad_query, Tensor grad_key, "
      "Tensor grad_value, Tensor grad_attn_mask, Tensor grad_sinks)",
      kPure);
  m.def(
      "jvp(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
      "Tensor? tangent_grad_out, Tensor? tangent_grad_lse, Tensor? tangent_query, Tensor? tangent_key, "
      "Tensor? tangent_value, Tensor? tangent_attn_mask, Tensor? tangent_sinks, *, " FLASHSDPA_OPTION_SCHEMA
      ", bool[7] output_mask) -> (Tensor tangent_out, Tensor tangent_lse, Tensor tangent_grad_query, "
      "Tensor tangent_grad_key, Tensor tangent_grad_value, Tensor tangent_grad_attn_mask, Tensor tangent_grad_sinks)",
      kPureOfAnyLayout);
  m.def("mask_plan(Tensor attn_mask) -> Tensor", kPureOfAnyLayout);
  // By keyword: there torch looks for the device whose generator it saves for a recomputation in a compiled graph.
  m.def("rng_state(*, Device? device=None) -> Tensor", kRandom);
}

TORCH_LIBRARY_IMPL(flashsdpa, Meta, m) {
  m.impl("forward", TORCH_FN(forward_meta));
  m.impl("backward", TORCH_FN(backward_meta));
  m.impl("jvp", TORCH_FN(jvp_meta));
  m.impl("mask_plan", TORCH_FN(mask_plan_meta));
}

TORCH_LIBRARY_IMPL(flashsdpa, CompositeExplicitAutograd, m) { m.impl("rng_state", TORCH_FN(rng_state)); }

// One implementation for both devices: c10 gives the device guard and the stream, the kernel table the launcher.
void register_device(torch::Library& m) {
  m.impl("forward", TORCH_FN(forward_on_device));
  m.impl("backward", TORCH_FN(backward_on_device));
  m.impl("jvp", TORCH_FN(jvp_on_device));
  m.impl("mask_plan", TORCH_FN(mask_plan_on_device));
}
TORCH_LIBRARY_IMPL(flashsdpa, CPU, m) { register_device(m); }
TORCH_LIBRARY_IMPL(flashsdpa, CUDA, m) { register_device(m); }

TORCH_LIBRARY_IMPL(flashsdpa, Autograd, m) {
  m.impl("forward", TORCH_FN(forward_autograd));
  m.impl("backward", TORCH_FN(backward_autograd));
  m.impl("jvp", TORCH_FN(jvp_autograd));
  m.impl("mask_plan", torch::CppFunction::makeFallthrough());
  m.impl("rng_state", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(flashsdpa, FuncTorchBatched, m) {
  m.impl("forward", TORCH_FN(forward_batched));
  m.impl("backward", TORCH_FN(backward_batched));
  m.impl("jvp", TORCH_FN(jvp_batched));
  m.impl("mask_plan", TORCH_FN(mask_plan_batched));
}

TORCH_LIBRARY_IMPL(flashsdpa, AutocastCPU, m) { m.impl("forward", TORCH_FN(forward_autocast_cpu)); }
TORCH_LIBRARY_IMPL(flashsdpa, AutocastCUDA, m) { m.impl("forward", TORCH_FN(forward_autocast_cuda)); }

namespace {

std::mutex router_mutex;
std::vector<std::unique_ptr<torch::Library>> router_libraries;  // destroying them gives torch its own kernels back

// torch warns about every override of a built-in kernel; this one is the product.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void install_router() {
  std::lock_guard<std::mutex> lock(router_mutex);
  if (!router_libraries.empty()) return;
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  // torch has a kernel of its own for calls under vmap, whether their tensors are mapped or not.
  for (const auto key : {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::FuncTorchVmapMode}) {
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("scaled_dot_product_attention", TORCH_FN(route));
    router_libraries.push_back(std::move(library));
  }
}

void remove_router() {
  std::lock_guard<std::mutex> lock(router_mutex);
  router_libraries.clear();
}

bool router_installed() {
  std::lock_guard<std::mutex> lock(router_mutex);
  return !router_libraries.empty();
}

}  // namespace flashsdpa
