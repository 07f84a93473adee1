#include "normalise.h"

#include <c10/core/SymInt.h>

#include "layout.h"

namespace flashsdpa {

namespace {

// The size that an axis of the mask has or broadcasts to; the mask has no more axes than the query.
c10::SymInt whole_size(const Normalised& r, const Tensor& mask, int64_t axis) {
  const int64_t from_end = mask.dim() - axis;
  if (from_end > 3) return r.leading[r.leading.size() + 3 - from_end];
  return from_end == 1 ? r.key.sym_size(2) : r.query.sym_size(4 - from_end);
}

// A broadcast axis of size n repeats one row: size 1 says the same, and costs the plan and the kernels less. A size that
// does not fit stays, and is refused.
bool collapses(const Normalised& r, const Tensor& mask, int64_t axis) {
  return !equals(mask.sym_size(axis), 1) && equals(mask.sym_stride(axis), 0) &&
         TORCH_GUARD_OR_FALSE(mask.sym_size(axis).sym_ge(2)) &&
         equals(mask.sym_size(axis), whole_size(r, mask, axis));
}

Tensor at_rank(Tensor t, int64_t rank) {
  while (t.dim() < rank) t = t.unsqueeze(0);
  return t;
}

// Whether the first `count` axes are one axis in memory.
bool flattens(const Tensor& t, int64_t count) {
  int64_t inner = -1;
  for (int64_t axis = count - 1; axis >= 0; --axis) {
    if (equals(t.sym_size(axis), 1)) continue;
    if (inner >= 0 && !equals(t.sym_stride(axis), t.sym_size(inner) * t.sym_stride(inner))) return false;
    inner = axis;
  }
  return true;
}

Tensor flatten_leading(const Tensor& t, int64_t count) {
  c10::SymInt batch = 1;
  for (int64_t axis = 0; axis < count; ++axis) batch = batch * t.sym_size(axis);
  return t.view_symint({batch, t.sym_size(count), t.sym_size(count + 1), t.sym_size(count + 2)});
}

// Broadcasts the axes before (heads, length, head_dim) among query, key and value; size 1 stretches.
bool broadcast_leading(Normalised& r, int64_t count, Reasons& reasons) {
  r.leading.clear();
  Tensor* const inputs[] = {&r.query, &r.key, &r.value};
  bool stretch = false;
  for (int64_t axis = 0; axis < count; ++axis) {
    const Tensor* widest = inputs[0];
    for (const Tensor* t : inputs)
      if (equals(widest->sym_size(axis), 1)) widest = t;
    const c10::SymInt full = widest->sym_size(axis);
    for (const Tensor* t : inputs) {
      if (equals(t->sym_size(axis), full)) continue;
      stretch = true;
      if (!equals(t->sym_size(axis), 1)) {
        reasons.add("query, key, value have sizes ", r.query.sym_size(axis), ", ", r.key.sym_size(axis), ", ",
                    r.value.sym_size(axis), " on batch axis ", axis, "; give equal sizes or 1");
        return false;
      }
    }
    r.leading.push_back(full);
  }
  if (stretch) {
    for (Tensor* t : inputs) {
      c10::SymDimVector sizes(r.leading);
      for (int64_t axis = count; axis < t->dim(); ++axis) sizes.push_back(t->sym_size(axis));
      *t = t->expand_symint(sizes);
    }
  }
  return true;
}

bool flatten_inputs(Normalised& r, int64_t count, Reasons& reasons) {
  const std::pair<const char*, Tensor*> inputs[] = {{"query", &r.query}, {"key", &r.key}, {"value", &r.value}};
  bool complete = true;
  for (const auto& [name, t] : inputs) {
    if (flattens(*t, count)) {
      *t = flatten_leading(*t, count);
      continue;
    }
    complete = false;
    if (reasons.add(name, " has ", t->dim(),
                    " dimensions whose leading strides are not one batch axis; make it contiguous"))
      break;
  }
  return complete;
}

// `mask` with broadcast axes of size 1, and axes of size 1 put before it. One view in eager mode; a graph gets the
// plain ones, which a compiler understands better.
Tensor view_mask(const Normalised& r, const Tensor& mask, int64_t rank, bool traced, bool wrapped) {
  // The gradient of an axis of size n has n rows. Inside torch.func an outer transform may want it, which is not seen here.
  if (mask.requires_grad() || (wrapped && mask.is_floating_point())) return at_rank(mask, rank);
  int64_t collapsing = 0;
  for (int64_t axis = 0; axis < mask.dim(); ++axis) collapsing += collapses(r, mask, axis);
  if (collapsing == 0 && mask.dim() == rank) return mask;
  if (traced || wrapped) {
    Tensor view = mask;
    for (int64_t axis = 0; axis < mask.dim(); ++axis)
      if (collapses(r, mask, axis)) view = view.narrow(axis, 0, 1);
    return at_rank(view, rank);
  }
  c10::DimVector sizes(rank - mask.dim(), 1), strides(rank - mask.dim(), 0);
  for (int64_t axis = 0; axis < mask.dim(); ++axis) {
    sizes.push_back(collapses(r, mask, axis) ? 1 : mask.size(axis));
    strides.push_back(mask.stride(axis));
  }
  return mask.as_strided(sizes, strides);
}

}  // namespace

bool normalise_inputs(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa, Normalised& r,
                      Reasons& reasons) {
  const int64_t rank = query.dim();
  if (rank < 2 || key.dim() != rank || value.dim() != rank) {
    reasons.add("query, key, value have ", rank, ", ", key.dim(), ", ", value.dim(),
                " dimensions; give the same number, 2 or more");
    return false;
  }
  r.rank = rank;
  r.query = at_rank(query, 4);
  r.key = at_rank(key, 4);
  r.value = at_rank(value, 4);
  const int64_t leading = std::max<int64_t>(rank - 3, 1);
  if (!broadcast_leading(r, leading, reasons)) return false;
  if (leading > 1 && !flatten_inputs(r, leading, reasons)) return false;
  const auto &heads_q = r.query.sym_sizes()[1], &heads_kv = r.key.sym_sizes()[1];
  if (!enable_gqa && !equals(heads_q, heads_kv) && !equals(heads_kv, 1)) {
    reasons.add("query has ", heads_q, " heads, key ", heads_kv,
                "; without enable_gqa give equal counts, or one key and value head");
    if (!reasons.collecting()) return false;
  }
  return true;
}

bool normalise_mask(const OptTensor& attn_mask, bool traced, bool wrapped, Normalised& r, Reasons& reasons) {
  if (!given(attn_mask)) return true;
  if (attn_mask->dim() > r.rank) {
    reasons.add("attn_mask has ", attn_mask->dim(), " dimensions, query ", r.rank, "; give at most the query's");
    return false;
  }
  const int64_t leading = r.rank - 3;
  Tensor mask = view_mask(r, *attn_mask, std::max<int64_t>(r.rank, 4), traced, wrapped);
  if (leading > 1) {
    bool broadcast = true, full = true;
    for (int64_t axis = 0; axis < leading; ++axis) {
      broadcast = broadcast && equals(mask.sym_size(axis), 1);
      full = full && equals(mask.sym_size(axis), r.leading[axis]);
    }
    if (!broadcast && !(full && flattens(mask, leading))) {
      reasons.add("attn_mask broadcasts over some of the ", leading,
                  " batch axes; flashsdpa takes masks that have all of them as one axis in memory, or none");
      return false;
    }
    mask = flatten_leading(mask, leading);
  }
  r.attn_mask = std::move(mask);
  return true;
}

Tensor restore_rank(const Tensor& out, const Normalised& from) {
  if (from.rank == 4) return out;
  if (from.rank == 3) return out.squeeze(0);
  if (from.rank == 2) return out.squeeze(0).squeeze(0);
  c10::SymDimVector sizes(from.leading);
  for (int64_t axis = 1; axis < 4; ++axis) sizes.push_back(out.sym_size(axis));
  return out.view_symint(sizes);
}

}  // namespace flashsdpa
