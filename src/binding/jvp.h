// Derivatives of forward and backward along given directions, by ATen.
#pragma once

#include <functional>

#include "call.h"

namespace flashsdpa {

// As flashsdpa::jvp. Made of functional ATen ops, so that torch can differentiate it in any mode; in_place: where it need not.
JvpResult jvp_composite(const OptTensor& grad_out, const OptTensor& grad_lse, const Call& call, const Tensor& out,
                        const Tensor& lse, const Tangents& tangents, std::array<bool, 7> output_mask, bool in_place = false);

// Runs a function without Python's lock, if this thread holds it. The derivative of jvp starts torch's engine, which refuses to
// be started with it, and compiled autograd calls the node from Python. Given by _C, which alone knows Python.
using GilReleaser = void (*)(const std::function<void()>& f);
void set_gil_releaser(GilReleaser releaser);

}  // namespace flashsdpa
