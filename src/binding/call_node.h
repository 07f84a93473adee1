// The autograd node of a call: what it saves, and the three ways in which its derivative runs. torch's engine calls apply();
// compiled autograd records the derivative as a function of all that was saved (compiled_args, apply_with_saved), which
// AOTAutograd then traces, so that the ops in it are compiled with the rest of the backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"

namespace flashsdpa {

using torch::autograd::variable_list;

inline OptTensor optional(const Tensor& t) { return t.defined() ? OptTensor(t) : OptTensor(); }

// The tensor options of a call, owned.
struct TensorOptions {
  OptTensor attn_mask, mask_plan, rng_state, alibi_slopes, sinks;
  Options with(const Options& o) const {
    return with_tensors(o, attn_mask, mask_plan, rng_state, alibi_slopes, sinks);
  }
};

// What is not a tensor in the options of a call, one after the other.
template <class OptionsLike, class Visitor>
void each_scalar(OptionsLike& o, const Visitor& visit) {
  visit(o.dropout_p);
  visit(o.is_causal);
  visit(o.bottom_right);
  visit(o.scale);
  visit(o.window_left);
  visit(o.window_right);
  visit(o.softcap);
  visit(o.deterministic);
  visit(o.batch_invariant);
}

// A node that saves a call (query, key, value, out, lse, the options and their tensors) and `kOwn` tensors of its own, and has
// `kEdges` gradients to give. Derivative holds
//   kName       how the node, and its function in a compiled graph, is called
//   kTraceable  whether that function may be traced; where not, compiled graphs run it as it stands
//   gradients(grads, saved, wanted)    the kEdges gradients; those not wanted undefined
template <class Derivative, size_t kOwn, size_t kEdges>
class CallNode : public torch::autograd::Node {
 public:
  using Wanted = std::array<bool, kEdges>;
  struct Saved {
    Tensor query, key, value, out, lse;
    TensorOptions tensors;
    std::array<OptTensor, kOwn> own;
    Options scalars;
    Options options() const { return tensors.with(scalars); }
  };

  explicit CallNode(const Options& o) : scalars_(without_tensors(o)) {}

  // out_is_mine: `out` and `lse` are outputs of this very node.
  void save(const Call& call, const Tensor& out, const Tensor& lse, bool out_is_mine) {
    const Options& o = call.options;
    out_is_mine_ = out_is_mine;
    const Tensor* const inputs[] = {&call.query, &call.key, &call.value};
    for (const Tensor* t : inputs) keep(*t);
    keep(out, out_is_mine);
    keep(lse, out_is_mine);
    for (const OptTensor* t : {&o.attn_mask, &o.mask_plan, &o.rng_state, &o.alibi_slopes, &o.sinks})
      keep(tensor_or_undefined(*t));
  }
  void save(const OptTensor& t) { keep(tensor_or_undefined(t)); }

  std::string name() const override { return Derivative::kName; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (torch::autograd::SavedVariable& t : saved_) t.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    if (none_defined(grads)) return variable_list(kEdges);
    std::lock_guard<std::mutex> lock(mutex_);
    return Derivative::gradients(grads, named(unpack(), scalars_), wanted());
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < kTensors; ++i) args.collect(saved_[i], is_mine(i));
    each_scalar(scalars_, [&](const auto& x) { args.collect(x); });
  }

  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    namespace compiled = torch::dynamo::autograd;
    const auto& compiler = compiled::getPyCompilerInterface();
    static const std::string function =
        compiler->bind_function(saved.get_py_compiler(), Derivative::kName, &from_graph, schema(),
                                /*is_custom_function=*/false, Derivative::kTraceable);
    for (auto& t : saved_) saved.before(t);
    each_scalar(scalars_, [&](auto& x) { saved.before(x); });
    compiled::PackedArgs packed;
    for (const Tensor& t : unpack()) packed.pack(t);
    each_scalar(scalars_, [&](const auto& x) { packed.pack(x); });
    packed.pack(wanted());
    const auto outputs =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    variable_list gradients = compiler->call_function(saved.get_py_compiler(), "apply_functional", function, grads,
                                                      packed.vec(), outputs);
    for (auto& t : saved_) saved.after(t);
    each_scalar(scalars_, [&](auto& x) { saved.after(x); });
    return gradients;
  }

 private:
  static constexpr size_t kTensors = 10 + kOwn;
  using Tensors = std::array<Tensor, kTensors>;

  static Options without_tensors(const Options& o) {
    return with_tensors(o, kNoTensor, kNoTensor, kNoTensor, kNoTensor, kNoTensor);
  }
  static bool none_defined(const variable_list& grads) {
    return std::none_of(grads.begin(), grads.end(), [](const Tensor& t) { return t.defined(); });
  }

  void keep(const Tensor& t, bool is_output = false) {
    if (t.defined()) saved_[count_] = torch::autograd::SavedVariable(t, is_output);
    ++count_;
  }
  bool is_mine(size_t i) const { return out_is_mine_ && (i == 3 || i == 4); }
  Tensors unpack() {
    Tensors t;
    for (size_t i = 0; i < kTensors; ++i) t[i] = is_mine(i) ? saved_[i].unpack(this->getptr()) : saved_[i].unpack();
    return t;
  }
  static Saved named(const Tensors& t, const Options& scalars) {
    const auto option = [&](size_t i) { return optional(t[i]); };
    Saved saved{t[0], t[1], t[2], t[3], t[4], {option(5), option(6), option(7), option(8), option(9)}, {}, scalars};
    for (size_t i = 0; i < kOwn; ++i) saved.own[i] = option(10 + i);
    return saved;
  }
  Wanted wanted() const {
    Wanted wanted{};
    for (size_t i = 0; i < kEdges; ++i) wanted[i] = task_should_compute_output(i);
    return wanted;
  }

  // The types of from_graph's arguments behind grads.
  static std::vector<at::TypePtr> schema() {
    std::vector<at::TypePtr> types(kTensors, at::TensorType::get());
    Options scalars;
    each_scalar(scalars, [&](const auto& x) {
      types.push_back(torch::dynamo::autograd::IValuePacker<std::decay_t<decltype(x)>>::packed_type());
    });
    types.push_back(torch::dynamo::autograd::IValuePacker<Wanted>::packed_type());
    return types;
  }
  // The node as a function of all that apply_with_saved() packed.
  static variable_list from_graph(const variable_list& grads, const std::vector<c10::IValue>& arguments) {
    if (none_defined(grads)) return variable_list(kEdges);
    torch::dynamo::autograd::PackedArgs packed(arguments);
    Tensors tensors;
    for (Tensor& t : tensors) t = packed.unpack<Tensor>();
    Options scalars;
    each_scalar(scalars, [&](auto& x) { x = packed.unpack<std::decay_t<decltype(x)>>(); });
    return Derivative::gradients(grads, named(tensors, scalars), packed.unpack<Wanted>());
  }

  std::array<torch::autograd::SavedVariable, kTensors> saved_;
  Options scalars_;
  size_t count_ = 0;
  bool out_is_mine_ = false;
};

}  // namespace flashsdpa
