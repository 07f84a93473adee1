#include "execute.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <limits>

#include "checks.h"
#include "dropout.h"
#include "layout.h"
#include "mask_plan.h"
#include "report.h"

namespace flashsdpa {

namespace {

// Kernels share torch's own intra-op pool, so torch.set_num_threads is obeyed.
void run_on_torch_pool(int workers, void (*task)(void*, int), void* context) {
  at::parallel_for(0, workers, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) task(context, static_cast<int>(worker));
  });
}

// Launches `entry` on the current stream of the device, or on torch's thread pool, in a span with the entry's name.
void launch(const KernelEntry& entry, const at::Device& device, const void* params) {
  at::RecordFunction span(at::RecordScope::FUNCTION);
  if (span.isActive()) [[unlikely]]
    span.before(entry.name);
  ThreadPool pool;
  Launch where;
  if (device.is_cpu()) {
    pool.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    pool.run = &run_on_torch_pool;
    where.pool = &pool;
  } else {
    where.stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  }
  const char* error = entry.launch(params, where);
  TORCH_CHECK(error == nullptr, entry.name, ": ", error);
}

Tensor empty_dense(const std::array<int64_t, 4>& sizes, const Tensor& like, at::ScalarType dtype) {
  const auto strides = dense_strides<int64_t>(sizes, like.strides());
  if (like.is_cpu()) return Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
  // Not at::empty_strided, which under deterministic algorithms fills what kernels then write whole.
  const auto key = c10::computeDispatchKey(dtype, c10::kStrided, like.device());
  return Tensor(at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(like.device().type()),
                                                  c10::DispatchKeySet(key), dtype));
}

std::array<int64_t, 4> sizes_of(const Tensor& t) { return {t.size(0), t.size(1), t.size(2), t.size(3)}; }

// The kernels read rows with unit stride; anything else is copied, in its own axis order.
Tensor readable(const Tensor& t) {
  if (!needs_copy(t)) return t;
  Tensor copy = empty_dense(sizes_of(t), t, t.scalar_type());
  copy.copy_(t);
  return copy;
}

// head_dim 0 is computed as head_dim 1 filled with zeros: all scores are 0, the output is the mean of the values.
Tensor padded(const Tensor& t) {
  if (t.size(3) != 0) return readable(t);
  return at::zeros({1, 1, 1, 1}, t.options()).expand({t.size(0), t.size(1), t.size(2), 1});
}

template <class ViewType>
ViewType view(const Tensor& t) {
  ViewType v;
  v.data = const_cast<void*>(t.const_data_ptr());
  for (int axis = 0; axis < 4; ++axis) v.stride[axis] = t.stride(axis);
  if (t.size(3) == 1) v.stride[3] = 1;  // the stride of a single column says nothing
  return v;
}

HeadView head_view(const OptTensor& t) {
  if (!given(t)) return {};
  return {t->const_data_ptr<float>(), t->dim() == 2 ? t->stride(0) : 0, t->stride(t->dim() - 1)};
}

// None where p rounds to none.
Dropout dropout(const Options& o) {
  Dropout d;
  d.kept = dropout_kept(o.dropout_p);
  if (d.kept == kDropoutOne) return d;
  d.rescale = d.kept == 0 ? 0.0 : static_cast<double>(kDropoutOne) / d.kept;
  if (!given(o.rng_state)) return d;  // explain() has no state to give
  d.seed = o.rng_state->const_data_ptr<int64_t>();
  d.offset = d.seed + o.rng_state->stride(0);
  return d;
}

bool has_memory(const Tensor& t) { return !t.is_meta() && !t.unsafeGetTensorImpl()->is_python_dispatch(); }

MaskView mask_view(const Tensor& mask) {
  MaskView m;
  m.data = has_memory(mask) ? mask.const_data_ptr() : reinterpret_cast<const void*>(16);  // not read, but not null
  m.dtype = *to_dtype(mask.scalar_type());
  for (int axis = 0; axis < 4; ++axis) {
    m.size[axis] = mask.size(axis);
    m.stride[axis] = mask.size(axis) == 1 ? 0 : mask.stride(axis);
  }
  return m;
}

// Whether a plan in host memory has this release's version and row lists that end inside themselves, which the kernels
// rely on when they read. What the lists say is not looked at: that would be to plan the mask again.
void check_plan_words(const Tensor& plan, int64_t queries, int64_t keys) {
  const int64_t rows = plan_granules(queries), cols = plan_granules(keys), words = plan.size(2);
  const int32_t* first = plan.const_data_ptr<int32_t>();
  for (int64_t plane = 0; plane < plan.size(0) * plan.size(1); ++plane) {
    const int32_t* data = first + plane * words;
    TORCH_CHECK(data[0] == kPlanVersion, "mask_plan has version ", to_text(data[0]), "; this release reads version ",
                to_text(kPlanVersion), "; make it again with flashsdpa::mask_plan(attn_mask)");
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t count = data[plan_row_offset(row, cols)];
      TORCH_CHECK(count >= 0 && count <= cols, "mask_plan counts ", to_text(count), " granules in row ", to_text(row),
                  ", where there are 0 to ", to_text(cols), "; make it again with flashsdpa::mask_plan(attn_mask)");
    }
  }
}

// A plan of the right make, of a mask of these lengths and this plan shape.
PlanView plan_view(const Tensor& plan, const at::Device& device, at::IntArrayRef shape, int64_t queries,
                   int64_t keys) {
  TORCH_CHECK(plan.scalar_type() == at::kInt && plan.is_contiguous() && plan.sizes() == shape && plan.device() == device,
              "mask_plan is ", dtype_name(plan.scalar_type()), " ", shape_text(plan.sym_sizes()), " on ", plan.device(),
              "; give flashsdpa::mask_plan(attn_mask) of this mask: contiguous int32 ",
              shape_text(c10::fromIntArrayRefKnownNonNegative(shape)), " on ", device);
  PlanView p;
  p.data = plan.const_data_ptr<int32_t>();
  if (plan.is_cpu()) check_plan_words(plan, queries, keys);  // on a device the host would have to wait for them
  if (plan.size(0) > 1) p.stride_batch = plan.stride(0);
  if (plan.size(1) > 1) p.stride_head = plan.stride(1);
  return p;
}

// The mask that a plan alone describes: of any sizes that broadcast and need as many words.
void take_plan_alone(const Tensor& plan, const at::Device& device, Problem* p) {
  const auto fits = [](int64_t size, int64_t whole) { return size == 1 || size == whole; };
  int64_t queries = -1, keys = -1;
  for (const int64_t q : {p->seq_q, int64_t{1}}) {
    for (const int64_t k : {p->seq_k, int64_t{1}}) {
      const bool plannable = q <= kPlanLongest && k <= kPlanLongest;
      if (queries < 0 && plannable && plan.dim() == 3 && plan.size(2) == plan_words(q, k)) queries = q, keys = k;
    }
  }
  TORCH_CHECK(queries >= 0 && fits(plan.size(0), p->batch) && fits(plan.size(1), p->heads_q), "mask_plan is ",
              shape_text(plan.sym_sizes()), "; give the plan of a mask that broadcasts to (", to_text(p->batch), ", ",
              to_text(p->heads_q), ", ", to_text(p->seq_q), ", ", to_text(p->seq_k), ")");
  p->plan = plan_view(plan, device, plan.sizes(), queries, keys);
  const int64_t sizes[4] = {plan.size(0), plan.size(1), queries, keys};
  std::copy(std::begin(sizes), std::end(sizes), p->mask.size);
}

// Whether torch's own products on CUDA would round float32 to TF32 here: of its flags, old and new ones, that which cuBLAS is
// set up by. (allowTF32CuBLAS() raises where the old and the new one disagree.)
bool torch_allows_tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32 &&
         !at::NoTF32Guard::should_disable_tf32();
}

Problem problem(const Call& call) {
  const Options& o = call.options;
  Problem p;
  p.batch = call.query.size(0);
  p.heads_q = call.query.size(1);
  p.heads_kv = call.key.size(1);
  p.seq_q = call.query.size(2);
  p.seq_k = call.key.size(2);
  p.dim = one_or_more(call.query.size(3));
  p.dim_v = one_or_more(call.value.size(3));
  p.dtype = *to_dtype(call.query.scalar_type());
  p.scale = o.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.dim)));
  p.band = band(o, p.seq_q, p.seq_k);
  p.softcap = o.softcap;
  p.slopes = head_view(o.alibi_slopes);
  p.diagonal = diagonal(o, p.seq_q, p.seq_k);
  p.dropout = dropout(o);
  p.sinks = head_view(o.sinks);
  p.batch_invariant = o.batch_invariant;
  p.allow_tf32 = p.dtype == DType::kFloat32 && call.device.is_cuda() && torch_allows_tf32();
  const at::Device device = call.query.device();
  if (given(o.attn_mask)) {
    p.mask = mask_view(*o.attn_mask);
    if (given(o.mask_plan)) {
      require_plannable(*o.attn_mask);
      p.plan = plan_view(*o.mask_plan, device, plan_shape<int64_t>(o.attn_mask->sizes()), p.mask.size[2],
                         p.mask.size[3]);
    }
  } else if (given(o.mask_plan)) {
    take_plan_alone(*o.mask_plan, device, &p);
  }
  return p;
}

// Where the kernel takes the mask of `params` only with a plan and the caller gives none, the plan made here, put into *p of params;
// it must outlive the launch.
OptTensor plan_if_needed(const KernelEntry& entry, const Call& call, const void* params, Problem* p) {
  const Options& o = call.options;
  if (!given(o.attn_mask) || given(o.mask_plan) || entry.needs_plan == nullptr || !entry.needs_plan(params)) return std::nullopt;
  Tensor plan = mask_plan_on_device(*o.attn_mask);
  p->plan = plan_view(plan, call.query.device(), plan.sizes(), p->mask.size[2], p->mask.size[3]);
  return plan;
}

// A tensor as the kernel would be given it: where it has no memory, an address of the same alignment.
template <class ViewType>
ViewType unread_view(const Tensor& t, at::IntArrayRef strides, bool fresh) {
  ViewType v;
  const auto offset = fresh ? 0 : t.storage_offset() * static_cast<int64_t>(t.itemsize());
  v.data = !fresh && has_memory(t) ? const_cast<void*>(t.const_data_ptr()) : reinterpret_cast<void*>(offset);
  for (int axis = 0; axis < 4; ++axis) v.stride[axis] = strides[axis];
  return v;
}

}  // namespace

int64_t diagonal(const Options& o, int64_t seq_q, int64_t seq_k) { return o.bottom_right ? seq_k - seq_q : 0; }

Band band(const Options& o, int64_t seq_q, int64_t seq_k) {
  const int64_t offset = diagonal(o, seq_q, seq_k);
  const int64_t left = o.window_left.guard_int(__FILE__, __LINE__);
  const int64_t right = o.window_right.guard_int(__FILE__, __LINE__);
  Band b;
  // A window wider than the scores is open; the test also keeps the sums below from overflowing.
  if (left >= 0 && left < seq_q + seq_k) b.lo = offset - left;
  if (right >= 0 && right < seq_q + seq_k) b.hi = offset + right;
  if (o.is_causal) b.hi = std::min(b.hi, offset);
  return b;
}

std::optional<KernelDetail> detail_of(const KernelEntry& entry, const Call& call) {
  if (entry.describe == nullptr) return std::nullopt;
  ForwardParams params;
  params.problem = problem(call);
  const auto input = [](const Tensor& t) {
    const bool copied = needs_copy(t) || t.size(3) == 0;
    const auto dense = dense_strides<int64_t>(sizes_of(t), t.strides());
    return unread_view<ConstView>(t, copied ? at::IntArrayRef(dense) : t.strides(), copied);
  };
  params.q = input(call.query);
  params.k = input(call.key);
  params.v = input(call.value);
  auto out_sizes = sizes_of(call.query);
  out_sizes[3] = call.value.size(3);
  params.out = unread_view<View>(call.query, dense_strides<int64_t>(out_sizes, call.query.strides()), /*fresh=*/true);
  KernelDetail detail{};
  entry.describe(&params, &detail);
  return detail;
}

bool needs_plan(const KernelEntry& entry, const Call& call) {
  if (entry.needs_plan == nullptr) return false;
  ForwardParams params;
  params.problem = problem(call);
  return entry.needs_plan(&params);
}

bool needs_copy(const Tensor& t) { return t.size(3) > 1 && t.stride(3) != 1; }

ForwardResult forward_on_device(FLASHSDPA_FORWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  require("flashsdpa::forward", call);
  const c10::OptionalDeviceGuard guard(query.device());
  routed_calls.fetch_add(1, std::memory_order_relaxed);
  ForwardParams params;
  params.problem = problem(call);
  const KernelEntry* entry = forward_entry(call);
  const OptTensor plan = plan_if_needed(*entry, call, &params, &params.problem);
  const Problem& p = params.problem;
  const auto dtype = query.scalar_type();
  const int64_t dim_v = value.size(3);
  Tensor out = empty_dense({p.batch, p.heads_q, p.seq_q, dim_v}, query, dtype);
  Tensor lse = query.is_cpu()
                   ? Tensor(at::detail::empty_cpu({p.batch, p.heads_q, p.seq_q}, accumulation_type(dtype)))
                   : at::empty({p.batch, p.heads_q, p.seq_q}, query.options().dtype(accumulation_type(dtype)));
  if (observing()) [[unlikely]]
    observe_launch("flashsdpa::forward", *entry, call);
  if (lse.numel() == 0) return {out, lse};
  if (p.seq_k == 0 && !given(sinks)) {
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return {out, lse};
  }
  const Tensor q = padded(query), k = padded(key), v = padded(value);
  const Tensor target = dim_v == 0 ? at::empty({p.batch, p.heads_q, p.seq_q, 1}, query.options()) : out;
  params.q = view<ConstView>(q);
  params.k = view<ConstView>(k);
  params.v = view<ConstView>(v);
  params.out = view<View>(target);
  params.lse = lse.mutable_data_ptr();
  // Freed on return, before the kernel has run: the allocator hands memory out again in the order of the stream.
  at::DataPtr memory;
  if (query.is_cuda()) {
    constexpr int64_t kCounterBytes = 16;  // that of the counter, and what keeps the scratch behind it aligned
    const int64_t bytes = entry->scratch_bytes ? entry->scratch_bytes(&params) : 0;
    memory = c10::GetAllocator(c10::DeviceType::CUDA)->allocate(kCounterBytes + bytes);
    params.counter = static_cast<int32_t*>(memory.get());
    if (bytes > 0) params.scratch = static_cast<char*>(memory.get()) + kCounterBytes;
  }
  launch(*entry, query.device(), &params);
  return {out, lse};
}

BackwardResult backward_on_device(FLASHSDPA_BACKWARD_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  require_backward(call, grad_out, grad_lse, out, lse);
  const c10::OptionalDeviceGuard guard(query.device());

  BackwardParams params;
  params.problem = problem(call);
  const Problem& p = params.problem;
  const auto dtype = query.scalar_type(), accumulation = accumulation_type(dtype);
  const int64_t dim_v = value.size(3);

  const bool want_inputs = output_mask[0] || output_mask[1] || output_mask[2];
  const bool want_mask = output_mask[3] && given(attn_mask);
  const bool want_sinks = output_mask[4] && given(sinks);
  const bool nothing_flows =
      lse.numel() == 0 || (p.seq_k == 0 && !want_sinks) || (!given(grad_out) && !given(grad_lse));
  const auto gradient = [&](const Tensor& like) {
    auto sizes = sizes_of(like);
    sizes[3] = one_or_more(sizes[3]);
    return empty_dense(sizes, like, dtype);
  };
  Tensor dq, dk, dv, dmask, dsinks;
  if (want_inputs) dq = gradient(query), dk = gradient(key), dv = gradient(value);
  if (want_mask && query.is_cpu()) {
    dmask = at::zeros(attn_mask->sizes(), query.options().dtype(accumulation));  // kernels add to it
  } else if (want_mask) {
    dmask = at::empty(attn_mask->sizes(), attn_mask->options().memory_format(at::MemoryFormat::Contiguous));
    if (nothing_flows) dmask.zero_();
  }
  if (want_sinks) dsinks = at::zeros(sinks->sizes(), sinks->options());
  if (nothing_flows) {
    if (want_inputs) dq.zero_(), dk.zero_(), dv.zero_();
  } else if (want_inputs || want_mask || want_sinks) {
    const auto* entry = backward_entry(call);
    Reasons reasons;
    check_entry(*entry, call, want_mask, reasons);
    TORCH_CHECK(reasons.ok(), entry->name, " does not compute this gradient");
    if (observing()) [[unlikely]]
      observe_launch("flashsdpa::backward", *entry, call);
    const Tensor q = padded(query), k = padded(key), v = padded(value), o = padded(out);
    // A stride of 0 is read in place, in the last axis too: the gradient of a sum is one number.
    const bool broadcast = given(grad_out) && dim_v > 0 && grad_out->stride(3) == 0;
    const Tensor go = broadcast          ? *grad_out
                      : !given(grad_out) ? at::zeros({1, 1, 1, 1}, query.options()).expand(o.sizes())
                                         : padded(*grad_out);
    const Tensor gl = given(grad_lse) ? grad_lse->contiguous() : Tensor();
    const Tensor l = lse.contiguous();
    params.grad_out = view<ConstView>(go);
    params.grad_lse = gl.defined() ? gl.const_data_ptr() : nullptr;
    params.q = view<ConstView>(q);
    params.k = view<ConstView>(k);
    params.v = view<ConstView>(v);
    params.out = view<ConstView>(o);
    params.lse = l.const_data_ptr();
    if (want_inputs) params.dq = view<View>(dq), params.dk = view<View>(dk), params.dv = view<View>(dv);
    params.dmask = want_mask ? dmask.mutable_data_ptr() : nullptr;
    params.dsinks = want_sinks ? dsinks.mutable_data_ptr<float>() : nullptr;
    params.deterministic = deterministic || at::globalContext().deterministicAlgorithms();
    const OptTensor plan = plan_if_needed(*entry, call, &params, &params.problem);
    at::DataPtr scratch;  // freed before the kernels have run, like the forward's counter
    if (entry->scratch_bytes != nullptr) {
      scratch = c10::GetAllocator(query.device().type())->allocate(entry->scratch_bytes(&params));
      params.scratch = scratch.get();
    }
    launch(*entry, query.device(), &params);
  }

  const auto not_wanted = [&] { return at::empty({0}, query.options()); };
  const auto finish = [&](bool wanted, Tensor& grad, const Tensor& like) {
    if (!wanted) return not_wanted();
    // A padded head_dim 0: the real gradient has no elements.
    return like.size(3) == 0 ? empty_dense(sizes_of(like), like, dtype) : std::move(grad);
  };
  return {finish(output_mask[0], dq, query), finish(output_mask[1], dk, key), finish(output_mask[2], dv, value),
          want_mask ? dmask.to(attn_mask->scalar_type()) : not_wanted(), want_sinks ? std::move(dsinks) : not_wanted()};
}

Tensor mask_plan_on_device(const Tensor& attn_mask) {
  require_plannable(attn_mask);
  const auto* entry = table_entry(Pass::kMaskPlan, attn_mask.device(), attn_mask.scalar_type());
  TORCH_CHECK(entry != nullptr, "flashsdpa::mask_plan: attn_mask is ", dtype_name(attn_mask.scalar_type()), " on ",
              attn_mask.device(), "; supported: bool, float32, bfloat16, float16, float64 on a device with a kernel");
  const c10::OptionalDeviceGuard guard(attn_mask.device());
  MaskPlanParams params;
  params.mask = mask_view(attn_mask);
  const auto options = attn_mask.options().dtype(at::kInt);
  Tensor plan = at::empty(plan_shape<int64_t>(attn_mask.sizes()), options);  // the kernel writes every word
  if (plan.numel() == 0) return plan;
  params.plan = plan.mutable_data_ptr<int32_t>();
  launch(*entry, attn_mask.device(), &params);
  return plan;
}

}  // namespace flashsdpa
