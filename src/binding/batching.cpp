// vmap: the mapped axis becomes part of the batch axis, or of the heads, and one call serves all of it.
//
// A tensor of logical shape (B, H, S, D) that is mapped over V entries is physically (V, B, H, S, D) once its mapped axis is
// in front. It is given to the op as (V x B, H, S, D), a view where memory allows. A tensor that is not mapped is expanded:
// with a batch of 1, which per-sample code has, no element is copied. Sinks have no batch axis: with them the heads grow,
// (B, V x H, S, D), in which every key head keeps the query heads of its group.
//
// Dropout decides by batch and head. A forward under vmap is refused it, so the forward of a backward that is mapped was not,
// and had the batch as it is: with dropout the entries of a backward are served one after the other.

#include "batching.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <vector>

#include "call.h"
#include "checks.h"
#include "layout.h"

namespace flashsdpa {

namespace {

std::atomic<LevelReader> level_reader{nullptr};

const at::functorch::BatchedTensorImpl* batched_at(const Tensor& t, int64_t level) {
  const auto* impl = t.defined() ? at::functorch::maybeGetBatchedImpl(t) : nullptr;
  return impl != nullptr && impl->level() == level ? impl : nullptr;
}

// One call of an op under vmap. While it lives the mapped axes are out of reach of torch's own rules.
class Fold {
 public:
  template <class... Tensors>
  explicit Fold(const Tensors&... tensors) : no_batched_(c10::DispatchKey::FuncTorchBatched) {
    const auto reader = level_reader.load();
    TORCH_CHECK(reader != nullptr, "flashsdpa under vmap needs the Python module torch_flashsdpa");
    level_ = reader();
    (look_at(tensors), ...);
  }

  // Whether a tensor is mapped at this level. If none is, the op's call belongs to the level below.
  bool any() const { return any_; }
  bool maps(const OptTensor& t) const { return given(t) && batched_at(*t, level_) != nullptr; }

  // `t` with `axis`, counted without the mapped one, grown to V x whole. Its size there is `whole`, or 1, which is expanded.
  Tensor fold(const Tensor& t, int64_t axis, const c10::SymInt& whole) const { return merge(front(t), axis, whole); }
  OptTensor fold(const OptTensor& t, int64_t axis, const c10::SymInt& whole) const {
    return given(t) ? OptTensor(fold(*t, axis, whole)) : t;
  }
  // The same for (V|1, logical shape).
  Tensor merge(const Tensor& physical, int64_t axis, const c10::SymInt& whole) const {
    c10::SymDimVector sizes(physical.sym_sizes());
    sizes[0] = size_;
    sizes[axis + 1] = whole;
    const Tensor t = physical.expand_symint(sizes).movedim(0, axis);
    sizes = c10::SymDimVector(t.sym_sizes());
    sizes.erase(sizes.begin() + axis);
    sizes[axis] = size_ * whole;
    return t.reshape_symint(sizes);
  }
  // (V|1, logical shape).
  Tensor front(const Tensor& t) const {
    const auto* impl = batched_at(t, level_);
    return impl == nullptr ? t.unsqueeze(0) : impl->value().movedim(impl->bdim(), 0);
  }

  // Whether entries have to be served one after the other.
  bool apart(double dropout_p) const { return dropout_p > 0.0 && size_.guard_int(__FILE__, __LINE__) > 0; }
  // One mapped entry: of(t) is its t.
  struct Entry {
    int64_t level = 0, index = 0;
    Tensor operator()(const Tensor& t) const {
      const auto* impl = batched_at(t, level);
      return impl == nullptr ? t : impl->value().select(impl->bdim(), index);
    }
    OptTensor operator()(const OptTensor& t) const { return given(t) ? OptTensor((*this)(*t)) : t; }
  };
  // serve(entry) for every mapped entry; the results, tuples of tensors, mapped again.
  template <class Serve>
  auto each(const Serve& serve) const {
    const int64_t size = size_.guard_int(__FILE__, __LINE__);
    std::vector<decltype(serve(Entry{}))> results;
    for (int64_t i = 0; i < size; ++i) results.push_back(serve(Entry{level_, i}));
    auto all = results[0];
    const auto restack = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      ((std::get<kIndex>(all) = at::functorch::makeBatched(stacked<kIndex>(results), /*dim=*/0, level_)), ...);
    };
    restack(std::make_index_sequence<std::tuple_size_v<decltype(all)>>());
    return all;
  }

  // What was grown from `whole`, mapped again. summed: it had been of size 1 and was expanded.
  Tensor unfold(const Tensor& t, int64_t axis, const c10::SymInt& whole, bool summed = false) const {
    c10::SymDimVector sizes(t.sym_sizes());
    sizes[axis] = size_;
    sizes.insert(sizes.begin() + axis + 1, whole);
    Tensor physical = t.reshape_symint(sizes).movedim(axis, 0);
    if (summed) physical = physical.sum(at::IntArrayRef{axis + 1}, /*keepdim=*/true);
    return at::functorch::makeBatched(physical, /*dim=*/0, level_);
  }

 private:
  template <size_t kIndex, class Results>
  static Tensor stacked(const Results& results) {
    std::vector<Tensor> list;
    for (const auto& r : results) list.push_back(std::get<kIndex>(r));
    return at::stack(list);
  }
  void look_at(const Tensor& t) {
    const auto* impl = batched_at(t, level_);
    if (impl == nullptr) return;
    size_ = impl->value().sym_size(impl->bdim());
    any_ = true;
  }
  void look_at(const OptTensor& t) { look_at(tensor_or_undefined(t)); }

  c10::impl::ExcludeDispatchKeyGuard no_batched_;
  int64_t level_ = 0;
  c10::SymInt size_ = 1;
  bool any_ = false;
};

// How a call is folded, and its options so folded. each_mask: every entry needs a mask of its own, since its gradient is.
struct FoldedCall {
  FoldedCall(const Fold& f, const Call& call, bool each_mask)
      : fold(f), o(call.options), axis(given(o.sinks) ? 1 : 0), batch(call.query.sym_size(0)),
        heads(call.query.sym_size(1)), whole(axis == 0 ? batch : heads),
        whole_kv(axis == 0 ? batch : call.key.sym_size(1)), query(f.fold(call.query, axis, whole)),
        key(f.fold(call.key, axis, whole_kv)), value(f.fold(call.value, axis, whole_kv)) {
    TORCH_CHECK(!f.maps(o.rng_state), "flashsdpa under vmap: rng_state is mapped; give one state for all entries");
    const auto own_axis = [&](const OptTensor& t) { return given(t) && !equals(t->sym_size(axis), 1); };
    folds_mask = each_mask || f.maps(o.attn_mask) || f.maps(o.mask_plan) || own_axis(o.attn_mask) ||
                 own_axis(o.mask_plan);
    mask = of_mask(o.attn_mask);
    plan = of_mask(o.mask_plan);
    if (given(plan)) plan = plan->contiguous();
    sinks = f.fold(o.sinks, 0, heads);
    slopes = o.alibi_slopes;
    if (given(slopes) && axis == 1)
      slopes = f.fold(slopes, slopes->dim() - 1, heads);
    else if (given(slopes) && slopes->dim() == 2)
      slopes = f.fold(slopes, 0, batch);
    else if (f.maps(slopes))
      slopes = f.merge(f.front(*slopes).unsqueeze(1), 0, batch);
  }

  Options options() const { return with_tensors(o, mask, plan, o.rng_state, slopes, sinks); }
  // Tensors that go by queries (4-D, or 3-D as lse), by keys, and as the mask.
  Tensor of_queries(const Tensor& t) const { return fold.fold(t, axis, whole); }
  OptTensor of_queries(const OptTensor& t) const { return fold.fold(t, axis, whole); }
  OptTensor of_keys(const OptTensor& t) const { return fold.fold(t, axis, whole_kv); }
  OptTensor of_mask(const OptTensor& t) const { return folds_mask ? fold.fold(t, axis, whole) : t; }
  OptTensor of_sinks(const OptTensor& t) const { return fold.fold(t, 0, heads); }

  Tensor queries(const Tensor& t, bool made = true) const { return made ? fold.unfold(t, axis, whole) : t; }
  // (grad_query, grad_key, grad_value, grad_attn_mask, grad_sinks), or tangents of them, mapped again; where not made,
  // placeholders.
  BackwardResult gradients(BackwardResult&& r, const std::array<bool, 5>& made) const {
    auto& [dq, dk, dv, dmask, dsinks] = r;
    dq = queries(dq, made[0]);
    if (made[1]) dk = fold.unfold(dk, axis, whole_kv);
    if (made[2]) dv = fold.unfold(dv, axis, whole_kv);
    if (made[3] && given(mask)) {
      const bool expanded = equals(o.attn_mask->sym_size(axis), 1) && !equals(whole, 1);
      dmask = fold.unfold(dmask, axis, whole, expanded);
    }
    if (made[4] && given(sinks)) dsinks = fold.unfold(dsinks, 0, heads);
    return std::move(r);
  }

  const Fold& fold;
  const Options& o;
  const int64_t axis;  // that grows: 0, the batch; 1, the heads
  const c10::SymInt batch, heads, whole, whole_kv;  // whole: the size of `axis` before, of queries and of keys
  const Tensor query, key, value;
  bool folds_mask = false;
  OptTensor mask, plan, slopes, sinks;
};

}  // namespace

void set_level_reader(LevelReader reader) { level_reader.store(reader); }

ForwardResult forward_batched(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  const Fold fold(query, key, value, attn_mask, mask_plan, rng_state, alibi_slopes, sinks);
  if (!fold.any()) return call_forward(call);
  TORCH_CHECK(dropout_p == 0.0, "flashsdpa::forward under vmap: dropout_p is ", dropout_p,
              "; give 0, or call scaled_dot_product_attention, which stock PyTorch serves then");
  const FoldedCall f(fold, call, /*each_mask=*/false);
  const auto [out, lse] = call_forward({f.query, f.key, f.value, f.options()});
  return {f.queries(out), f.queries(lse)};
}

BackwardResult backward_batched(FLASHSDPA_BACKWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  const Fold fold(grad_out, grad_lse, query, key, value, out, lse, attn_mask, mask_plan, rng_state, alibi_slopes, sinks);
  if (!fold.any()) return call_backward(grad_out, grad_lse, call, out, lse, output_mask);
  if (fold.apart(dropout_p))
    return fold.each([&](const Fold::Entry& of) {
      const OptTensor mask = of(attn_mask), plan = of(mask_plan), slopes = of(alibi_slopes), logits = of(sinks);
      const Options own = with_tensors(options, mask, plan, rng_state, slopes, logits);
      return call_backward(of(grad_out), of(grad_lse), {of(query), of(key), of(value), own}, of(out), of(lse), output_mask);
    });
  const FoldedCall f(fold, call, /*each_mask=*/output_mask[3]);
  return f.gradients(call_backward(f.of_queries(grad_out), f.of_queries(grad_lse), {f.query, f.key, f.value, f.options()},
                                   f.of_queries(out), f.of_queries(lse), output_mask),
                     output_mask);
}

JvpResult jvp_batched(FLASHSDPA_JVP_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  const Fold fold(grad_out, grad_lse, query, key, value, out, lse, attn_mask, mask_plan, rng_state, alibi_slopes, sinks,
                  tangent_grad_out, tangent_grad_lse, tangent_query, tangent_key, tangent_value, tangent_attn_mask,
                  tangent_sinks);
  if (!fold.any())
    return call_jvp(grad_out, grad_lse, call, out, lse,
                    {tangent_grad_out, tangent_grad_lse, tangent_query, tangent_key, tangent_value, tangent_attn_mask,
                     tangent_sinks},
                    output_mask);
  if (fold.apart(dropout_p))
    return fold.each([&](const Fold::Entry& of) {
      const OptTensor mask = of(attn_mask), plan = of(mask_plan), slopes = of(alibi_slopes), logits = of(sinks),
                      t_grad_out = of(tangent_grad_out), t_grad_lse = of(tangent_grad_lse), t_query = of(tangent_query),
                      t_key = of(tangent_key), t_value = of(tangent_value), t_mask = of(tangent_attn_mask),
                      t_sinks = of(tangent_sinks);
      const Options own = with_tensors(options, mask, plan, rng_state, slopes, logits);
      return call_jvp(of(grad_out), of(grad_lse), {of(query), of(key), of(value), own}, of(out), of(lse),
                      {t_grad_out, t_grad_lse, t_query, t_key, t_value, t_mask, t_sinks}, output_mask);
    });
  const FoldedCall f(fold, call, /*each_mask=*/output_mask[5] || given(tangent_attn_mask));
  const OptTensor t_grad_out = f.of_queries(tangent_grad_out), t_grad_lse = f.of_queries(tangent_grad_lse),
                  t_query = f.of_queries(tangent_query), t_key = f.of_keys(tangent_key),
                  t_value = f.of_keys(tangent_value), t_mask = f.of_mask(tangent_attn_mask),
                  t_sinks = f.of_sinks(tangent_sinks);
  auto [t_out, t_lse, dq, dk, dv, dmask, dsinks] =
      call_jvp(f.of_queries(grad_out), f.of_queries(grad_lse), {f.query, f.key, f.value, f.options()}, f.of_queries(out),
               f.of_queries(lse), {t_grad_out, t_grad_lse, t_query, t_key, t_value, t_mask, t_sinks}, output_mask);
  const auto& wanted = output_mask;
  return std::tuple_cat(
      std::make_tuple(f.queries(t_out, wanted[0]), f.queries(t_lse, wanted[1])),
      f.gradients({dq, dk, dv, dmask, dsinks}, {wanted[2], wanted[3], wanted[4], wanted[5], wanted[6]}));
}

Tensor mask_plan_batched(const Tensor& attn_mask) {
  const Fold fold(attn_mask);
  if (!fold.any()) return call_mask_plan(attn_mask);
  require_plannable(attn_mask);
  const c10::SymInt batch = attn_mask.sym_size(0);
  return fold.unfold(call_mask_plan(fold.fold(attn_mask, 0, batch)), 0, batch);
}

}  // namespace flashsdpa
