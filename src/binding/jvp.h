// Derivatives of forward and backward along given directions, by ATen.
#pragma once

#include "call.h"

namespace flashsdpa {

// As flashsdpa::jvp. Made of functional ATen ops, so that torch can differentiate it in any mode; in_place: where it need not.
JvpResult jvp_composite(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out,
                        const Tensor& lse, const Tangents& tangents, std::array<bool, 7> output_mask, bool in_place = false);

}  // namespace flashsdpa
