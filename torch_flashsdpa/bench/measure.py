"""Checking and measuring one case. A wrong kernel has no time: the check comes first, on the inputs that are timed."""

import collections
import contextlib
import ctypes
import math
import re
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import profiler, selection
from .._loader import binding
from . import formula


@contextlib.contextmanager
def stock():
    """Stock PyTorch without a trace of ours: the router is taken out of the dispatcher, so that it costs nothing."""
    _C = binding()
    had_router = _C.router_installed()
    _C.remove_router()
    try:
        yield
    finally:
        if had_router:
            _C.install_router()


def ours():
    return selection.sdpa_backend("flashsdpa")


IMPLEMENTATIONS = {"stock": stock, "flashsdpa": ours}


def run_once(inputs, grad_out):
    """(out, grads) of one call; grads is empty where grad_out is None, and nothing is recorded for autograd then."""
    if grad_out is None:
        with torch.no_grad():
            return F.scaled_dot_product_attention(**inputs), ()
    out = F.scaled_dot_product_attention(**inputs)
    return out, torch.autograd.grad(out, (inputs["query"], inputs["key"], inputs["value"]), grad_out)


def _dropout_factor(inputs):
    """(batch, heads, seq_q, seq_k): by what ours multiplies each weight under the seed 0, read off equal scores and unit vectors
    for values; None without dropout."""
    if not inputs["dropout_p"]:
        return None
    query, keys = inputs["query"], inputs["key"].shape[-2]
    zeros = {name: torch.zeros_like(inputs[name], requires_grad=False) for name in ("query", "key")}
    parts = []
    for start in range(0, keys, 256):
        units = torch.eye(keys, dtype=query.dtype)[:, start : start + 256].expand(*inputs["key"].shape[:2], -1, -1)
        torch.manual_seed(0)
        with ours():
            parts.append(run_once({**inputs, **zeros, "value": units, "attn_mask": None, "is_causal": False}, None)[0])
    kept = torch.cat(parts, -1) != 0
    return kept.double() / (1 - round(inputs["dropout_p"] * 2**16) / 2**16)


def _slices(inputs, grad_out, factor=None):
    """The call cut into one batch entry and one key head each, so that the reference's scores fit in memory."""
    query, key, mask = inputs["query"], inputs["key"], inputs["attn_mask"]
    group = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(key.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            part = {
                "query": query[batch, heads],
                "key": key[batch, head : head + 1].expand(group, -1, -1),
                "value": inputs["value"][batch, head : head + 1].expand(group, -1, -1),
                "attn_mask": mask if mask is None or mask.dim() < 3 else mask[min(batch, mask.shape[0] - 1)],
                "is_causal": inputs["is_causal"],
                "factor": None if factor is None else factor[batch, heads],
            }
            yield (batch, heads, head), part, None if grad_out is None else grad_out[batch, heads]


def _math_path(factor, **part):
    if factor is not None:  # torch's own path drops other weights
        return formula.attention(**part, factor=factor)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(**part)


def _evaluate(function, inputs, grad_out, dtype, factor):
    """out and gradients of `function` over all slices, computed in `dtype`, returned in float64."""
    names = ("query", "key", "value")
    grads = [torch.zeros_like(inputs[name], dtype=torch.float64) for name in names] if grad_out is not None else []
    query = inputs["query"]
    out = torch.empty(*query.shape[:-1], inputs["value"].shape[-1], dtype=torch.float64)
    for (batch, heads, head), part, part_grad in _slices(inputs, grad_out, factor):
        for name in names:
            part[name] = part[name].detach().to(dtype).requires_grad_(grad_out is not None)
        result = function(**part)
        out[batch, heads] = result.detach().double()
        if grad_out is not None:
            d_query, *d_rest = torch.autograd.grad(result, [part[name] for name in names], part_grad.to(dtype))
            grads[0][batch, heads] = d_query.double()
            for total, grad in zip(grads[1:], d_rest):
                total[batch, head] = grad.double().sum(0)
    return [out, *grads]


def _poison(inputs):
    """Leave NaN in freed memory of the sizes that the call is going to ask for."""
    for name in ("query", "key", "value"):
        for _ in range(4):
            torch.full_like(inputs[name], torch.nan, requires_grad=False)


def check(inputs, grad_out):
    """The largest error of our result against float64. Raises AssertionError beyond the rule: twice the error of
    PyTorch's math path in the same dtype plus one rounding step of that dtype (gradients: four, since the backward
    makes its weights from a rounded log-sum-exp), float64 a relative 1e-12, inf and nan in the same places."""
    dtype = inputs["query"].dtype
    factor = _dropout_factor(inputs)
    reference = _evaluate(formula.attention, inputs, grad_out, torch.float64, factor)
    with stock():
        yardstick = _evaluate(_math_path, inputs, grad_out, dtype, factor)
    _poison(inputs)
    torch.manual_seed(0)
    with ours():
        out, grads = run_once(inputs, grad_out)
    worst = 0.0
    for name, exact, plain, got in zip(("out", "grad query", "grad key", "grad value"), reference, yardstick, (out, *grads)):
        got = got.detach().double()
        if not torch.equal(got.isfinite(), exact.isfinite()):
            raise AssertionError(f"{name} has inf or nan where the float64 reference has none, or the reverse")
        error = (got - exact).abs().max().item()
        rounding = torch.finfo(dtype).eps * exact.abs().max().item()
        limit = 2 * (plain - exact).abs().max().item() + rounding * (1 if name == "out" else 4)
        if dtype == torch.float64:  # the reference itself has no digits to spare
            limit = 1e-12 * exact.abs().max().item()
        if not error <= limit:
            raise AssertionError(f"{name} is off by {error:.3g}; allowed {limit:.3g}")
        worst = max(worst, error)
    return worst


_BACKEND = re.compile(r"aten::_scaled_dot_product_(?:attention_)?(\w+)")


def backends(profile):
    """Which backends stock's calls took in a finished torch.profiler.profile, by their operators: a Counter such as
    {"cudnn_attention": 16}."""
    found = (_BACKEND.fullmatch(event.name) for event in profile.events())
    return collections.Counter(match[1] for match in found if match and "backward" not in match[1])


def kernels(inputs, grad_out):
    """(our kernels, stock's backend) for the case, as the profiler saw them."""
    with ours(), profiler.kernels_run() as mine:
        run_once(inputs, grad_out)
    with stock(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run_once(inputs, grad_out)
    return sorted(mine), ", ".join(sorted(backends(recorded)))


def _seconds(inputs, grad_out, calls):
    start = time.perf_counter()
    for _ in range(calls):
        run_once(inputs, grad_out)
    return (time.perf_counter() - start) / calls


SAMPLE_SECONDS = 0.005  # short calls are timed in batches of about this length


def time_pairs(inputs, grad_out, pairs):
    """{implementation: [seconds per call] * pairs}; the two take turns, and turns in going first."""
    calls = {}
    for name, implementation in IMPLEMENTATIONS.items():
        with implementation():
            once = _seconds(inputs, grad_out, 1)  # also the warm-up
            if once < SAMPLE_SECONDS:
                once = _seconds(inputs, grad_out, 3)
            calls[name] = max(1, math.ceil(SAMPLE_SECONDS / once))
    times = {name: [] for name in IMPLEMENTATIONS}
    for pair in range(pairs):
        for name in sorted(IMPLEMENTATIONS, reverse=bool(pair % 2)):
            with IMPLEMENTATIONS[name]():
                times[name].append(_seconds(inputs, grad_out, calls[name]))
    return times


def ratio_with_bound(times):
    """(median, lower 95 % bound of the median) of stock's time over ours, over the pairs: above 1, ours is faster."""
    ratios = sorted(a / b for a, b in zip(times["stock"], times["flashsdpa"]))
    count = len(ratios)
    rank = int(count / 2 - 0.823 * math.sqrt(count))  # binomial order statistic, one-sided 95 %
    return statistics.median(ratios), ratios[max(rank, 0)]


def _status_mib(field):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", text)[1]) / 1024


def peak_mib(run):
    """How far the process's resident memory rises above its start while run() works, in MiB; None where Linux's counter
    cannot be reset. Counts everything, our scratch and torch's, outputs included."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # free memory kept by the allocator would hide what the call asks for
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_mib("VmRSS")
        result = run()  # kept alive, so that outputs count
        peak = _status_mib("VmHWM") - before
        del result
        return max(peak, 0.0)
    except (OSError, AttributeError, TypeError):
        return None


def read_bandwidth():
    """Readable memory bandwidth in GB/s with the threads in force: the best of several reductions over 512 MiB."""
    data = torch.ones(512 << 18)
    best = math.inf
    for _ in range(5):
        for reduce in (torch.sum, torch.amax):
            start = time.perf_counter()
            reduce(data)
            best = min(best, time.perf_counter() - start)
    return data.numel() * data.element_size() / best / 1e9


def measure(case, pairs):
    """The two rows of a case, stock's and ours, as benchmarks/results keeps them. Failures are rows too: no time, and
    the reason in `note`."""
    torch.manual_seed(0)
    inputs = case.make()
    grad_out = torch.randn(*inputs["query"].shape).to(inputs["query"].dtype) if case.grad else None
    row = {
        "group": "cpu",
        "section": case.section,
        "case": case.name,
        "dtype": case.dtype,
        "pass": case.pass_name,
        "shape": {
            "batch": case.batch, "heads": case.heads, "heads_kv": case.heads_kv,
            "seq_q": case.seq_q, "seq_k": case.seq_k, "dim": case.dim, "kind": case.kind,
        },
    }  # fmt: skip
    mine, backend = kernels(inputs, grad_out)
    notes = {"stock": backend, "flashsdpa": ", ".join(mine)}
    forward = [name for name in mine if name.startswith(("flashsdpa_fwd", "flashsdpa_decode"))]
    if not forward:
        return [row | {"impl": "flashsdpa", "note": "failed: none of our kernels ran"}]
    row["isa"] = next(entry["isa"] for entry in binding().kernel_table() if entry["name"] == forward[0])
    try:
        error = check(inputs, grad_out)
    except AssertionError as wrong:
        return [row | {"impl": "flashsdpa", "note": f"failed: {wrong}"}]
    times = time_pairs(inputs, grad_out, case.pairs or pairs)
    ratio, bound = ratio_with_bound(times)
    rows = []
    for name, implementation in IMPLEMENTATIONS.items():
        seconds = statistics.median(times[name])
        with implementation():
            peak = peak_mib(lambda: run_once(inputs, grad_out))
        entry = row | {"impl": name, "ms": seconds * 1e3, "peak_mib": peak, "note": notes[name]}
        if case.section == "decode":
            entry["gbps"] = case.bytes_read() / seconds / 1e9
        else:
            entry["tflops"] = case.flop() / seconds / 1e12
        if name == "flashsdpa":
            entry |= {"error": error, "ratio": ratio, "ratio_low": bound, "pairs": len(times[name])}
        rows.append(entry)
    return rows
