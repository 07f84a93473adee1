"""Whether a step computes what it should: outputs or loss and gradients, each against the same step in a wider dtype."""

import copy
import math
from dataclasses import dataclass

import torch

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
NO_GRADIENT = 1e-3  # share of the gradients' root mean square under which a parameter's gradient is taken to be 0


@dataclass
class Outcome:
    """Of one step: the outputs, or the loss and {parameter: gradient}."""

    result: torch.Tensor
    gradients: dict


def outcome(case, module, inputs):
    module.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(case.train):
        result = case.result(module, **inputs)
    if case.train:
        result.backward()
    gradients = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad(set_to_none=True)
    return Outcome(result.detach(), gradients)


def in_dtype(inputs, dtype):
    return {name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in inputs.items()}


def reference(case, module, inputs, dtype):
    """The step's outcome with the same weights and inputs in the wider dtype. In training blocks are computed twice where the
    model can do so: stock keeps every score of every layer where no fused kernel takes the wider dtype."""
    wide = copy.deepcopy(module).to(WIDER[dtype])
    if case.train and getattr(wide, "supports_gradient_checkpointing", False):
        wide.gradient_checkpointing_enable()
    return outcome(case, wide, in_dtype(inputs, WIDER[dtype]))


def relative(got, exact):
    """The norm of the difference over the norm of `exact`; not finite: inf."""
    error = ((got.to(exact.dtype) - exact).norm() / exact.norm()).item()
    return error if math.isfinite(error) else math.inf


def gradient_errors(got, exact):
    """{parameter: relative error}. Left out are gradients that are 0 but for rounding: softmax does not see the bias of keys."""
    squares = {name: gradient.square().mean().item() for name, gradient in exact.items()}
    typical = sum(squares[name] * exact[name].numel() for name in exact) / sum(g.numel() for g in exact.values())
    return {name: relative(got[name], gradient) if name in got else math.inf
            for name, gradient in exact.items() if squares[name] > NO_GRADIENT**2 * typical}  # fmt: skip


def total_error(got, exact):
    """The relative error of all gradients as one vector."""
    if got.keys() != exact.keys():
        return math.inf
    off = math.fsum((got[name].to(gradient.dtype) - gradient).square().sum().item() for name, gradient in exact.items())
    size = math.fsum(gradient.square().sum().item() for gradient in exact.values())
    return math.sqrt(off / size) if math.isfinite(off) else math.inf


@dataclass
class Errors:
    """Of an outcome: the relative error of outputs or loss, and in training that of all gradients and each parameter's."""

    result: float
    gradient: float | None
    parameters: dict


def errors(got, exact):
    result = relative(got.result, exact.result)
    if not exact.gradients:
        return Errors(result, None, {})
    return Errors(result, total_error(got.gradients, exact.gradients), gradient_errors(got.gradients, exact.gradients))


def beyond(found, stock, dtype):
    """A sentence on an error of `found` that is beyond what stock's errors allow, or None.

    Allowed are twice stock's error and four rounding steps of the dtype, but never more than the fourth root of such a step,
    beyond which stock's own result is wrong and no yardstick. Of single parameters the worst of stock's errors within that
    counts for all, and twice its own stock error for each: some are computed badly by everyone, as those of queries and keys are
    where all tokens have become alike.
    """
    eps = torch.finfo(dtype).eps
    most = eps ** (1 / 4)

    def allowed(error):
        return min(2 * error + 4 * eps, most)

    for what in ("result", "gradient"):
        error, of_stock = getattr(found, what), getattr(stock, what)
        if error is not None and not error <= allowed(of_stock):
            return f"{what} is off by {error:.3g} of its size; allowed {allowed(of_stock):.3g}"
    usual = allowed(max((error for error in stock.parameters.values() if error <= most), default=0.0))
    for name, error in found.parameters.items():
        of_stock = stock.parameters[name]
        bound = max(usual, 2 * of_stock if math.isfinite(of_stock) else 0.0)
        if not error <= bound:
            return f"gradient of {name} is off by {error:.3g} of its size; allowed {bound:.3g}"
    return None
