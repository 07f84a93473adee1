"""Forward, backward and both together of one call by several implementations, which take turns: for calls that have more to
them than benchmarks/forward.py and backward.py time."""

import argparse
import functools
import statistics
from pathlib import Path

import torch
from torch_flashsdpa.bench import measure

import gpu

RESULTS = Path(__file__).resolve().parent / "results"
FLOP = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # of the forward's
LARGEST_ERROR = 0.03


def run_case(case, group, kind, implementations, error_of, rounds, largest_error=LARGEST_ERROR):
    """Rows of one forward.Case. implementations: {name: (call(q, k, v), context)}; error_of(name, leaves, grad_out, out, grads):
    the error to hold against `largest_error`, or None. A ratio of ours to stock goes with `kind`, the name of such calls in the
    table of "auto"."""
    leaves = [t.requires_grad_() for t in case.make()]
    grad_out = torch.randn(*leaves[0].shape[:3], leaves[2].size(3), device="cuda", dtype=case.dtype)
    rows, calls = [], {name: {} for name in FLOP}
    for name, (call, context) in implementations.items():
        mine = {p: {"group": group, "case": case.name, "dtype": str(case.dtype).removeprefix("torch."), "pass": p, "impl": name}
                for p in FLOP}  # fmt: skip
        rows += mine.values()

        def backward(out):
            return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

        try:
            with context():
                out = call(*leaves)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                grads = backward(out)
                mine["bwd"]["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            error = error_of(name, leaves, grad_out, out.detach(), grads)
        except Exception as problem:  # noqa: BLE001  a rival without this case is a row without a time
            for row in mine.values():
                row["note"] = f"failed: {str(problem).splitlines()[0]}"
            continue
        for row in mine.values():
            row |= {} if error is None else {"error": error}
            row |= {} if error is None or error <= largest_error else {"note": f"failed: error {error:.3g}"}
        if "note" not in mine["fwd"]:
            runs = {"fwd": torch.no_grad()(functools.partial(call, *leaves)), "bwd": functools.partial(backward, out),
                    "fwd+bwd": lambda call=call: backward(call(*leaves))}  # fmt: skip
            for p, run in runs.items():
                calls[p][name] = (run, context, mine[p])
    for p, by_name in calls.items():
        time_pass(case, p, kind, by_name, rounds)
    return rows


def time_pass(case, name, kind, calls, rounds):
    if not calls:
        return
    run, context, _ = next(iter(calls.values()))
    with context():
        repeats = gpu.repeats(run, 8)
    times = gpu.interleaved({impl: functools.partial(gpu.elapsed_ms_in, context, run, repeats)
                             for impl, (run, context, _) in calls.items()}, rounds)  # fmt: skip
    for impl, (_, _, row) in calls.items():
        row["ms"] = statistics.median(times[impl])
        row["tflops"] = FLOP[name] * case.flop() / row["ms"] / 1e9
    if {"flashsdpa", "stock"} <= set(calls):
        ratio, bound = measure.ratio_with_bound({impl: times[impl] for impl in ("flashsdpa", "stock")})
        shape = {"kind": kind, "dim": case.dim, "seq_q": case.seq_q, "seq_k": case.seq_k}
        calls["flashsdpa"][2].update(ratio=ratio, ratio_lower_95=bound, isa="sm90", section=kind, shape=shape)


def table(rows):
    """TFLOP/s, a line for each case and pass."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    cells = {}
    for row in rows:
        cells.setdefault(f"{row['case']} {row['dtype']} {row['pass']}", {})[row["impl"]] = row.get("tflops")
    lines = [f"{'case':58}" + "".join(f"{name:>13}" for name in names)]
    lines += [f"{cell:58}" + "".join(f"{'-' if by_name.get(name) is None else f'{by_name[name]:.0f}':>13}" for name in names)
              for cell, by_name in cells.items()]  # fmt: skip
    return "\n".join(lines)


def parser_of(doc, rounds):
    """What the benchmarks that use this module are told, each in its own words."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"interleaved rounds (default {rounds})")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def record(groups, name, out):
    """Rows, case by case from an iterator, into the record; then the table. The exit status: 1 if one of ours has no time."""
    rows, path = [], None
    for group in groups:
        rows += group
        path = gpu.write(rows, out, name)
    print(f"{table(rows)}\nTFLOP/s\n{path}")
    failed = [row for row in rows if row["impl"] == "flashsdpa" and "ms" not in row]
    for row in failed:
        print("FAILED", row["case"], row["pass"], row.get("note"))
    return 1 if failed else 0
