#include "checks.h"

#include <ATen/core/grad_mode.h>

#include <cmath>

#include "layout.h"

namespace flashsdpa {

namespace {

// The Hopper kernels are the only CUDA family in the table. On a machine without a GPU, where only fake tensors and
// explain() ask, the answer is theirs.
constexpr int kHopper = 90;

int capability_of(const at::Device& device) {
  if (!device.is_cuda()) return 0;
  const int found = compute_capability(device.has_index() ? device.index() : 0);
  return found == 0 ? kHopper : found;
}

// At most this many queries, and query rows per key head, count as decoding: the keys are then split among the workers.
constexpr int64_t kDecodeQueries = 8, kDecodeRows = 16;

std::optional<Device> to_device(const at::Device& device) {
  if (device.is_cpu()) return Device::kCpu;
  if (device.is_cuda()) return Device::kCuda;
  return std::nullopt;
}

bool check_kind(const char* name, const Tensor& t, Reasons& reasons) {
  if (!t.defined()) return reasons.add(name, " is undefined; give a tensor");
  if (t.is_nested() || t.layout() != at::kStrided) {
    if (reasons.add(name, " is nested or has layout ", t.layout(), "; flashsdpa kernels take dense strided tensors"))
      return true;
  }
  return false;
}

// The dtypes that some forward kernel of this machine takes on `device`.
std::string supported_dtypes(const at::Device& device) {
  std::vector<std::string> names;
  for (at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    if (table_entry(Pass::kForward, device, type)) names.push_back(dtype_name(type));
  return names.empty() ? "none in this build" : join(names, ", ");
}

// Options no kernel of this build serves, and values that none could.
bool check_options(const Options& o, Reasons& reasons) {
  if (!(o.dropout_p >= 0.0 && o.dropout_p <= 1.0) &&
      reasons.add("dropout_p is ", o.dropout_p, "; give a probability from 0 to 1"))
    return true;
  if (!(at_least(o.window_left, -1) && at_least(o.window_right, -1)) &&
      reasons.add("window_left is ", o.window_left, ", window_right is ", o.window_right,
                  "; give 0 or more keys, or -1 for no limit"))
    return true;
  return !(o.softcap >= 0.0 && std::isfinite(o.softcap)) &&
         reasons.add("softcap is ", o.softcap, "; give a positive number, or 0 for none");
}

bool check_mask_kind(const Tensor& mask, const Tensor& query, Reasons& reasons) {
  if (check_kind("attn_mask", mask, reasons)) return true;
  if (!mask.defined()) return false;
  if (mask.device() != query.device() &&
      reasons.add("attn_mask is on ", mask.device(), ", query on ", query.device(), "; give them on one device"))
    return true;
  const auto dtype = mask.scalar_type();
  return dtype != at::kBool && dtype != at::kFloat && dtype != query.scalar_type() &&
         reasons.add("attn_mask has dtype ", dtype_name(dtype), "; supported: bool, float32, or the query's ",
                     dtype_name(query.scalar_type()));
}

// alibi_slopes and sinks: a float32 number for each head.
bool check_per_head_kind(const char* name, const OptTensor& t, const Tensor& query, Reasons& reasons) {
  if (!given(t)) return false;
  if (check_kind(name, *t, reasons)) return true;
  return (t->scalar_type() != at::kFloat || t->device() != query.device()) &&
         reasons.add(name, " is ", dtype_name(t->scalar_type()), " on ", t->device(), "; give float32 on ",
                     query.device());
}

// A plan on another device would choose another device's kernel for the call, of which nothing is written here.
bool check_mask_plan_kind(const Tensor& plan, const at::Device& device, Reasons& reasons) {
  if (check_kind("mask_plan", plan, reasons)) return true;
  return is_dense(plan) && (plan.scalar_type() != at::kInt || plan.device() != device) &&
         reasons.add("mask_plan is ", dtype_name(plan.scalar_type()), " on ", plan.device(),
                     "; give flashsdpa::mask_plan(attn_mask) of this mask: int32 on ", device);
}

bool check_rng_state_kind(const Tensor& state, const at::Device& device, Reasons& reasons) {
  if (check_kind("rng_state", state, reasons)) return true;
  if (!is_dense(state)) return false;
  if ((state.scalar_type() != at::kLong || state.device() != device) &&
      reasons.add("rng_state is ", dtype_name(state.scalar_type()), " on ", state.device(),
                  "; give flashsdpa::rng_state(): int64 on ", device))
    return true;
  return !(state.dim() == 1 && equals(state.sym_size(0), 2)) &&
         reasons.add("rng_state is ", reasons.collecting() ? shape_text(state.sym_sizes()) : std::string(),
                     "; give flashsdpa::rng_state(): (2), seed and offset");
}

// The ops are given the state; the router draws it once it has decided.
void check_rng_state_given(const Options& o, Reasons& reasons) {
  if (o.dropout_p > 0.0 && !given(o.rng_state))
    reasons.add("dropout_p is ", o.dropout_p, " and rng_state is not given; give flashsdpa::rng_state()");
}

c10::SymInt const& size(const Tensor& t, int axis) { return t.sym_sizes()[axis]; }

// What the caller has to give as it is, since no reason to go to stock can be made of it.
void check_like(const char* op, const char* name, const Tensor& t, c10::SymIntArrayRef want, at::ScalarType type,
                const at::Device& device) {
  bool fits = t.dim() == static_cast<int64_t>(want.size()) && t.scalar_type() == type && t.device() == device;
  for (size_t axis = 0; fits && axis < want.size(); ++axis)
    fits = TORCH_GUARD_OR_TRUE(t.sym_sizes()[axis].sym_eq(want[axis]));
  TORCH_CHECK(fits, op, ": ", name, " is ", dtype_name(t.scalar_type()), " ", shape_text(t.sym_sizes()), " on ",
              t.device(), "; give ", dtype_name(type), " ", shape_text(want), " on ", device);
}

// (heads_q), or (batch, heads_q) where allowed.
bool check_per_head_shape(const char* name, const OptTensor& t, const Tensor& query, bool by_batch, Reasons& reasons) {
  if (!given(t)) return false;
  const c10::SymInt &batch = size(query, 0), &heads = size(query, 1);
  const bool ranked = t->dim() == 1 || (by_batch && t->dim() == 2 && equals(size(*t, 0), batch));
  if (ranked && equals(size(*t, t->dim() - 1), heads)) return false;
  const std::string other = by_batch ? " or (" + to_text(batch) + ", " + to_text(heads) + ")" : "";
  return reasons.add(name, " is ", shape_text(t->sym_sizes()), "; give (", heads, ")", other);
}

}  // namespace

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const auto& part : parts) {
    if (!text.empty()) text += separator;
    text += part;
  }
  return text;
}

std::optional<DType> to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    case at::kDouble: return DType::kFloat64;
    case at::kBool: return DType::kBool;
    default: return std::nullopt;
  }
}

const char* dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "float32";
    case at::kBFloat16: return "bfloat16";
    case at::kHalf: return "float16";
    case at::kDouble: return "float64";
    case at::kBool: return "bool";
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    default: return c10::toString(type);
  }
}

bool is_dense(const Tensor& t) { return t.defined() && !t.is_nested() && t.layout() == at::kStrided; }

std::string to_text(const c10::SymInt& number) {
  const auto value = number.maybe_as_int();
  return value ? std::to_string(*value) : number.toSymNode()->str();
}

std::string to_text(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", number);
  return text;
}

std::string shape_text(c10::SymIntArrayRef sizes) {
  std::vector<std::string> parts;
  for (const c10::SymInt& size : sizes) parts.push_back(to_text(size));
  return "(" + join(parts, ", ") + ")";
}

void require_plannable(const Tensor& mask) {
  TORCH_CHECK(mask.dim() == 4, "flashsdpa::mask_plan: attn_mask has ", to_text(mask.dim()),
              " dimensions; give 4: (batch|1, heads|1, query length|1, key length|1)");
  for (int axis : {2, 3})
    TORCH_CHECK(at_least(c10::SymInt(kPlanLongest), size(mask, axis)), "flashsdpa::mask_plan: attn_mask is ",
                shape_text(mask.sym_sizes()), "; give lengths of at most ", to_text(kPlanLongest),
                ", and size 1 for an axis that broadcasts");
}

bool needs_mask_grad(const Call& call) {
  return at::GradMode::is_enabled() && given(call.options.attn_mask) && call.options.attn_mask->requires_grad();
}

bool needs_grad(const Call& call) {
  if (!at::GradMode::is_enabled()) return false;
  const OptTensor& sinks = call.options.sinks;
  return call.query.requires_grad() || call.key.requires_grad() || call.value.requires_grad() ||
         needs_mask_grad(call) || (given(sinks) && sinks->requires_grad());
}

const KernelEntry* table_entry(Pass pass, const at::Device& device, at::ScalarType dtype) {
  const auto where = to_device(device);
  const auto type = to_dtype(dtype);
  if (!where || !type) return nullptr;
  return find_kernel(pass, *where, *type, capability_of(device));
}

void check_slopes(const Call& call, Reasons& reasons) {
  if (!given(call.options.alibi_slopes)) return;
  const Tensor& slopes = *call.options.alibi_slopes;
  if ((at::GradMode::is_enabled() && slopes.requires_grad()) || slopes._fw_grad(/*level=*/0).defined())
    reasons.add("alibi_slopes requires a gradient or carries a forward-mode tangent; flashsdpa computes neither; give "
                "alibi_slopes.detach()");
}

bool check_kinds(const Call& call, Reasons& reasons) {
  const Tensor &q = call.query, &k = call.key, &v = call.value;
  const OptTensor& mask = call.options.attn_mask;
  if (q.defined() && given(mask) && check_mask_kind(*mask, q, reasons)) return false;
  if (q.defined() && given(call.options.mask_plan) &&
      check_mask_plan_kind(*call.options.mask_plan, q.device(), reasons))
    return false;
  if (q.defined() && given(call.options.rng_state) &&
      check_rng_state_kind(*call.options.rng_state, q.device(), reasons))
    return false;
  if (check_options(call.options, reasons)) return false;
  if (check_kind("query", q, reasons) || check_kind("key", k, reasons) || check_kind("value", v, reasons)) return false;
  if (!q.defined() || !k.defined() || !v.defined()) return false;
  const OptTensor &slopes = call.options.alibi_slopes, &sinks = call.options.sinks;
  if (check_per_head_kind("alibi_slopes", slopes, q, reasons) || check_per_head_kind("sinks", sinks, q, reasons))
    return false;
  check_slopes(call, reasons);
  if (!reasons.ok() && !reasons.collecting()) return false;
  const auto readable_if_given = [](const OptTensor& t) { return !given(t) || is_dense(*t); };
  const bool readable = is_dense(q) && is_dense(k) && is_dense(v) && readable_if_given(mask) &&
                        readable_if_given(slopes) && readable_if_given(sinks);

  const auto dtype = q.scalar_type();
  if ((k.scalar_type() != dtype || v.scalar_type() != dtype) &&
      reasons.add("query, key, value have dtypes ", dtype_name(dtype), ", ", dtype_name(k.scalar_type()), ", ",
                  dtype_name(v.scalar_type()), "; give one dtype"))
    return false;
  const auto device = call.device;
  if ((k.device() != q.device() || v.device() != q.device()) &&
      reasons.add("query, key, value are on ", q.device(), ", ", k.device(), ", ", v.device(),
                  "; give them on one device"))
    return false;
  const auto where = to_device(device);
  if (!where) {
    // A Meta kernel stands for every device; it has no entry to ask.
    if (!device.is_meta()) reasons.add("device is ", device, "; supported: cpu, cuda");
    return readable;
  }
  if (const int capability = capability_of(device); device.is_cuda() && capability != kHopper)
    reasons.add("the GPU has compute capability ", capability / 10, ".", capability % 10,
                "; flashsdpa's CUDA kernels need 9.0 (H100, H200)");
  else if (table_entry(Pass::kForward, device, dtype) == nullptr)
    reasons.add("dtype is ", dtype_name(dtype), "; supported on ", device.type(), ": ",
                reasons.collecting() ? supported_dtypes(device) : std::string());
  else if (needs_grad(call) && table_entry(Pass::kBackward, device, dtype) == nullptr)
    reasons.add("a gradient is needed; this build has no backward kernel for ", dtype_name(dtype), " on ",
                device.type());
  return readable;
}

void check_entry(const KernelEntry& entry, const Call& call, bool mask_grad, Reasons& reasons) {
  const Options& o = call.options;
  const auto lacks = [&](Feature feature) { return (entry.features & feature) == 0; };
  const auto dtype = to_dtype(call.query.scalar_type());
  if (dtype && !(entry.dtypes & (1u << static_cast<int>(*dtype))) &&
      reasons.add("dtype is ", dtype_name(call.query.scalar_type()), "; ", entry.name, " does not take it"))
    return;
  const c10::SymInt& dim = size(call.query, 3);
  const c10::SymInt& dim_v = size(call.value, 3);
  if (!TORCH_GUARD_OR_FALSE(dim.sym_le(entry.max_dim)) &&
      reasons.add("head_dim is ", dim, "; supported: 0 to ", entry.max_dim))
    return;
  if (!TORCH_GUARD_OR_FALSE(dim_v.sym_le(entry.max_dim)) &&
      reasons.add("head_dim of value is ", dim_v, "; supported: 0 to ", entry.max_dim))
    return;
  if (lacks(kCausal) && o.is_causal && reasons.add("is_causal is True; ", entry.name, " takes False")) return;
  if (lacks(kBand)) {
    const bool window = !equals(o.window_left, -1) || !equals(o.window_right, -1);
    if ((window || o.bottom_right) && reasons.add("window or bottom_right is given; ", entry.name, " takes neither"))
      return;
  }
  if (given(o.mask_plan) && lacks(kBoolMask) && reasons.add("mask_plan is given; ", entry.name, " takes none")) return;
  if (given(o.attn_mask)) {
    const bool boolean = o.attn_mask->scalar_type() == at::kBool;
    if (boolean && lacks(kBoolMask) && reasons.add("attn_mask is bool; ", entry.name, " takes none")) return;
    if (!boolean && lacks(kBias) && reasons.add("attn_mask is additive; ", entry.name, " takes none")) return;
    if (mask_grad && lacks(kBiasGrad) && reasons.add("attn_mask requires a gradient; ", entry.name, " computes none"))
      return;
  }
  if (lacks(kSoftcap) && o.softcap != 0.0 && reasons.add("softcap is ", o.softcap, "; ", entry.name, " takes 0"))
    return;
  if (lacks(kAlibi) && given(o.alibi_slopes) && reasons.add("alibi_slopes is given; ", entry.name, " takes none"))
    return;
  if (lacks(kSinks) && given(o.sinks) && reasons.add("sinks is given; ", entry.name, " takes none")) return;
  if (lacks(kBatchInvariant) && o.batch_invariant &&
      reasons.add("batch_invariant is True; ", entry.name, " takes False"))
    return;
  if (lacks(kDropout) && o.dropout_p != 0.0 &&
      reasons.add("dropout_p is ", o.dropout_p, "; ", entry.name, " takes 0"))
    return;
  if (lacks(kGqa) && !equals(size(call.query, 1), size(call.key, 1)))
    reasons.add("query has ", size(call.query, 1), " heads, key ", size(call.key, 1), "; ", entry.name,
                " takes equal counts");
}

void check_shapes(const Call& call, Reasons& reasons) {
  const Tensor &q = call.query, &k = call.key, &v = call.value;
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4) {
    reasons.add("query, key, value have ", q.dim(), ", ", k.dim(), ", ", v.dim(),
                " dimensions; give 4: (batch, heads, length, head_dim)");
    return;
  }
  const auto shapes = [&] {
    return reasons.collecting() ? "query " + shape_text(q.sym_sizes()) + ", key " + shape_text(k.sym_sizes()) +
                                      ", value " + shape_text(v.sym_sizes())
                                : std::string();
  };
  if (!(equals(size(q, 0), size(k, 0)) && equals(size(q, 0), size(v, 0))) &&
      reasons.add(shapes(), ": batch sizes differ; give equal ones"))
    return;
  if (!equals(size(k, 1), size(v, 1)) && reasons.add(shapes(), ": key and value heads differ; give equal counts"))
    return;
  const c10::SymInt &hq = size(q, 1), &hkv = size(k, 1);
  const bool grouped = equals(hq, hkv) || (at_least(hkv, 1) && equals(hq % hkv, 0));
  if (!grouped && reasons.add(shapes(), ": query heads must be a multiple of key heads")) return;
  if (!equals(size(q, 3), size(k, 3)) && reasons.add(shapes(), ": query and key head_dim differ; give equal ones"))
    return;
  if (!equals(size(k, 2), size(v, 2)) && reasons.add(shapes(), ": key and value lengths differ; give equal ones"))
    return;

  if (given(call.options.attn_mask)) {
    const Tensor& mask = *call.options.attn_mask;
    const std::array<const c10::SymInt*, 4> full{&size(q, 0), &size(q, 1), &size(q, 2), &size(k, 2)};
    bool fits = mask.dim() == 4;
    for (int axis = 0; fits && axis < 4; ++axis)
      fits = equals(size(mask, axis), *full[axis]) || equals(size(mask, axis), 1);
    if (!fits && reasons.add("attn_mask ", reasons.collecting() ? shape_text(mask.sym_sizes()) : std::string(),
                             " does not broadcast to (", *full[0], ", ", *full[1], ", ", *full[2], ", ", *full[3],
                             ") without expanding the scores"))
      return;
  }

  if (check_per_head_shape("alibi_slopes", call.options.alibi_slopes, q, /*by_batch=*/true, reasons) ||
      check_per_head_shape("sinks", call.options.sinks, q, /*by_batch=*/false, reasons))
    return;

  if (const auto* entry = table_entry(Pass::kForward, call.device, q.scalar_type())) {
    check_entry(*entry, call, /*mask_grad=*/false, reasons);
    if (!reasons.ok() && !reasons.collecting()) return;
  }
  if (!needs_grad(call)) return;
  if (const auto* entry = backward_entry(call)) check_entry(*entry, call, needs_mask_grad(call), reasons);
}

const KernelEntry* forward_entry(const Call& call) {
  const auto device = call.device;
  const auto dtype = call.query.scalar_type();
  const auto hq = size(call.query, 1).maybe_as_int(), hkv = size(call.key, 1).maybe_as_int(),
             sq = size(call.query, 2).maybe_as_int();
  if (hq && hkv && sq && *hkv > 0 && *sq <= kDecodeQueries && *hq / *hkv * *sq <= kDecodeRows) {
    if (const auto* decode = table_entry(Pass::kDecode, device, dtype)) {
      Reasons reasons;
      check_entry(*decode, call, /*mask_grad=*/false, reasons);
      if (reasons.ok()) return decode;
    }
  }
  return table_entry(Pass::kForward, device, dtype);
}

const KernelEntry* backward_entry(const Call& call) {
  return table_entry(Pass::kBackward, call.device, call.query.scalar_type());
}

bool has_backward(const Call& call) {
  if (call.device.is_meta()) return true;  // stands for every device
  const KernelEntry* entry = backward_entry(call);
  return entry != nullptr && (!needs_mask_grad(call) || (entry->features & kBiasGrad));
}

void raise(const char* op, const Call& call) {
  std::vector<std::string> list;
  Reasons reasons(&list);
  check_rng_state_given(call.options, reasons);
  if (check_kinds(call, reasons)) check_shapes(call, reasons);
  TORCH_CHECK(false, op, ": ", join(list, "; "));
}

void require(const char* op, const Call& call) {
  Reasons reasons;
  check_rng_state_given(call.options, reasons);
  if (reasons.ok()) check_kinds(call, reasons);
  if (reasons.ok()) check_shapes(call, reasons);
  if (!reasons.ok()) [[unlikely]]
    raise(op, call);
}

void require_backward(const Call& call, const OptTensor& grad_out, const OptTensor& grad_lse, const Tensor& out,
                      const Tensor& lse, const char* op) {
  require(op, call);
  const Tensor& q = call.query;
  const auto dtype = q.scalar_type(), accumulation = accumulation_type(dtype);
  const std::array<c10::SymInt, 4> sizes{size(q, 0), size(q, 1), size(q, 2), size(call.value, 3)};
  const auto check = [&](const char* name, const Tensor& t, size_t rank, at::ScalarType type) {
    check_like(op, name, t, c10::SymIntArrayRef(sizes.data(), rank), type, q.device());
  };
  check("out", out, 4, dtype);
  check("lse", lse, 3, accumulation);
  if (given(grad_out)) check("grad_out", *grad_out, 4, dtype);
  if (given(grad_lse)) check("grad_lse", *grad_lse, 3, accumulation);
}

void require_jvp(const Call& call, const OptTensor& grad_out, const OptTensor& grad_lse, const Tensor& out,
                 const Tensor& lse, const Tangents& tangents) {
  constexpr const char* op = "flashsdpa::jvp";
  require_backward(call, grad_out, grad_lse, out, lse, op);
  const Options& o = call.options;
  TORCH_CHECK(!given(o.mask_plan) || given(o.attn_mask), op,
              ": mask_plan is given without attn_mask; tangents and second derivatives read the mask itself: give "
              "attn_mask too");
  const auto check = [&](const char* name, const OptTensor& tangent, const OptTensor& of) {
    if (!given(tangent)) return;
    TORCH_CHECK(given(of), op, ": ", name, " is given, what it is a tangent of is not");
    check_like(op, name, *tangent, of->sym_sizes(), of->scalar_type(), of->device());
  };
  check("tangent_query", tangents.query, call.query);
  check("tangent_key", tangents.key, call.key);
  check("tangent_value", tangents.value, call.value);
  check("tangent_attn_mask", tangents.attn_mask, o.attn_mask);
  check("tangent_sinks", tangents.sinks, o.sinks);
  check("tangent_grad_out", tangents.grad_out, out);
  check("tangent_grad_lse", tangents.grad_lse, lse);
}

}  // namespace flashsdpa
