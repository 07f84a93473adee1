#include "report.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include "dropout.h"
#include "execute.h"
#include "layout.h"
#include "router.h"

namespace flashsdpa {

const char* pass_name(Pass pass) {
  switch (pass) {
    case Pass::kForward: return "forward";
    case Pass::kBackward: return "backward";
    case Pass::kDecode: return "decode";
    case Pass::kMaskPlan: return "mask_plan";
  }
  return "";
}

bool entry_available(const KernelEntry& entry) {
  return entry.device == flashsdpa::Device::kCuda ? at::globalContext().hasCUDA() : isa_available(entry.isa);
}

void observe_launch(const char* op, const KernelEntry& entry, const Call& call) {
  if (const auto notify = observer.load()) notify({"launch", op, entry.name, call, {}, "flashsdpa", "eager"});
}

std::string mask_text(const OptTensor& mask) {
  if (!given(mask)) return "";
  return shape_text(mask->sym_sizes()) + " " + dtype_name(mask->scalar_type());
}

std::vector<Candidate> candidates(const Call& call, const KernelEntry* chosen) {
  std::vector<Candidate> list;
  const bool cuda = call.device.is_cuda();
  // The entries look at sizes, which a refused call need not have.
  bool shaped = true;
  for (const Tensor* t : {&call.query, &call.key, &call.value}) shaped = shaped && is_dense(*t) && t->dim() == 4;
  int count = 0;
  const KernelEntry* table = kernel_table(&count);
  for (int i = 0; i < count; ++i) {
    const KernelEntry& entry = table[i];
    if ((entry.device == flashsdpa::Device::kCuda) != cuda || entry.pass == Pass::kMaskPlan) continue;
    Candidate candidate{entry.name, pass_name(entry.pass), {}};
    Reasons reasons(&candidate.reasons);
    const bool backward = entry.pass == Pass::kBackward;
    const KernelEntry* winner = backward ? backward_entry(call) : chosen;
    if (&entry != chosen && !entry_available(entry))
      reasons.add(isa_name(entry.isa), " is not available on this machine");
    if (shaped) check_entry(entry, call, backward && needs_mask_grad(call), reasons);
    if (backward && !needs_grad(call)) reasons.add("no gradient is needed");
    if (reasons.ok() && chosen == nullptr) reasons.add("the call goes to stock");
    if (reasons.ok() && winner != &entry) {
      if (entry.pass == Pass::kDecode) reasons.add("decoding kernels serve few query rows for each key head");
      reasons.add(winner->name, " comes first");
    }
    list.push_back(std::move(candidate));
  }
  return list;
}

void describe(const KernelEntry& entry, const Call& call, Explanation& explanation) {
  explanation.chosen = entry.name;
  auto& config = explanation.config;
  config.emplace_back("pass", pass_name(entry.pass));
  config.emplace_back("isa", isa_name(entry.isa));
  const auto detail = detail_of(entry, call);
  config.emplace_back("block_m", std::to_string(detail ? detail->block_m : entry.block_m));
  config.emplace_back("block_n", std::to_string(detail ? detail->block_n : entry.block_n));
  config.emplace_back("schedule", detail && detail->schedule != nullptr ? detail->schedule : entry.schedule);
  if (detail) {
    if (detail->kernel != nullptr) config.emplace_back("in the profiler", detail->kernel);
    if (detail->stages > 0) config.emplace_back("stages", std::to_string(detail->stages) + " of K and of V");
    config.emplace_back("order", detail->order);
    if (detail->packed_heads > 1)
      config.emplace_back("packed", std::to_string(detail->packed_heads) + " query heads of a group in each tile");
    if (detail->key_splits > 1)
      config.emplace_back("key_splits", std::to_string(detail->key_splits) + ", summed by flashsdpa_fwd_combine_sm90");
    std::string by_tma, plainly;
    const char* names[] = {"query", "key", "value", "output"};
    for (int i = 0; i < 4 && detail->uses_tma; ++i) {
      std::string& list = detail->tma[i] ? by_tma : plainly;
      list += (list.empty() ? "" : ", ") + std::string(names[i]);
    }
    if (!by_tma.empty()) config.emplace_back("by TMA", by_tma);
    if (!plainly.empty()) config.emplace_back("not by TMA", plainly + " (alignment or strides)");
  }
  if (const double p = call.options.dropout_p; p > 0.0)
    config.emplace_back("dropout", to_text(double(kDropoutOne - dropout_kept(p)) / kDropoutOne) + ", a multiple of 2^-16");
  if (call.device.is_cpu()) config.emplace_back("threads", std::to_string(at::get_num_threads()));
  if (needs_grad(call))
    if (const auto* backward = backward_entry(call)) config.emplace_back("backward", backward->name);
  if (given(call.options.attn_mask)) {
    config.emplace_back("mask", mask_text(call.options.attn_mask));
    const Tensor& mask = *call.options.attn_mask;
    const bool planned = worth_planning(call.query, call.key, mask, call.device) || needs_plan(entry, call);
    const auto shape = plan_shape<c10::SymInt>(mask.sym_sizes());
    config.emplace_back("mask_plan", planned ? shape_text(shape) + " int32, granules of 64 x 64"
                                             : "none, as there is one granule: the mask is read as it is");
  }
  const std::pair<const char*, const Tensor*> inputs[] = {
      {"query", &call.query}, {"key", &call.key}, {"value", &call.value}};
  for (const auto& [name, t] : inputs)
    if (!equals(t->sym_size(3), 1) && !equals(t->sym_stride(3), 1)) explanation.copies.emplace_back(name);
}

}  // namespace flashsdpa
