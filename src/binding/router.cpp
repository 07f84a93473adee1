#include "router.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>

#include <atomic>

#include "auto_table.h"
#include "checks.h"
#include "layout.h"
#include "normalise.h"
#include "refused_calls.h"

namespace flashsdpa {

namespace {

std::atomic<Hook> hook{nullptr};

bool python_dispatch(const Tensor& t) { return t.defined() && t.unsafeGetTensorImpl()->is_python_dispatch(); }

bool any_python_dispatch(const Request& r) {
  return python_dispatch(r.query) || python_dispatch(r.key) || python_dispatch(r.value) ||
         (r.attn_mask.has_value() && python_dispatch(*r.attn_mask));
}

constexpr c10::DispatchKeySet kFunctorchKeys({c10::DispatchKey::FuncTorchGradWrapper,
                                              c10::DispatchKey::FuncTorchBatched});

// Whether a transform of torch.func has wrapped a tensor, which hides what is inside.
bool any_wrapped(const Request& r) {
  const auto wrapped = [](const Tensor& t) { return t.defined() && t.key_set().has_any(kFunctorchKeys); };
  return wrapped(r.query) || wrapped(r.key) || wrapped(r.value) || (r.attn_mask.has_value() && wrapped(*r.attn_mask));
}

Tensor stock(const Request& r) {
  return at::native::scaled_dot_product_attention(r.query, r.key, r.value, r.attn_mask, r.dropout_p, r.is_causal,
                                                  r.scale, r.enable_gqa);
}

Options options_of(const Request& r, const OptTensor& mask, const Selection& selection) {
  return {.attn_mask = mask,
          .dropout_p = r.dropout_p,
          .is_causal = r.is_causal,
          .scale = r.scale,
          .batch_invariant = selection.batch_invariant};
}

// The one decision. Refusals go to `reasons`; without any, `n` holds the call for the op. What needs no shape comes
// first, so that a trace gets no guard where the answer cannot depend on it.
void decide(const Request& r, const at::Device& device, const Selection& selection, Normalised& n, Reasons& reasons) {
  const Options raw_options = options_of(r, r.attn_mask, selection);
  const Call raw{r.query, r.key, r.value, raw_options, device};
  const bool readable = check_kinds(raw, reasons);
  if (!reasons.ok() && !reasons.collecting()) return;
  if (r.dropout_p > 0.0 && any_wrapped(r) &&
      reasons.add("dropout_p is ", r.dropout_p, " inside a transform of torch.func, whose randomness is stock PyTorch's"))
    return;
  if (device.is_meta() && reasons.add("device is meta; supported: cpu, cuda")) return;
  if (selection.backend == Backend::kStock && reasons.add("the selection is stock")) return;
  if (torch_leaves_to_stock(selection) && reasons.add(reasons.collecting() ? torch_backends_text() : std::string()))
    return;
  if (!readable || !normalise_inputs(r.query, r.key, r.value, r.enable_gqa, n, reasons)) return;
  // Before the mask is looked at: a call that "auto" leaves to stock should not pay for it.
  if (selection.backend == Backend::kAuto && !selection.batch_invariant)
    check_auto({n.query, n.key, n.value, raw_options, device}, reasons);
  if (!reasons.ok() && !reasons.collecting()) return;
  if (!normalise_mask(r.attn_mask, any_python_dispatch(r), any_wrapped(r), n, reasons)) return;
  const Options options = options_of(r, n.attn_mask, selection);
  check_shapes({n.query, n.key, n.value, options, device}, reasons);
}

void notify(const Request& r, const char* kernel, const std::vector<std::string>& reasons, const Selection& selection,
            bool traced) {
  const auto observe = observer.load();
  if (observe == nullptr) return;
  const Options options = options_of(r, r.attn_mask, selection);
  observe({"decision",
           "aten::scaled_dot_product_attention",
           kernel,
           {r.query, r.key, r.value, options},
           reasons,
           backend_name(selection.backend),
           traced ? "traced" : "eager"});
}

Tensor serve(const Request& r, const Normalised& n, const Selection& selection, bool traced) {
  OptTensor plan;
  if (n.attn_mask.has_value() && worth_planning(n.query, n.key, *n.attn_mask, n.query.device()))
    plan = call_mask_plan(*n.attn_mask);
  OptTensor rng_state;
  if (r.dropout_p > 0.0) rng_state = call_rng_state(n.query.device());
  const Options options{.attn_mask = n.attn_mask,
                        .mask_plan = plan,
                        .rng_state = rng_state,
                        .dropout_p = r.dropout_p,
                        .is_causal = r.is_causal,
                        .scale = r.scale,
                        .deterministic = at::globalContext().deterministicAlgorithms(),
                        .batch_invariant = selection.batch_invariant};
  const Tensor out = std::get<0>(call_forward({n.query, n.key, n.value, options}));
  if (n.rank == 4) return out;
  // To autograd no view of `out` where nothing is recorded: what no_grad() made may be edited outside of it, a view of it not.
  if (!traced && !any_wrapped(r) && !out.requires_grad() && !out._fw_grad(/*level=*/0).defined()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return restore_rank(out, n);
  }
  return restore_rank(out, n);
}

// Traced calls ask the hook, which puts a guard on the selection; only where the answer can matter. So do calls whose
// tensors are wrapped: it can look inside, and says whether they are traced.
Selection selection_for(const Request& r, bool* traced, std::string* reason) {
  *traced = any_python_dispatch(r);
  if (!*traced && !any_wrapped(r)) return current_selection();
  const auto ask = hook.load(std::memory_order_relaxed);
  if (ask == nullptr) return {};
  const Options options = options_of(r, r.attn_mask, {});
  Reasons kinds;
  const Call call{r.query, r.key, r.value, options};
  check_kinds(call, kinds);
  if (!kinds.ok() && !strict_possible()) return {};
  const Selection answer = ask(r.query, r.key, r.value, r.attn_mask, r.dropout_p, traced, reason);
  return *traced ? answer : current_selection();
}

// reason: of the hook, empty where the router has its own.
Tensor refuse(const Request& r, const Selection& selection, bool traced, const std::string& reason) {
  if (!selection.strict && !observing()) {
    if (!traced && !any_wrapped(r)) remember_refused(r, selection);
    return stock(r);
  }
  std::vector<std::string> list;
  Reasons reasons(&list);
  Normalised n;
  if (reason.empty())
    decide(r, r.query.device(), selection, n, reasons);
  else
    list.push_back(reason);
  notify(r, "stock", list, selection, traced);
  TORCH_CHECK(!selection.strict || selection.backend == Backend::kStock,
              "flashsdpa cannot serve this call and strict=True forbids the fallback to stock: ", join(list, "; "));
  return stock(r);
}

}  // namespace

Tensor route(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask, double dropout_p,
             bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const Request request{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
  bool traced = false;
  std::string reason;
  const Selection selection = selection_for(request, &traced, &reason);
  if (!observing() && (selection.backend == Backend::kStock || refused_before(request, selection)))
    return stock(request);
  Normalised n;
  Reasons reasons;
  decide(request, query.device(), selection, n, reasons);
  if (!reasons.ok()) return refuse(request, selection, traced, reason);
  if (observing()) [[unlikely]] {
    const Options options = options_of(request, n.attn_mask, selection);
    notify(request, forward_entry({n.query, n.key, n.value, options})->name, {}, selection, traced);
  }
  return serve(request, n, selection, traced);
}

void set_hook(Hook f) { hook.store(f); }

bool worth_planning(const Tensor& query, const Tensor& key, const Tensor& mask, const at::Device& device) {
  const auto sq = query.sym_sizes()[2].maybe_as_int(), sk = key.sym_sizes()[2].maybe_as_int();
  if (sq && sk && *sq <= kGranule && *sk <= kGranule) return false;
  return table_entry(Pass::kMaskPlan, device, mask.scalar_type()) != nullptr;
}

Explanation explain(const Request& r, const Selection& selection) {
  // Meta tensors have no device; they are answered for the CPU.
  const at::Device device = r.query.is_meta() ? at::Device(at::kCPU) : r.query.device();
  Explanation explanation;
  Reasons reasons(&explanation.reasons);
  Normalised n;
  decide(r, device, selection, n, reasons);
  const bool normal = n.query.defined() && n.query.dim() == 4 && n.key.dim() == 4 && n.value.dim() == 4;
  const Options options = options_of(r, normal ? n.attn_mask : r.attn_mask, selection);
  const Call call =
      normal ? Call{n.query, n.key, n.value, options, device} : Call{r.query, r.key, r.value, options, device};
  const KernelEntry* chosen = reasons.ok() ? forward_entry(call) : nullptr;
  explanation.candidates = candidates(call, chosen);
  if (chosen != nullptr) describe(*chosen, call, explanation);
  return explanation;
}

}  // namespace flashsdpa
