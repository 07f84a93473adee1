"""Unmasked attention backward on the GPU, ours beside every rival that has one and a fixed order of additions, in one run.

    python benchmarks/backward.py [--grid auto] [--only TEXT] [--rounds N] [--out DIR]

The cells are those of benchmarks/forward.py's dense grid. `--grid auto`: forward and backward together, ours and stock alone, over
the shapes of the table of "auto". Else timed is torch.autograd.grad of one recorded forward, and FlashAttention-3's operator where
gpu.fa3_ops finds it: all kernels of the backward, the host hidden where they are long. "flashsdpa-det" is ours under
torch.use_deterministic_algorithms(True). Writes DIR/<date>-<machine>-backward.json. Gradients are held against float64 on the last
head before they are timed.
"""

import argparse
import contextlib
import functools
import statistics
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import forward  # noqa: E402
import gpu  # noqa: E402
from torch_flashsdpa.bench import measure  # noqa: E402


@contextlib.contextmanager
def fixed_order():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


IMPLEMENTATIONS = {  # name in the table: (forward call, context of the forward, context of the backward)
    "flashsdpa": (forward.sdpa, measure.ours, contextlib.nullcontext),
    "flashsdpa-det": (forward.sdpa, measure.ours, fixed_order),
    "stock": (forward.sdpa, measure.stock, contextlib.nullcontext),
    "flash": (forward.only(SDPBackend.FLASH_ATTENTION), measure.stock, contextlib.nullcontext),
    "cudnn": (forward.only(SDPBackend.CUDNN_ATTENTION), measure.stock, contextlib.nullcontext),
    "fa3": (forward.fa3, contextlib.nullcontext, contextlib.nullcontext),
}


def recorded(call, leaves, case):
    """The output of one forward, and its backward as a function of the output's gradient."""
    if call is forward.fa3:  # has no autograd: its operator, given what the forward leaves
        out, lse = gpu.fa3_forward(*leaves, case.is_causal)
        return out, lambda grad_out: gpu.fa3_backward(grad_out, *leaves, out, lse, case.is_causal)
    out = call(*leaves, case)
    return out, lambda grad_out: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def last_head_error(case, leaves, grad_out, grads):
    """The largest error of dq, dk and dv relative to the largest gradient, of the last key head and its query heads."""
    group = case.heads // (case.heads_kv or case.heads)
    q, k, v, grad_out = (t.detach()[-1, heads:].double() for t, heads in zip((*leaves, grad_out), (-group, -1, -1, -group)))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    total = [torch.zeros_like(t) for t in (q, k, v)]
    for h in range(group):
        scores = q[h] @ k[0].T * case.dim**-0.5
        if case.is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape, dtype=torch.bool, device="cuda").tril(), -torch.inf)
        for sum_, part in zip(total, torch.autograd.grad(scores.softmax(-1) @ v[0], (q, k, v), grad_out[h])):
            sum_ += part
    got = [g[-1, heads:].double() for g, heads in zip(grads, (-group, -1, -1))]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, total))


def run_both(case, rounds):
    """Forward and backward in one time, as a training step sees them."""
    leaves, grad_out = [t.requires_grad_() for t in case.make()], None
    rows = {}
    for name in ("flashsdpa", "stock"):
        rows[name] = {"group": "dense", "case": case.name, "dtype": str(case.dtype).removeprefix("torch."), "pass": "fwd+bwd",
                      "impl": name}  # fmt: skip
    def run(name):  # noqa: E306
        call, context, _ = IMPLEMENTATIONS[name]
        with context():
            out = call(*leaves, case)
        return torch.autograd.grad(out, leaves, grad_out)

    grad_out = torch.randn(*leaves[0].shape[:3], leaves[2].shape[3], device="cuda", dtype=case.dtype)
    for name in rows:
        rows[name]["error"] = last_head_error(case, leaves, grad_out, run(name)) if case.seq_q <= 4096 else None
    if (rows["flashsdpa"]["error"] or 0) > 0.03:
        rows["flashsdpa"]["note"] = f"failed: error {rows['flashsdpa']['error']:.3g}"
        return list(rows.values())
    repeats = gpu.repeats(lambda: run("stock"), 10)
    times = gpu.interleaved({name: lambda name=name: gpu.elapsed_ms(lambda: run(name), repeats) for name in rows}, rounds)
    for name, row in rows.items():
        row["ms"] = statistics.median(times[name])
        row["tflops"] = 3.5 * case.flop() / row["ms"] / 1e9
    ratio, bound = measure.ratio_with_bound(times)
    rows["flashsdpa"] |= {"ratio": ratio, "ratio_lower_95": bound, "isa": "sm90", "section": "auto",
                          "shape": {"kind": case.kind, "dim": case.dim, "seq_q": case.seq_q, "seq_k": case.seq_k}}  # fmt: skip
    return list(rows.values())


def run_case(case, rounds):
    leaves = [t.requires_grad_() for t in case.make()]
    rows, calls, grad_out = [], {}, None
    for name, (call, context, backward_context) in IMPLEMENTATIONS.items():
        if name == "fa3" and not gpu.fa3_ops():
            continue
        row = {"group": "gqa" if case.heads_kv else "dense", "case": case.name, "dtype": str(case.dtype).removeprefix("torch."),
               "pass": "bwd", "impl": name.removesuffix("-det")}  # fmt: skip
        row |= {"note": "deterministic"} if name.endswith("-det") else {}
        rows.append(row)
        try:
            with context():
                out, backward = recorded(call, leaves, case)
            grad_out = torch.randn_like(out) if grad_out is None else grad_out
            run = functools.partial(backward, grad_out)
            with backward_context():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                grads = run()
                row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        except Exception as error:  # noqa: BLE001  a rival without this case is a row without a time
            row["note"] = f"failed: {str(error).splitlines()[0]}"
            continue
        if case.seq_q <= 8192:
            row["error"] = last_head_error(case, leaves, grad_out, grads)
        if row.get("error", 0.0) > 0.03:
            row["note"] = f"failed: error {row['error']:.3g}"
            continue
        calls[name] = (run, backward_context, row)
    if not calls:
        return rows
    repeats = gpu.repeats(next(iter(calls.values()))[0], 10)

    times = gpu.interleaved({name: functools.partial(gpu.elapsed_ms_in, context, run, repeats)
                             for name, (run, context, _) in calls.items()}, rounds)  # fmt: skip
    for name, (_, _, row) in calls.items():
        row["ms"] = statistics.median(times[name])
        row["tflops"] = 2.5 * case.flop() / row["ms"] / 1e9
    return rows


def table(rows):
    cells = {}
    for row in rows:
        cells.setdefault(f"{row['case']} {row['dtype']}", {})[row["impl"] + ("-det" if row.get("note") == "deterministic" else "")] = row
    names = [name for name in IMPLEMENTATIONS if any(name in by_name for by_name in cells.values())]
    lines = [f"{'case':43}" + "".join(f"{name:>14}" for name in names)]
    for case, by_name in cells.items():
        numbers = (by_name.get(name, {}).get("tflops") for name in names)
        lines.append(f"{case:43}" + "".join(f"{'-' if n is None else f'{n:.0f}':>14}" for n in numbers))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=("dense", "auto"), default="dense")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = []
    for case in forward.GRIDS[options.grid]():
        if options.only in case.name and not (options.grid == "auto" and case.seq_q < 64):  # nobody trains on few queries
            rows += (run_case if options.grid == "dense" else run_both)(case, options.rounds)
            path = gpu.write(rows, options.out, "backward" + ("" if options.grid == "dense" else "-auto"))
            print(table(rows).splitlines()[-1], flush=True)
    print(f"{table(rows)}\n{path}")
    failed = [row for row in rows if row["impl"].startswith("flashsdpa") and "ms" not in row]
    for row in failed:
        print("FAILED", row["case"], row["impl"], row.get("note"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
