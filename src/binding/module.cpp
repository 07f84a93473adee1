// torch_flashsdpa._C: shows the binding to Python. No decision is taken here.

#include <ATen/ThreadLocalPythonObjects.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include <map>

#include "auto_table.h"
#include "batching.h"
#include "execute.h"
#include "jvp.h"
#include "report.h"
#include "router.h"
#include "selection.h"

namespace py = pybind11;
using namespace py::literals;

namespace flashsdpa {

namespace {

constexpr at::ScalarType kDTypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kBool};
constexpr Isa kIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx, Isa::kSm80, Isa::kSm90};
constexpr std::pair<Feature, const char*> kFeatures[] = {
    {kCausal, "causal"},      {kBand, "band"},   {kBoolMask, "bool_mask"}, {kBias, "bias"},
    {kBiasGrad, "bias_grad"}, {kGqa, "gqa"},     {kLseGrad, "lse_grad"},   {kDeterministic, "deterministic"},
    {kSoftcap, "softcap"},    {kAlibi, "alibi"}, {kSinks, "sinks"},        {kBatchInvariant, "batch_invariant"},
    {kDropout, "dropout"}};

Backend to_backend(int value) {
  TORCH_CHECK_VALUE(value >= 0 && value <= 2, "backend is ", to_text(value),
                    "; supported: 0 (stock), 1 (flashsdpa), 2 (auto)");
  return static_cast<Backend>(value);
}

// Python objects held here live as long as the process: torch may still call in while the interpreter shuts down.
py::object& python_hook() {
  static auto* hook = new py::object;
  return *hook;
}
py::object& python_observer() {
  static auto* observer = new py::object;
  return *observer;
}

Selection ask_python(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask,
                     double dropout_p, bool* traced, std::string* reason) {
  py::gil_scoped_acquire gil;
  try {
    const py::object mask = given(attn_mask) ? py::cast(*attn_mask) : py::none();
    const auto [backend, strict, batch_invariant, tracing, why] =
        python_hook()(query, key, value, mask, dropout_p).cast<std::tuple<int, bool, bool, bool, std::string>>();
    *traced = tracing;
    *reason = why;
    // The hook has the last word about torch's own backends: mark the answer as newer than their settings.
    return {to_backend(backend), strict, batch_invariant, /*scoped=*/true, enabled_torch_backends()};
  } catch (py::error_already_set& error) {
    error.restore();
    python_error torch_error;
    torch_error.persist();
    throw torch_error;
  }
}

int64_t current_level() {
  py::gil_scoped_acquire gil;
  static auto* level = new py::object(py::module_::import("torch").attr("_C").attr("_functorch").attr("maybe_current_level"));
  return (*level)().cast<int64_t>();
}

void without_gil(const std::function<void()>& f) {
  if (!PyGILState_Check()) return f();
  py::gil_scoped_release released;
  f();
}

py::object size_object(const c10::SymInt& size) {
  if (const auto known = size.maybe_as_int()) return py::int_(*known);
  return py::str(to_text(size));
}

py::object shape_object(const Tensor& t) {
  if (!t.defined() || t.is_nested()) return py::none();
  const auto sizes = t.sym_sizes();
  py::tuple shape(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) shape[i] = size_object(sizes[i]);
  return shape;
}

py::object tensor_object(const Tensor& t) { return t.defined() ? py::cast(t) : py::object(py::none()); }

// Names of the options that scaled_dot_product_attention does not have.
py::list extras(const Options& o) {
  const auto open = [](const c10::SymInt& side) { return side.maybe_as_int() == -1; };
  py::list names;
  if (!open(o.window_left) || !open(o.window_right)) names.append("window");
  if (o.bottom_right) names.append("bottom_right");
  if (o.softcap != 0.0) names.append("softcap");
  if (given(o.alibi_slopes)) names.append("alibi_slopes");
  if (given(o.sinks)) names.append("sinks");
  return names;
}

void tell_python(const Event& event) {
  py::gil_scoped_acquire gil;
  if (python_observer().is_none()) return;
  try {
    const Call& call = event.call;
    const OptTensor& mask = call.options.attn_mask;
    const bool readable = given(mask) && !mask->is_nested();
    python_observer()(py::dict(
        "kind"_a = event.kind, "op"_a = event.op, "kernel"_a = event.kernel, "shape_q"_a = shape_object(call.query),
        "shape_k"_a = shape_object(call.key), "shape_v"_a = shape_object(call.value),
        "dtype"_a = dtype_name(call.query.scalar_type()), "device"_a = call.query.device().str(),
        "mask"_a = readable ? py::object(py::str(mask_text(mask))) : py::none(), "is_causal"_a = call.options.is_causal,
        "reasons"_a = event.reasons, "backend"_a = event.backend, "phase"_a = event.phase,
        "inputs"_a = py::make_tuple(tensor_object(call.query), tensor_object(call.key), tensor_object(call.value),
                                    tensor_object(tensor_or_undefined(mask))),
        "dropout_p"_a = call.options.dropout_p, "scale"_a = call.options.scale, "extras"_a = extras(call.options)));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch_flashsdpa observer");
  }
}

py::object scope_token(int backend, bool strict, bool batch_invariant) {
  static auto* tokens = new std::map<std::tuple<int, bool, bool, int>, py::object>;
  const uint8_t torch_backends = enabled_torch_backends();
  py::object& token = (*tokens)[{backend, strict, batch_invariant, torch_backends}];
  if (!token) {
    token = py::make_tuple(backend_name(to_backend(backend)), strict, batch_invariant, torch_backends);
    register_scope_token(token.ptr(), {to_backend(backend), strict, batch_invariant, true, torch_backends});
  }
  return token;
}

py::object scope_none() {
  static auto* token = new py::object;
  if (!*token) {
    *token = py::make_tuple("no scope");
    register_empty_token(token->ptr());
  }
  return *token;
}

// torch's own _stash_obj_in_tls() takes over its caller's reference in torch 2.11 and does not in 2.13.
py::object swap_scope(const py::object& token) {
  using Store = at::impl::ThreadLocalPythonObjects;
  py::object previous = scope_none();
  if (Store::contains(kScopeKey))
    previous = py::reinterpret_borrow<py::object>(Store::get(kScopeKey)->ptr(getPyInterpreter()));
  Store::set(kScopeKey, std::make_shared<c10::SafePyObject>(token.inc_ref().ptr(), getPyInterpreter()));
  return previous;
}

py::list kernel_list() {
  py::list list;
  int count = 0;
  const KernelEntry* table = kernel_table(&count);
  for (int i = 0; i < count; ++i) {
    const KernelEntry& e = table[i];
    py::list dtypes, features;
    for (int d = 0; d < kDTypeCount; ++d)
      if (e.dtypes & (1u << d)) dtypes.append(dtype_name(kDTypes[d]));
    for (const auto& [bit, name] : kFeatures)
      if (e.features & bit) features.append(name);
    list.append(py::dict("name"_a = e.name, "source"_a = e.source, "pass"_a = pass_name(e.pass),
                         "device"_a = e.device == Device::kCuda ? "cuda" : "cpu", "isa"_a = isa_name(e.isa),
                         "dtypes"_a = dtypes, "features"_a = features, "max_dim"_a = e.max_dim, "block_m"_a = e.block_m,
                         "block_n"_a = e.block_n, "schedule"_a = e.schedule, "available"_a = entry_available(e)));
  }
  return list;
}

template <class T, size_t n, class Name>
T by_name(const T (&values)[n], const std::string& text, const char* what, Name name) {
  for (const T& value : values)
    if (text == name(value)) return value;
  TORCH_CHECK_VALUE(false, "auto table: unknown ", what, " '", text, "'");
}

void set_auto_rows(const py::list& rows) {
  constexpr MaskKind kinds[] = {MaskKind::kFull, MaskKind::kCausalOnly, MaskKind::kMask, MaskKind::kBias,
                                MaskKind::kDropout};
  std::vector<AutoRow> table;
  for (const py::handle& item : rows) {
    const auto row = item.cast<py::dict>();
    table.push_back({by_name(kIsas, row["isa"].cast<std::string>(), "isa", isa_name),
                     *to_dtype(by_name(kDTypes, row["dtype"].cast<std::string>(), "dtype", dtype_name)),
                     by_name(kinds, row["kind"].cast<std::string>(), "kind", mask_kind_name), row["grad"].cast<bool>(),
                     row["dim"].cast<int64_t>(), row["seq_q"].cast<int64_t>(), row["seq_k"].cast<int64_t>(),
                     row["ratio"].cast<double>()});
  }
  set_auto_table(table);
}

py::dict explain_call(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask,
                      double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, int backend,
                      bool strict) {
  Selection selection = current_selection();
  selection.backend = to_backend(backend);
  selection.strict = strict;
  const auto e = explain({query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa}, selection);
  py::list candidates;
  for (const Candidate& c : e.candidates)
    candidates.append(py::dict("kernel"_a = c.kernel, "passes"_a = py::make_tuple(c.pass), "reasons"_a = c.reasons));
  py::dict config;
  for (const auto& [name, text] : e.config) config[name.c_str()] = text;
  config["copies"] = e.copies;
  return py::dict("chosen"_a = e.chosen, "reasons"_a = e.reasons, "candidates"_a = candidates, "config"_a = config);
}

py::dict build_info() {
  int count = 0;
  const KernelEntry* table = kernel_table(&count);
  bool cuda = false;
  for (int i = 0; i < count; ++i) cuda = cuda || table[i].device == Device::kCuda;
  return py::dict("torch"_a = TORCH_VERSION, "library"_a = library_version(), "build"_a = library_build(),
                  "cuda"_a = cuda);
}

py::dict cpu_features() {
  py::dict features;
  for (Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) features[isa_name(isa)] = isa_available(isa);
  return features;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The binding of torch_flashsdpa: router, selection, report. See torch_flashsdpa for the public functions.";
  set_level_reader(&current_level);
  set_gil_releaser(&without_gil);
  m.def("install_router", &install_router, "Intercept aten::scaled_dot_product_attention. Idempotent.");
  m.def("remove_router", &remove_router, "Give aten::scaled_dot_product_attention back to torch. Idempotent.");
  m.def("router_installed", &router_installed);

  m.def(
      "set_default",
      [](int backend, bool strict, bool batch_invariant) {
        set_default_selection({to_backend(backend), strict, batch_invariant});
      },
      "backend"_a, "strict"_a, "batch_invariant"_a, "The process-wide selection: 0 stock, 1 flashsdpa, 2 auto.");
  m.def("get_default", [] {
    const Selection s = default_selection();
    return py::make_tuple(static_cast<int>(s.backend), s.strict, s.batch_invariant);
  });
  m.def("scope_token", &scope_token, "backend"_a, "strict"_a, "batch_invariant"_a,
        "The interned object that stands for a scope entered now; stash it in torch's thread-local store.");
  m.def("swap_scope", &swap_scope, "token"_a,
        "Put a token in force on this thread (torch carries it to its autograd threads); returns the one it replaces.");
  m.def("scope_none", &scope_none, "The object that stands for no scope.");
  m.def("current_selection", [] {
    const Selection s = current_selection();
    return py::make_tuple(static_cast<int>(s.backend), s.strict, s.batch_invariant, s.scoped);
  });
  m.def(
      "stock_only",
      []() -> py::object {
        if (!torch_leaves_to_stock(current_selection())) return py::none();
        return py::str(torch_backends_text());
      },
      "Why torch's own backend settings leave a call to stock right now, or None.");

  m.def(
      "set_hook",
      [](py::object f) {
        python_hook() = std::move(f);
        set_hook(&ask_python);
      },
      "f(query, key, value, attn_mask, dropout_p) -> (backend, strict, batch_invariant, traced, reason), asked for tensors with the "
      "Python dispatch key and those that torch.func has wrapped.");
  m.def(
      "set_observer",
      [](py::object f) {
        const bool on = !f.is_none();
        if (on) python_observer() = std::move(f);
        observer.store(on ? &tell_python : nullptr);
        if (!on) python_observer() = py::none();
      },
      "f(event: dict) for every decision and launch, or None.");

  m.def("explain", &explain_call, "query"_a, "key"_a, "value"_a, "attn_mask"_a, "dropout_p"_a, "is_causal"_a, "scale"_a,
        "enable_gqa"_a, "backend"_a, "strict"_a);
  m.def("kernel_table", &kernel_list);
  m.def(
      "routed_calls", [] { return routed_calls.load(); }, "Executions of flashsdpa::forward.");
  m.def("reset_routed_calls", [] { routed_calls = 0; });
  m.def("set_auto_table", &set_auto_rows, "rows"_a);
  m.def("build_info", &build_info);
  m.def("cpu_features", &cpu_features);
}

}  // namespace flashsdpa
