// Second derivatives and tangents, a composite of ATen ops over blocks of queries.
//
// For one (batch, head), with scores s = scale q k^T, u = softcap tanh(s / softcap) (or s), z = u + slopes + bias, L the
// log-sum-exp of z (and of the sink, a key of score sigma without a value), P = exp(z - L), O = P v. P comes from the saved
// L: no softmax is made anew. Write x' for the derivative of x along the directions given, and t = du/ds = 1 - tanh^2.
//
//   s' = scale (q' k^T + q k'^T)          z' = t s' + bias'
//   L' = sum_j P z' + P_sink sigma'       P' = P (z' - L')                 O' = P' v + P v'
//
// The backward for cotangents G of O and g of L is D = G v^T, e = rowsum(G O) - g, dz = P (D - e), ds = t dz,
//   dq = scale ds k    dk = scale ds^T q    dv = P^T G    dbias = dz    dsink = -sum_i P_sink e
// and differentiating it in turn, with D' = G' v^T + G v'^T, e' = rowsum(G' O + G O') - g' and t' = -2/softcap tanh t s':
//   dz' = P' (D - e) + P (D' - e')        ds' = t dz' + t' dz
//   dq' = scale (ds' k + ds k')           dk' = scale (ds'^T q + ds^T q')  dv' = P'^T G + P^T G'
//   dbias' = dz'                          dsink' = -sum_i (P_sink (sigma' - L') e + P_sink e')
//
// Dropout multiplies weights by a constant Z: P and P' by Z where v or G stand behind them, D and D' by Z where they are made.
//
// The same function is the double backward. The gradient of psi(x) = <G, O(x)> + <g, L(x)> is what the backward returns, so
// that a cotangent c of it asks for the gradient of <c, grad psi>: with respect to x that is the Hessian of psi times c,
// symmetric, and hence the tangent of the backward along c; with respect to G and g it is O' and L' along c.
//
// A block has all keys that its band leaves, so its row sums are final. At any time one block of scores is alive: memory is
// linear in either length.

#include "jvp.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <limits>
#include <vector>

#include "checks.h"
#include "dropout_factor.h"
#include "execute.h"
#include "layout.h"

namespace flashsdpa {

namespace {

// Scores of a block, over all batches and heads: 1 MB of floats, of which a cache holds several, but no fewer rows than make
// matrix products worth while.
constexpr int64_t kBlockScores = 1 << 18, kBlockRows = 16;

int64_t known(const Tensor& t, int64_t axis) { return t.sym_size(axis).guard_int(__FILE__, __LINE__); }

// An undefined tensor stands for zero.
Tensor plus(const Tensor& a, const Tensor& b) { return !a.defined() ? b : !b.defined() ? a : a + b; }
Tensor times(const Tensor& a, const Tensor& b) { return a.defined() && b.defined() ? a * b : Tensor(); }
Tensor product(const Tensor& a, const Tensor& b) {
  return a.defined() && b.defined() ? at::matmul(a, b) : Tensor();
}
Tensor transposed(const Tensor& t) { return t.transpose(-1, -2); }
Tensor row_sum(const Tensor& t) { return t.defined() ? t.sum({-1}, /*keepdim=*/true) : Tensor(); }

// One call in the type of its sums. Tensors that go by queries are read a block at a time; those by keys are whole.
class Jvp {
 public:
  Jvp(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out, const Tensor& lse,
      const Tangents& tangents, std::array<bool, 7> wanted, bool in_place)
      : in_place_(in_place), call_(call), o_(call.options), wanted_(wanted), tangents_(tangents), out_(out), lse_(lse),
        grad_out_(tensor_or_undefined(grad_out)), grad_lse_(tensor_or_undefined(grad_lse)),
        type_(accumulation_type(call.query.scalar_type())), batch_(known(call.query, 0)),
        heads_kv_(known(call.key, 1)), group_(known(call.query, 1) / one_or_more(heads_kv_)),
        seq_q_(known(call.query, 2)), seq_k_(known(call.key, 2)), band_(band(o_, seq_q_, seq_k_)),
        scale_(o_.scale.value_or(1.0 / std::sqrt(static_cast<double>(one_or_more(known(call.query, 3)))))),
        key_(wide(call.key)), value_(wide(call.value)), t_key_(wide(tensor_or_undefined(tangents.key))),
        t_value_(wide(tensor_or_undefined(tangents.value))) {}

  JvpResult run() {
    const int64_t pairs = one_or_more(batch_ * heads_kv_ * group_ * seq_k_);
    const int64_t step = std::max(kBlockRows, kBlockScores / pairs);
    for (int64_t first = 0; first == 0 || first < seq_q_; first += step)
      block(first, std::min(step, seq_q_ - first));
    const Tensor& query = call_.query;
    const auto by_query = [&](bool wanted, const std::vector<Tensor>& blocks, const Tensor& like) {
      return wanted ? joined(blocks, 2).to(like.scalar_type()) : at::empty({0}, query.options());
    };
    const auto whole = [&](bool wanted, const Tensor& sum, const Tensor& like) {
      if (!wanted) return at::empty({0}, query.options());
      if (!sum.defined()) return at::zeros_symint(like.sym_sizes(), like.options());
      return sum.reshape_symint(like.sym_sizes()).to(like.scalar_type());
    };
    const Tensor mask = tensor_or_undefined(o_.attn_mask);
    if (!mask_blocks_.empty()) mask_sum_ = joined(mask_blocks_, 3);
    return {by_query(wanted_[0], out_blocks_, query), by_query(wanted_[1], lse_blocks_, lse_),
            by_query(wanted_[2], query_blocks_, query), whole(wanted_[3], key_sum_, call_.key),
            whole(wanted_[4], value_sum_, call_.value), whole(wanted_[5] && mask.defined(), mask_sum_, mask),
            whole(wanted_[6] && given(o_.sinks), sinks_sum_, tensor_or_undefined(o_.sinks))};
  }

 private:
  Tensor wide(const Tensor& t) const { return t.defined() ? t.to(type_).contiguous() : t; }

  // (B, Hq, Sq, X) to rows first ... of (B, Hkv, group x rows, X): the heads of a group share their keys.
  Tensor rows(const Tensor& t, int64_t first, int64_t count) const {
    if (!t.defined()) return t;
    return t.narrow_symint(2, first, count).to(type_).reshape_symint({batch_, heads_kv_, group_ * count, t.sym_size(3)});
  }
  Tensor rows(const OptTensor& t, int64_t first, int64_t count) const {
    return rows(tensor_or_undefined(t), first, count);
  }
  // (B, Hq, Sq) to (B, Hkv, group, rows, 1).
  Tensor row_numbers(const Tensor& t, int64_t first, int64_t count) const {
    if (!t.defined()) return t;
    return t.narrow_symint(2, first, count).to(type_).reshape({batch_, heads_kv_, group_, count, 1});
  }
  // (B, Hkv, group x rows, X) to (B, Hq, rows, X).
  Tensor by_head(const Tensor& t, int64_t count, const Tensor& like) const {
    const c10::SymInt columns = like.sym_size(3);
    if (!t.defined()) return at::zeros_symint({batch_, heads_kv_ * group_, count, columns}, like.options().dtype(type_));
    return t.reshape_symint({batch_, heads_kv_ * group_, count, columns});
  }
  // A number for each head, (Hq) or (B, Hq), to (B|1, Hkv, group, 1, 1).
  Tensor by_pair(const Tensor& t) const {
    return t.defined() ? t.to(type_).reshape({t.dim() == 2 ? batch_ : 1, heads_kv_, group_, 1, 1}) : t;
  }

  // (mask batch, mask heads, Sq|1, Sk|1) to the block's (mask batch, Hkv|1, group|1, rows|1, keys|1).
  Tensor mask_block(const Tensor& mask, int64_t first, int64_t count, Span keys) const {
    if (!mask.defined()) return mask;
    const bool one_head = known(mask, 1) == 1;
    Tensor t = mask.reshape({known(mask, 0), one_head ? 1 : heads_kv_, one_head ? 1 : group_, known(mask, 2),
                             known(mask, 3)});
    if (known(mask, 2) != 1) t = t.narrow(3, first, count);
    return known(mask, 3) == 1 ? t : t.narrow(4, keys.first, keys.count);
  }

  // What lives on from block to block is written in place where nothing is recorded: small tensors allocated among a block's
  // large ones would keep the C allocator from using their memory again.
  void put(std::vector<Tensor>* blocks, const Tensor& t, int64_t first, int64_t axis) const {
    if (!in_place_) return blocks->push_back(t);
    if (blocks->empty()) {
      auto sizes = t.sizes().vec();
      sizes[axis] = seq_q_;
      blocks->push_back(at::empty(sizes, t.options()));
    }
    blocks->front().narrow(axis, first, t.size(axis)).copy_(t);
  }
  static Tensor joined(const std::vector<Tensor>& blocks, int64_t axis) {
    return blocks.size() == 1 ? blocks.front() : at::cat(blocks, axis);
  }

  // Adds a block's rows of keys to the sum over all blocks.
  void add(Tensor* sum, const Tensor& t, Span keys, int64_t axis) const {
    if (!t.defined()) return;
    if (in_place_) {
      auto sizes = t.sizes().vec();
      sizes[axis] = seq_k_;
      if (!sum->defined()) *sum = at::zeros(sizes, t.options());
      sum->narrow(axis, keys.first, keys.count).add_(t);
      return;
    }
    std::vector<int64_t> pad;
    for (int64_t i = t.dim() - 1; i > axis; --i) pad.insert(pad.end(), {0, 0});
    pad.insert(pad.end(), {keys.first, seq_k_ - keys.first - keys.count});
    *sum = plus(*sum, keys.count == seq_k_ ? t : at::constant_pad_nd(t, pad));
  }

  void block(int64_t first, int64_t count);
  void add_mask(const Tensor& t, int64_t first, Span keys);

  const bool in_place_;
  const Call& call_;
  const Options& o_;
  const std::array<bool, 7> wanted_;
  const Tangents& tangents_;
  const Tensor out_, lse_, grad_out_, grad_lse_;
  const at::ScalarType type_;
  const int64_t batch_, heads_kv_, group_, seq_q_, seq_k_;
  const Band band_;
  const double scale_;
  const Tensor key_, value_, t_key_, t_value_;
  std::vector<Tensor> out_blocks_, lse_blocks_, query_blocks_, mask_blocks_;
  Tensor key_sum_, value_sum_, mask_sum_, sinks_sum_;
};

void Jvp::block(int64_t first, int64_t count) {
  const int64_t from = std::clamp<int64_t>(first + band_.lo, 0, seq_k_);
  const Span keys{from, std::clamp<int64_t>(first + count + band_.hi, from, seq_k_) - from};
  const auto of_keys = [&](const Tensor& t) { return t.defined() ? t.narrow(2, keys.first, keys.count) : t; };
  const Tensor k = of_keys(key_), v = of_keys(value_), t_k = of_keys(t_key_), t_v = of_keys(t_value_);
  const Tensor q = rows(call_.query, first, count), t_q = rows(tangents_.query, first, count);
  const auto scores = [&](const Tensor& t) {  // (B, Hkv, group x rows, keys) to (B, Hkv, group, rows, keys)
    return t.defined() ? t.reshape({batch_, heads_kv_, group_, count, keys.count}) : t;
  };
  const auto flat = [&](const Tensor& t) {
    return t.defined() ? t.reshape({batch_, heads_kv_, group_ * count, keys.count}) : t;
  };

  Tensor z = scores(product(q, transposed(k))) * scale_;
  Tensor t_s = scores(plus(product(t_q, transposed(k)), t_k.defined() ? product(q, transposed(t_k)) : Tensor()));
  if (t_s.defined()) t_s = t_s * scale_;
  Tensor tanh, slope;  // slope: t = du/ds; undefined stands for 1
  if (o_.softcap != 0.0) {
    tanh = (z / o_.softcap).tanh();
    slope = 1.0 - tanh * tanh;
    z = tanh * o_.softcap;
  }
  const auto through_cap = [&](const Tensor& t) { return slope.defined() ? times(t, slope) : t; };
  const auto number = call_.query.options().dtype(at::kLong);
  const Tensor ahead = at::arange(keys.first, keys.first + keys.count, number) -
                       at::arange(first, first + count, number).unsqueeze(-1);  // j - i
  if (given(o_.alibi_slopes))
    z = z - by_pair(*o_.alibi_slopes) * (ahead - diagonal(o_, seq_q_, seq_k_)).abs().to(type_);
  const Tensor mask = mask_block(tensor_or_undefined(o_.attn_mask), first, count, keys);
  Tensor removed;  // broadcasts to the scores
  if (!band_.open()) removed = ahead.lt(band_.lo).logical_or(ahead.gt(band_.hi));
  if (mask.defined()) {
    const bool boolean = mask.scalar_type() == at::kBool;
    const Tensor out_of_mask = boolean ? mask.logical_not() : mask.eq(-std::numeric_limits<double>::infinity());
    removed = removed.defined() ? removed.logical_or(out_of_mask) : out_of_mask;
    if (!boolean) z = z + mask.to(type_);
  }
  Tensor t_z = plus(through_cap(t_s),
                    mask_block(tensor_or_undefined(tangents_.attn_mask), first, count, keys));
  if (t_z.defined()) t_z = t_z.to(type_);
  if (removed.defined()) {
    z = z.masked_fill(removed, -std::numeric_limits<double>::infinity());
    if (t_z.defined()) t_z = t_z.masked_fill(removed, 0.0);
  }

  Tensor lse = row_numbers(lse_, first, count);
  lse = lse.masked_fill(lse.eq(-std::numeric_limits<double>::infinity()), 0.0);  // a row without a key: P is 0
  const Tensor p = (z - lse).exp();
  const Tensor p_sink = given(o_.sinks) ? (by_pair(*o_.sinks) - lse).exp() : Tensor();
  const Tensor t_sink = by_pair(tensor_or_undefined(tangents_.sinks));
  const Tensor t_lse = plus(row_sum(times(p, t_z)), times(p_sink, t_sink));
  const Tensor from_mean = plus(t_z, t_lse.defined() ? -t_lse : t_lse);  // z' - L'
  const Tensor t_p = times(p, from_mean);
  const Tensor factor = scores(dropout_factor(o_, type_, batch_, heads_kv_ * group_, {first, count}, keys));
  const auto dropped = [&](const Tensor& t) { return factor.defined() ? times(t, factor) : t; };
  const Tensor z_p = flat(dropped(p)), t_z_p = flat(dropped(t_p));  // Z P and its derivative
  const Tensor t_o = plus(product(t_z_p, v), product(z_p, t_v));
  if (wanted_[0]) put(&out_blocks_, by_head(t_o, count, call_.value), first, 2);
  if (wanted_[1])
    put(&lse_blocks_,
        t_lse.defined() ? t_lse.reshape({batch_, heads_kv_ * group_, count})
                        : at::zeros({batch_, heads_kv_ * group_, count}, lse.options()),
        first, 2);
  if (!(wanted_[2] || wanted_[3] || wanted_[4] || wanted_[5] || wanted_[6])) return;

  const Tensor g = rows(grad_out_, first, count), t_g = rows(tangents_.grad_out, first, count);
  const Tensor o = rows(out_, first, count);
  const auto per_row = [&](const Tensor& t) {
    return t.defined() ? row_sum(t).reshape({batch_, heads_kv_, group_, count, 1}) : t;
  };
  const auto minus = [&](const Tensor& a, const Tensor& b) { return plus(a, b.defined() ? -b : b); };
  const Tensor e = minus(per_row(times(g, o)), row_numbers(grad_lse_, first, count));
  const Tensor t_e = minus(plus(per_row(times(t_g, o)), per_row(times(g, t_o))),
                           row_numbers(tensor_or_undefined(tangents_.grad_lse), first, count));
  const Tensor d_minus_e = minus(dropped(scores(product(g, transposed(v)))), e);
  const Tensor t_d_minus_e = minus(
      dropped(scores(plus(product(t_g, transposed(v)), t_v.defined() ? product(g, transposed(t_v)) : Tensor()))), t_e);
  const Tensor dz = times(p, d_minus_e);
  const Tensor t_dz = plus(times(t_p, d_minus_e), times(p, t_d_minus_e));
  const Tensor ds = flat(through_cap(dz));
  Tensor t_ds = through_cap(t_dz);
  if (slope.defined() && t_s.defined() && dz.defined())
    t_ds = plus(t_ds, dz * slope * tanh * t_s * (-2.0 / o_.softcap));
  t_ds = flat(t_ds);
  const auto scaled = [&](const Tensor& t) { return t.defined() ? t * scale_ : t; };
  const auto back = [&](const Tensor& t) { return t.defined() ? transposed(t) : t; };
  if (wanted_[2])
    put(&query_blocks_, by_head(scaled(plus(product(t_ds, k), product(ds, t_k))), count, call_.query), first, 2);
  if (wanted_[3]) add(&key_sum_, scaled(plus(product(back(t_ds), q), product(back(ds), t_q))), keys, 2);
  if (wanted_[4]) add(&value_sum_, plus(product(back(t_z_p), g), product(back(z_p), t_g)), keys, 2);
  if (wanted_[5] && mask.defined()) add_mask(t_dz, first, keys);
  if (wanted_[6] && p_sink.defined()) {
    const Tensor t_p_sink = times(p_sink, minus(t_sink, t_lse));
    const Tensor t_row = plus(times(t_p_sink, e), times(p_sink, t_e));
    if (t_row.defined()) sinks_sum_ = minus(sinks_sum_, t_row.sum({0, 3, 4}));
  }
}

// The mask's gradient is summed over the axes along which the mask broadcasts.
void Jvp::add_mask(const Tensor& t, int64_t first, Span keys) {
  if (!t.defined()) return;
  const Tensor& mask = *o_.attn_mask;
  std::vector<int64_t> summed;
  if (known(mask, 0) == 1) summed.push_back(0);
  if (known(mask, 1) == 1) summed.insert(summed.end(), {1, 2});
  for (int64_t axis : {2, 3})
    if (known(mask, axis) == 1) summed.push_back(axis + 1);
  Tensor part = summed.empty() ? t : t.sum(summed, /*keepdim=*/true);
  if (known(mask, 3) != 1) {
    Tensor padded;
    add(&padded, part, keys, 4);
    part = padded;
  }
  if (known(mask, 2) == 1)
    mask_sum_ = plus(mask_sum_, part);
  else
    put(&mask_blocks_, part, first, 3);
}

}  // namespace

JvpResult jvp_composite(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out,
                        const Tensor& lse, const Tangents& tangents, std::array<bool, 7> output_mask, bool in_place) {
  // Sums stay in their type: autocast, which may be on while a backward runs, would make half of them.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return Jvp(grad_out, grad_lse, call, out, lse, tangents, output_mask, in_place).run();
}

JvpResult jvp_on_device(FLASHSDPA_JVP_PARAMS) {
  const Options options{FLASHSDPA_OPTION_NAMES};
  const Call call{query, key, value, options};
  const Tangents tangents{tangent_grad_out, tangent_grad_lse,  tangent_query, tangent_key,
                          tangent_value,    tangent_attn_mask, tangent_sinks};
  require_jvp(call, grad_out, grad_lse, out, lse, tangents);
  const c10::OptionalDeviceGuard guard(query.device());
  return jvp_composite(grad_out, grad_lse, call, out, lse, tangents, output_mask, /*in_place=*/true);
}

}  // namespace flashsdpa
