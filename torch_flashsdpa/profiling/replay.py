"""Each distinct call once more, alone: stock and ours timed in turns on fresh inputs, and both checked against float64."""

import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..bench.measure import IMPLEMENTATIONS, kernels

SAMPLE_SECONDS = 0.003  # short calls are timed in batches of about this length
FEWEST, MOST = 3, 15  # samples of each implementation
CHECKED_HEADS, CHECKED_ROWS = 8, 256


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


def run(arguments, grad_out):
    """The call, and its backward where grad_out is given. Returns the output."""
    with torch.set_grad_enabled(grad_out is not None):
        out = F.scaled_dot_product_attention(**arguments)
    if grad_out is not None:
        wanted = [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.grad(out, wanted, grad_out)
    return out


def replay(call, mask, seconds):
    """A Timing of the call, in about `seconds` for each implementation (three samples at least). The kernels' warm-up and the
    making of inputs are not timed; the backward is, where the program's call needed a gradient."""
    arguments = inputs_of(call, mask)
    grad_out = None
    if call.needs_grad and any(isinstance(t, torch.Tensor) and t.requires_grad for t in arguments.values()):
        out = run(arguments, None)
        grad_out = torch.randn_like(out)
    ours, backend = kernels(arguments, None)
    names = list(IMPLEMENTATIONS) if ours else ["stock"]
    outs, times = {}, {}
    for name in names:
        with IMPLEMENTATIONS[name]():
            outs[name] = run(arguments, grad_out).detach()
    for name, samples in _time(names, arguments, grad_out, seconds).items():
        times[name] = statistics.median(samples)
    errors = {}
    if not call.dropout_p:
        errors = _errors(outs, arguments)
    forward = [name for name in ours if "plan" not in name]
    return Timing(times["stock"], times.get("flashsdpa"), errors.get("stock"), errors.get("flashsdpa"), backend, ", ".join(forward))


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(arguments, grad_out, repeats):
    device = arguments["query"].device
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run(arguments, grad_out)
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _time(names, arguments, grad_out, seconds):
    """{implementation: samples}; they take turns, and turns in going first."""
    repeats, slowest = {}, 0.0
    for name in names:
        with IMPLEMENTATIONS[name]():
            once = _seconds(arguments, grad_out, 1)
        repeats[name] = max(1, math.ceil(SAMPLE_SECONDS / max(once, 1e-7)))
        slowest = max(slowest, once * repeats[name])
    count = min(max(FEWEST, int(seconds / slowest)), MOST)
    samples = {name: [] for name in names}
    for turn in range(count):
        for name in sorted(names, reverse=bool(turn % 2)):
            with IMPLEMENTATIONS[name]():
                samples[name].append(_seconds(arguments, grad_out, repeats[name]))
    return samples


def _errors(outs, arguments):
    """{implementation: largest absolute error against float64} over at most 8 pairs of batch and head, 256 rows of each."""
    query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    *lead, seq_q, dim = query.shape
    seq_k = key.shape[-2]
    if 0 in (*query.shape, *key.shape, *value.shape):
        return dict.fromkeys(outs, 0.0)
    if len(lead) > 1 and key.shape[-3] != lead[-1]:
        key, value = (t.repeat_interleave(lead[-1] // t.shape[-3], -3) for t in (key.detach(), value.detach()))
    key, value = (t.expand(*lead, *t.shape[-2:]) for t in (key, value))
    rows = torch.linspace(0, seq_q - 1, min(seq_q, CHECKED_ROWS), device=query.device).round().long()
    allowed = None if mask is None else mask.detach().expand(*lead, seq_q, seq_k)
    scale = dim**-0.5 if arguments["scale"] is None else arguments["scale"]
    pairs = torch.linspace(0, math.prod(lead) - 1, min(math.prod(lead), CHECKED_HEADS)).round().long().tolist()
    worst = dict.fromkeys(outs, 0.0)
    for pair in pairs:
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(pair), lead)) if lead else ()
        part = None if allowed is None else allowed[at][rows]
        exact = _formula(query[at][rows], key[at], value[at], part, rows if arguments["is_causal"] else None, scale)
        for name, out in outs.items():
            worst[name] = max(worst[name], (out[at][rows].double() - exact).abs().max().item())
    return worst


def _formula(query, key, value, mask, causal_rows, scale):
    """SDPA's documented formula in float64 for some rows: query (rows, dim), key (seq_k, dim), value (seq_k, dim_v)."""
    query, key, value = (t.detach().double() for t in (query, key, value))
    scores = query @ key.mT * scale
    if causal_rows is not None:
        mask = torch.arange(key.shape[0], device=key.device) <= causal_rows[:, None]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value


def flop(call, mask):
    """4 per (query, key) pair that takes part and head dim in the mean of D and Dv, forward; 3.5 times that with the backward."""
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
        _wait(device)
        start = time.perf_counter()
        a @ b
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
