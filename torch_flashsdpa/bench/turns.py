"""What the profile and the plot of speed against length share: implementations timed in turns, and checked on sampled rows."""

import math
import time

import torch
import torch.nn.functional as F

from . import formula

SAMPLE_SECONDS = 0.003  # short calls are timed in batches of about this length
FEWEST, MOST = 3, 15  # samples of each implementation
CHECKED_HEADS, CHECKED_ROWS = 8, 256


def run(arguments, grad_out):
    """F.scaled_dot_product_attention(**arguments), and its backward where grad_out is given. Returns the output."""
    with torch.set_grad_enabled(grad_out is not None):
        out = F.scaled_dot_product_attention(**arguments)
    return with_backward(out, arguments, grad_out)


def with_backward(out, arguments, grad_out):
    """`out`, once the gradients of the arguments that require them have been computed, where grad_out is given."""
    if grad_out is not None:
        wanted = [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.grad(out, wanted, grad_out)
    return out


def wait(device):
    """Until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call, device, repeats):
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - start) / repeats


def time_in_turns(calls, device, seconds):
    """{name: [seconds of one call]} for calls {name: (context, function)}, in about `seconds` each, three samples at least.
    They take turns, and turns in going first; context() is entered once for a sample."""
    repeats, slowest = {}, 0.0
    for name, (context, call) in calls.items():
        with context():
            once = _seconds(call, device, 1)
        repeats[name] = max(1, math.ceil(SAMPLE_SECONDS / max(once, 1e-7)))
        slowest = max(slowest, once * repeats[name])
    count = min(max(FEWEST, int(seconds / slowest)), MOST)
    samples = {name: [] for name in calls}
    for turn in range(count):
        for name in sorted(calls, reverse=bool(turn % 2)):
            context, call = calls[name]
            with context():
                samples[name].append(_seconds(call, device, repeats[name]))
    return samples


def sampled_errors(outs, arguments):
    """{name: largest absolute error of outs[name] against float64} over at most 8 pairs of batch and head, 256 rows of each."""
    query, key, value, mask = (arguments[name] for name in ("query", "key", "value", "attn_mask"))
    *lead, seq_q, _ = query.shape
    if 0 in (*query.shape, *key.shape, *value.shape):
        return dict.fromkeys(outs, 0.0)
    if len(lead) > 1 and key.shape[-3] != lead[-1]:
        key, value = (t.repeat_interleave(lead[-1] // t.shape[-3], -3) for t in (key.detach(), value.detach()))
    key, value = (t.expand(*lead, *t.shape[-2:]) for t in (key, value))
    rows = torch.linspace(0, seq_q - 1, min(seq_q, CHECKED_ROWS), device=query.device).round().long()
    if arguments["is_causal"]:
        mask = torch.arange(key.shape[-2], device=key.device) <= torch.arange(seq_q, device=key.device)[:, None]
    allowed = None if mask is None else mask.detach().expand(*lead, seq_q, key.shape[-2])
    pairs = torch.linspace(0, math.prod(lead) - 1, min(math.prod(lead), CHECKED_HEADS)).round().long().tolist()
    worst = dict.fromkeys(outs, 0.0)
    for pair in pairs:
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(pair), lead)) if lead else ()
        part = None if allowed is None else allowed[at][rows]
        inputs = (t.detach().double() for t in (query[at][rows], key[at], value[at]))
        exact = formula.attention(*inputs, attn_mask=part, scale=arguments["scale"])
        for name, out in outs.items():
            worst[name] = max(worst[name], (out[at][rows].double() - exact).abs().max().item())
    return worst
