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
    """The step's outcome with the same weights and inputs in the wider dtype."""
    wide = copy.deepcopy(module).to(WIDER[dtype])
    return outcome(case, wide, in_dtype(inputs, WIDER[dtype]))


def relative(got, exact):
    """The norm of the difference over the norm of `exact`."""
    return ((got.to(exact.dtype) - exact).norm() / exact.norm()).item()


def worst_gradient(got, exact):
    """(relative error, parameter) of the gradient that is furthest off. Left out are those that are 0 but for rounding: softmax
    does not see the bias of keys."""
    squares = {name: gradient.square().mean().item() for name, gradient in exact.items()}
    typical = sum(squares[name] * exact[name].numel() for name in exact) / sum(g.numel() for g in exact.values())
    worst = (0.0, None)
    for name, gradient in exact.items():
        if squares[name] > NO_GRADIENT**2 * typical:
            error = relative(got[name], gradient) if name in got else math.inf
            worst = max(worst, (error if math.isfinite(error) else math.inf, name), key=lambda pair: pair[0])
    return worst


def errors(got, exact):
    """{"result": relative error of outputs or loss} and, in training, "gradient" and "worst_parameter"; not finite: inf."""
    error = relative(got.result, exact.result)
    found = {"result": error if math.isfinite(error) else math.inf}
    if exact.gradients:
        found["gradient"], found["worst_parameter"] = worst_gradient(got.gradients, exact.gradients)
    return found


def limits(stock, dtype):
    """{"result" and, in training, "gradient": what an error may be}: twice stock's and four rounding steps of the dtype, but
    never more than the fourth root of such a step, beyond which stock's own result is wrong and no yardstick."""
    eps = torch.finfo(dtype).eps
    return {name: min(2 * stock[name] + 4 * eps, eps ** (1 / 4)) for name in ("result", "gradient") if name in stock}


def beyond(found, allowed):
    """A sentence on the first error that is beyond what is allowed, or None."""
    for name, most in allowed.items():
        if not found[name] <= most:
            where = f" of {found['worst_parameter']}" if name == "gradient" else ""
            return f"{name}{where} is off by {found[name]:.3g} of its size; allowed {most:.3g}"
    return None
