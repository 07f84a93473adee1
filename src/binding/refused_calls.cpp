#include "refused_calls.h"

#include <ATen/core/grad_mode.h>

#include <array>
#include <atomic>

#include "checks.h"

namespace flashsdpa {

namespace {

constexpr int kCalls = 4;  // of each thread
constexpr int kAxes = 5;   // a call with more is decided every time

// Of a tensor, what the decision reads. The dispatch keys tell plain ones from all others, and types of devices apart.
struct TensorLooks {
  uint64_t keys = 0;
  int64_t dim = -1;  // not given
  std::array<int64_t, kAxes> sizes{}, strides{};
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::DeviceIndex device = -1;
  bool requires_grad = false;
};

uint64_t keys_of(const Tensor& t) { return t.key_set().raw_repr(); }

bool readable(const Tensor& t) {
  return is_dense(t) && t.dim() <= kAxes && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

TensorLooks looks_of(const Tensor& t) {
  TensorLooks looks{.keys = keys_of(t),
                    .dim = t.dim(),
                    .dtype = t.scalar_type(),
                    .device = t.device().index(),
                    .requires_grad = t.requires_grad()};
  std::copy_n(t.sizes().begin(), looks.dim, looks.sizes.begin());
  std::copy_n(t.strides().begin(), looks.dim, looks.strides.begin());
  return looks;
}

bool looks_like(const TensorLooks& looks, const Tensor& t) {
  // The keys first: sizes of a tensor of another kind may not be read.
  return looks.keys == keys_of(t) && looks.dim == t.dim() &&
         std::equal(t.sizes().begin(), t.sizes().end(), looks.sizes.begin()) &&
         std::equal(t.strides().begin(), t.strides().end(), looks.strides.begin()) && looks.dtype == t.scalar_type() &&
         looks.device == t.device().index() && looks.requires_grad == t.requires_grad();
}

struct RefusedCall {
  uint64_t generation = 0;
  TensorLooks query, key, value, attn_mask;
  double dropout_p = 0.0;
  std::optional<double> scale;
  bool is_causal = false, enable_gqa = false;
  bool grad_mode = false;
  uint8_t torch_backends = 0;
  Selection selection;
};

std::atomic<uint64_t> generation{1};
constinit thread_local std::array<RefusedCall, kCalls> refused{};
constinit thread_local int oldest = 0;
constinit thread_local uint64_t asked_in = 0;  // the generation in which the call under way was asked for

}  // namespace

bool refused_before(const Request& r, const Selection& selection) {
  asked_in = generation.load(std::memory_order_acquire);
  for (const RefusedCall& call : refused) {
    if (call.generation != asked_in || !looks_like(call.query, r.query)) continue;
    if (!looks_like(call.key, r.key) || !looks_like(call.value, r.value)) continue;
    if (given(r.attn_mask) ? !looks_like(call.attn_mask, *r.attn_mask) : call.attn_mask.dim >= 0) continue;
    if (call.dropout_p == r.dropout_p && call.scale == r.scale && call.is_causal == r.is_causal &&
        call.enable_gqa == r.enable_gqa && call.grad_mode == at::GradMode::is_enabled() &&
        call.selection == selection && call.torch_backends == enabled_torch_backends())
      return true;
  }
  return false;
}

void remember_refused(const Request& r, const Selection& selection) {
  const bool masked = given(r.attn_mask);
  if (!readable(r.query) || !readable(r.key) || !readable(r.value) || (masked && !readable(*r.attn_mask))) return;
  refused[oldest] = {.generation = asked_in,
                     .query = looks_of(r.query),
                     .key = looks_of(r.key),
                     .value = looks_of(r.value),
                     .attn_mask = masked ? looks_of(*r.attn_mask) : TensorLooks{},
                     .dropout_p = r.dropout_p,
                     .scale = r.scale,
                     .is_causal = r.is_causal,
                     .enable_gqa = r.enable_gqa,
                     .grad_mode = at::GradMode::is_enabled(),
                     .torch_backends = enabled_torch_backends(),
                     .selection = selection};
  oldest = (oldest + 1) % kCalls;
}

void forget_refused_calls() { generation.fetch_add(1, std::memory_order_release); }

}  // namespace flashsdpa
