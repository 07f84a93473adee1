"""Each distinct call once more, alone: stock and ours timed in turns on fresh inputs, and both checked against float64."""

import math
import statistics
import time
from dataclasses import dataclass

import torch

from ..bench.measure import IMPLEMENTATIONS, kernels
from ..bench.turns import run, sampled_errors, time_in_turns, wait


@dataclass
class Timing:
    """Seconds of one call (and its backward), median; the largest absolute error of the output; kernels by their names.

    `ours` is None where our kernels refuse the call, an error None where dropout makes the output random.
    """

    stock: float
    ours: float | None
    stock_error: float | None
    our_error: float | None
    stock_kernel: str
    our_kernel: str


def fresh(layout, device):
    """Random normal values with the sizes, strides, dtype and need for a gradient of `layout`."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride)) if 0 not in layout.shape else 0
    data = torch.randn(span, device=device).to(layout.dtype)
    return data.as_strided(layout.shape, layout.stride).requires_grad_(layout.requires_grad)


def inputs_of(call, mask):
    """The arguments of F.scaled_dot_product_attention. The mask has the values of the program's own."""
    names = ("query", "key", "value")
    arguments = {name: fresh(getattr(call, name), call.device) for name in names}
    if mask is not None:
        mask = mask.detach().requires_grad_(call.mask.requires_grad)
    return arguments | {"attn_mask": mask, "is_causal": call.is_causal, "scale": call.scale, "dropout_p": call.dropout_p,
                        "enable_gqa": call.gqa}  # fmt: skip


def replay(call, mask, seconds):
    """A Timing of the call, in about `seconds` for each implementation (three samples at least). The kernels' warm-up and the
    making of inputs are not timed; the backward is, where the program's call needed a gradient."""
    arguments = inputs_of(call, mask)
    grad_out = None
    if call.needs_grad and any(isinstance(t, torch.Tensor) and t.requires_grad for t in arguments.values()):
        out = run(arguments, None)
        grad_out = torch.randn_like(out)
    ours, backend = kernels(arguments, None)
    chosen = {name: context for name, context in IMPLEMENTATIONS.items() if ours or name == "stock"}
    outs = {}
    for name, context in chosen.items():
        with context():
            outs[name] = run(arguments, grad_out).detach()
    calls = {name: (context, lambda: run(arguments, grad_out)) for name, context in chosen.items()}
    samples = time_in_turns(calls, arguments["query"].device, seconds)
    times = {name: statistics.median(each) for name, each in samples.items()}
    errors = {} if call.dropout_p else sampled_errors(outs, arguments)
    forward = [name for name in ours if "plan" not in name]
    return Timing(
        times["stock"], times.get("flashsdpa"), errors.get("stock"), errors.get("flashsdpa"), backend, ", ".join(forward)
    )


def flop(call, mask):
    """4 per (query, key) pair that takes part and head dim (the mean of D and Dv), forward; 3.5 times that with the backward."""
    if not (call.query and call.key and call.value):
        return None
    *lead, seq_q, dim = call.query.shape
    seq_k, dim_v = call.key.shape[-2], call.value.shape[-1]
    pairs = float(seq_q * seq_k)
    if call.is_causal:
        pairs = float((torch.arange(seq_q).clamp(max=seq_k - 1) + 1).sum())
    elif mask is not None:
        kept = mask if mask.dtype == torch.bool else mask != -torch.inf
        pairs *= kept.float().mean().item() if kept.numel() else 0.0
    return 2.0 * math.prod(lead) * pairs * (dim + dim_v) * (3.5 if call.needs_grad else 1.0)


def peak_flops(dtype, device):
    """FLOP/s of a matrix product here and now, the best of several: 2 n^3 for n = 1024 (CPU) or 8192 (GPU)."""
    device = torch.device(device)
    n = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        a @ b
        wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
