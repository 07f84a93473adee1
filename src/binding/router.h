// F.scaled_dot_product_attention, intercepted in torch's dispatcher.
#pragma once

#include "call.h"
#include "report.h"
#include "selection.h"

namespace flashsdpa {

// Replaces torch's kernel of aten::scaled_dot_product_attention while installed (ops.cpp).
void install_router();
void remove_router();
bool router_installed();

// That kernel: ours where it serves, else torch's own function.
Tensor route(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask, double dropout_p,
             bool is_causal, std::optional<double> scale, bool enable_gqa);

// Asked for tensors with the Python dispatch key (fake and functional tensors, subclasses), and those that torch.func has
// wrapped: the selection that holds for the trace, and whether there is one; with stock, why, if there is a reason beside the
// selection. The answer is final about torch's own backend settings too.
using Hook = Selection (*)(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& attn_mask,
                           double dropout_p, bool* traced, std::string* reason);
void set_hook(Hook hook);

// The arguments of SDPA.
struct Request {
  const Tensor& query;
  const Tensor& key;
  const Tensor& value;
  const OptTensor& attn_mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};

// Whether the router plans the mask of a call (4-D) on `device` once for all passes: a plan pays when a granule can be skipped,
// where the scores of one head are more than one granule.
bool worth_planning(const Tensor& query, const Tensor& key, const Tensor& mask, const at::Device& device);

// What the router would do under `selection`; runs no kernel.
Explanation explain(const Request& request, const Selection& selection);

}  // namespace flashsdpa
