#include "auto_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "refused_calls.h"

namespace flashsdpa {

namespace {

constexpr int64_t kLarge = int64_t{1} << 20;

using Point = std::array<float, 3>;  // log2 of dim, seq_q, seq_k

struct Entry {
  Point at;
  AutoRow row;
};

using Table = std::unordered_map<uint32_t, std::vector<Entry>>;

// Replaced as a whole and never freed: readers take no lock, and a table is set once or twice in a process.
std::atomic<const Table*> table{nullptr};

uint32_t key(Isa isa, DType dtype, MaskKind kind, bool grad) {
  return static_cast<uint32_t>(isa) << 16 | static_cast<uint32_t>(dtype) << 8 | static_cast<uint32_t>(kind) << 1 |
         static_cast<uint32_t>(grad);
}

float log2_of(int64_t n) { return std::log2(static_cast<float>(std::max<int64_t>(n, 1))); }

float distance(const Point& a, const Point& b) {
  float sum = 0;
  for (int i = 0; i < 3; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

}  // namespace

const char* mask_kind_name(MaskKind kind) {
  switch (kind) {
    case MaskKind::kFull: return "full";
    case MaskKind::kCausalOnly: return "causal";
    case MaskKind::kMask: return "mask";
    case MaskKind::kBias: return "bias";
    case MaskKind::kDropout: return "dropout";
  }
  return "";
}

void set_auto_table(const std::vector<AutoRow>& rows) {
  auto* fresh = new Table;
  for (const AutoRow& row : rows)
    (*fresh)[key(row.isa, row.dtype, row.kind, row.grad)].push_back(
        {{log2_of(row.dim), log2_of(row.seq_q), log2_of(row.seq_k)}, row});
  table.store(fresh, std::memory_order_release);
  forget_refused_calls();
}

void check_auto(const Call& call, Reasons& reasons) {
  const KernelEntry* entry = forward_entry(call);
  if (entry == nullptr) return;  // already refused for that
  const auto& mask = call.options.attn_mask;
  const MaskKind kind = call.options.dropout_p > 0.0 ? MaskKind::kDropout
                        : given(mask) ? (mask->scalar_type() == at::kBool ? MaskKind::kMask : MaskKind::kBias)
                        : call.options.is_causal ? MaskKind::kCausalOnly
                                                 : MaskKind::kFull;
  const bool grad = needs_grad(call);
  const auto type = call.query.scalar_type();
  const Table* rows = table.load(std::memory_order_acquire);
  const Table::mapped_type* candidates = nullptr;
  const auto find = [&](MaskKind recorded) {
    if (rows == nullptr || candidates != nullptr) return;
    const auto found = rows->find(key(entry->isa, *to_dtype(type), recorded, grad));
    if (found != rows->end()) candidates = &found->second;
  };
  find(kind);
  if (kind == MaskKind::kBias) find(MaskKind::kMask);  // where additive masks were not measured by themselves
  const char* pass = grad ? "forward and backward" : "forward";
  if (candidates == nullptr) {
    reasons.add("auto: no recorded run for ", isa_name(entry->isa), " ", dtype_name(type), " ", mask_kind_name(kind),
                " ", pass);
    return;
  }
  const auto size = [](const Tensor& t, int axis) {
    return log2_of(t.sym_sizes()[axis].maybe_as_int().value_or(kLarge));
  };
  const Point here{size(call.query, 3), size(call.query, 2), size(call.key, 2)};
  const auto nearest = std::min_element(candidates->begin(), candidates->end(), [&](const Entry& a, const Entry& b) {
    return distance(a.at, here) < distance(b.at, here);
  });
  if (nearest->row.ratio < 1.0)
    reasons.add("auto: stock was faster in the nearest recorded run (", pass, ", ", isa_name(entry->isa), " ",
                dtype_name(type), " ", mask_kind_name(kind), " D", nearest->row.dim, " Sq", nearest->row.seq_q, " Sk",
                nearest->row.seq_k, ": ours ran at ", nearest->row.ratio, " of its speed)");
}

}  // namespace flashsdpa
