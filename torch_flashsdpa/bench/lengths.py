"""Speed against length, ours beside every rival that is on this machine: `python -m torch_flashsdpa bench --grid length`."""

import contextlib
import functools
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import measure
from .cases import DTYPES, Case
from .turns import run, sampled_errors, time_in_turns, wait, with_backward

MASKS = ("full", "causal", "causal bool", "half padded", "sliding 256")
TITLES = {"full": "no mask", "causal": "is_causal", "causal bool": "causal, as a bool mask",
          "half padded": "half of the keys padded", "sliding 256": "window of 256, as a bool mask"}  # fmt: skip
BACKENDS = {"cpu": {"math": SDPBackend.MATH},
            "cuda": {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
                     "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}}  # fmt: skip


def cases(device, longest, grad):
    """{(dtype, mask): [Case]} of lengths 128, 256, ... up to `longest`; on a GPU with 16384 tokens in each."""
    dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16",)
    lengths = [128 << i for i in range(20) if 128 << i <= longest]
    heads, batch = (8, lambda n: 1) if device == "cpu" else (16, lambda n: max(1, 16384 // n))
    dim = 64 if device == "cpu" else 128
    return {(dtype, mask): [Case("length", n, n, dim, dtype, batch(n), heads, heads, mask, grad) for n in lengths]
            for dtype in dtypes for mask in MASKS}  # fmt: skip


@contextlib.contextmanager
def _stock(backend):
    with measure.stock(), sdpa_kernel(backend):
        yield


@functools.cache
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex_mask(case, device):
    """The structure of the case as FlexAttention wants it, made outside of the timing."""
    from torch.nn.attention.flex_attention import create_block_mask

    half = case.seq_k // 2
    kept = {"causal": lambda b, h, q, k: k <= q, "causal bool": lambda b, h, q, k: k <= q,
            "half padded": lambda b, h, q, k: k < half, "sliding 256": lambda b, h, q, k: (k <= q) & (q - k < 256)}  # fmt: skip
    return create_block_mask(kept[case.mask], None, None, case.seq_q, case.seq_k, device=device) if case.mask in kept else None


def rivals(case, arguments, grad_out, flex):
    """{name: (context, function)} of everything that could serve the case here; "stock" is F.sdpa as it is."""
    device = arguments["query"].device.type
    call = functools.partial(run, arguments, grad_out)
    found = {"stock": (measure.stock, call), "flashsdpa": (measure.ours, call)}
    found |= {name: (functools.partial(_stock, backend), call) for name, backend in BACKENDS[device].items()}
    if flex and (device == "cuda" or grad_out is None):  # on a CPU torch has its forward alone
        block_mask = _flex_mask(case, device)
        inputs = [arguments[name] for name in ("query", "key", "value")]

        def flex_call():
            with torch.set_grad_enabled(grad_out is not None):
                return with_backward(_flex()(*inputs, block_mask=block_mask), arguments, grad_out)

        found["FlexAttention"] = (contextlib.nullcontext, flex_call)
    return found


def measure_case(case, device, seconds, flex):
    """One row for each implementation that serves the case and is right; one with a note for each that is not."""
    arguments = {name: t.detach().to(device).requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
                 for name, t in case.make().items()} | {"scale": None}  # fmt: skip
    grad_out = torch.randn_like(arguments["query"]) if case.grad else None
    base = {"group": device, "section": "length", "case": case.name, "dtype": case.dtype, "pass": case.pass_name,
            "mask": case.mask, "length": case.seq_k}  # fmt: skip
    rows, calls, outs = [], {}, {}
    for name, (context, call) in rivals(case, arguments, grad_out, flex).items():
        try:
            with context():
                outs[name] = call().detach()
                wait(arguments["query"].device)
            calls[name] = (context, call)
        except Exception as error:  # a rival that does not take the case, or cannot be compiled here
            rows.append(base | {"impl": name, "note": f"not here: {' '.join(str(error).split())[:160]}"})
    errors = sampled_errors(outs, arguments)
    bound = 30 * torch.finfo(DTYPES[case.dtype]).eps  # outputs are means of normal numbers
    for name in [name for name in calls if not errors[name] < bound]:
        rows.append(base | {"impl": name, "note": f"failed: off by {errors[name]:.3g}"})
        del calls[name]
    for name, samples in time_in_turns(calls, arguments["query"].device, seconds).items():
        ms = statistics.median(samples) * 1e3
        rows.append(base | {"impl": name, "ms": ms, "tflops": case.flop() / ms / 1e9, "error": errors[name]})
    return rows


COLOURS = {"flashsdpa": "#1f5f8b", "stock": "#e08e2b", "flash": "#7a9e5f", "cuDNN": "#b5485d", "efficient": "#8d7bb0",
           "math": "#8b949c", "FlexAttention": "#4aa8a0"}  # fmt: skip


def plot(run, path):
    """Speed against length, a panel for each mask and dtype, in a PNG at `path`. Needs matplotlib."""
    from matplotlib.figure import Figure

    timed = [row for row in run["rows"] if "tflops" in row]
    unit, factor = ("TFLOP/s", 1.0) if max(row["tflops"] for row in timed) > 2 else ("GFLOP/s", 1e3)
    dtypes = list(dict.fromkeys(row["dtype"] for row in timed))
    masks = [mask for mask in MASKS if any(row["mask"] == mask for row in timed)]
    figure = Figure(figsize=(3.1 * len(masks) + 0.6, 2.9 * len(dtypes) + 1.0), layout="constrained")
    panels = figure.subplots(len(dtypes), len(masks), sharex=True, sharey="row", squeeze=False)
    lines = {}
    for row, (axes_of_dtype, dtype) in enumerate(zip(panels, dtypes)):
        for axes, mask in zip(axes_of_dtype, masks):
            for name, colour in COLOURS.items():
                points = sorted((r["length"], r["tflops"] * factor) for r in timed
                                if (r["impl"], r["mask"], r["dtype"]) == (name, mask, dtype))  # fmt: skip
                if points:
                    ours = name == "flashsdpa"
                    (lines[name],) = axes.plot(*zip(*points), "o-", color=colour, linewidth=2.4 if ours else 1.4,
                                               markersize=5 if ours else 3.5, zorder=3 if ours else 2)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.grid(color="#e4e8ec", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
            if row == 0:
                axes.set_title(TITLES[mask], fontsize=10)
            if row == len(dtypes) - 1:
                axes.set_xlabel("length", fontsize=9)
        axes_of_dtype[0].set_ylabel(f"{dtype}\n{unit}", fontsize=9)
        axes_of_dtype[0].set_ylim(bottom=0)
    names = [name for name in COLOURS if name in lines]
    labels = [{"flashsdpa": "torch_flashsdpa", "stock": "stock F.sdpa"}.get(name, name) for name in names]
    figure.legend([lines[name] for name in names], labels, loc="outside upper center", ncols=len(names), frameon=False)
    what = "forward and backward" if timed[0]["pass"] == "fwd+bwd" else "forward"
    machine = f"{run['machine']}, torch {run['torch']}"
    figure.supxlabel(f"{what}, FLOP of the (query, key) pairs that take part; {machine}", fontsize=8, color="#5c6b78")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def table(rows):
    """Milliseconds, a line for each case, a column for each implementation."""
    names = [name for name in COLOURS if any(row["impl"] == name for row in rows)]
    cells = {}
    for row in rows:
        text = f"{row['ms']:.3g}" if "ms" in row else row["note"].partition(":")[0]
        cells.setdefault((row["case"], row["dtype"], row["pass"]), {})[row["impl"]] = text
    lines = [("case", "dtype", "pass", *names), *((*key, *(by.get(name, "-") for name in names)) for key, by in cells.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
