"""Float32 attention on the GPU, forward and backward, ours beside stock's kernels, in one run; exact and where TF32 is allowed.

    python benchmarks/float32.py [--only TEXT] [--rounds N] [--out DIR]

"exact": torch's float32 matmul precision is "highest"; "tf32": "high", which stock's math path and our kernels follow. A row's
pass is "fwd", or "bwd": torch.autograd.grad of one recorded forward. Results are held against float64 on the last head before
they are timed. Writes DIR/<date>-<machine>-float32.json.
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

import backward  # noqa: E402
import forward  # noqa: E402
import gpu  # noqa: E402
from torch_flashsdpa.bench import measure  # noqa: E402

IMPLEMENTATIONS = {  # name in the table: (call, context)
    "flashsdpa": (forward.sdpa, measure.ours),
    "stock": (forward.sdpa, measure.stock),
    "efficient": (forward.only(SDPBackend.EFFICIENT_ATTENTION), measure.stock),
    "math": (forward.only(SDPBackend.MATH), measure.stock),
}
MODES = {"exact": "highest", "tf32": "high"}  # torch.set_float32_matmul_precision
LARGEST_ERROR = {"exact": 1e-4, "tf32": 0.03}  # relative to the largest element


def cases():
    return [forward.Case(dim, 4, 16, seq, seq, causal, dtype=torch.float32)
            for dim in (64, 128) for causal in (True, False) for seq in (1024, 2048, 4096)]  # fmt: skip


@contextlib.contextmanager
def precision(mode):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(MODES[mode])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def last_head_error(case, leaves, out):
    """Of the output, relative to its largest element."""
    q, k, v = (t.detach()[-1, -1].double() for t in leaves)
    scores = q @ k.T * case.dim**-0.5
    if case.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape, dtype=torch.bool, device="cuda").tril(), -torch.inf)
    want = scores.softmax(-1) @ v
    return ((out.detach()[-1, -1].double() - want).abs().max() / want.abs().max()).item()


def run_case(case, mode, direction, rounds):
    leaves = [t.requires_grad_(direction == "bwd") for t in case.make()]
    grad_out = torch.randn_like(leaves[0])
    rows, calls = [], {}
    for name, (call, context) in IMPLEMENTATIONS.items():
        row = {"group": "float32", "case": case.name, "dtype": "float32", "mode": mode, "pass": direction, "impl": name}
        rows.append(row)
        try:
            with context():
                out = call(*leaves, case)
            run = functools.partial(call, *leaves, case)
            if direction == "bwd":
                run = functools.partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True)
            with context():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                result = run()
                row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        except Exception as error:  # noqa: BLE001  a rival without this case is a row without a time
            row["note"] = f"failed: {str(error).splitlines()[0]}"
            continue
        row["error"] = (last_head_error(case, leaves, out) if direction == "fwd"
                        else backward.last_head_error(case, leaves, grad_out, result))  # fmt: skip
        del out, result
        if row["error"] > LARGEST_ERROR[mode]:
            row["note"] = f"failed: error {row['error']:.3g}"
            continue
        calls[name] = (run, context, row)
    if not calls:
        return rows
    repeats = gpu.repeats(next(iter(calls.values()))[0], 10)
    times = gpu.interleaved({name: functools.partial(gpu.elapsed_ms_in, context, run, repeats)
                             for name, (run, context, _) in calls.items()}, rounds)  # fmt: skip
    for name, (_, _, row) in calls.items():
        row["ms"] = statistics.median(times[name])
        row["tflops"] = (1 if direction == "fwd" else 2.5) * case.flop() / row["ms"] / 1e9
    return rows


def table(rows):
    cells = {}
    for row in rows:
        cells.setdefault(f"{row['case']} {row['pass']} {row['mode']}", {})[row["impl"]] = row
    lines = [f"{'case':43}" + "".join(f"{name:>18}" for name in IMPLEMENTATIONS)]
    for case, by_name in cells.items():
        def cell(row):
            return f"{row['tflops']:.1f} ({row['error']:.0e})" if "tflops" in row else "-"

        lines.append(f"{case:43}" + "".join(f"{cell(by_name.get(name, {})):>18}" for name in IMPLEMENTATIONS))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name, with pass and mode, holds TEXT")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = []
    for case in cases():
        for direction in ("fwd", "bwd"):
            for mode in MODES:
                if options.only not in f"{case.name} {direction} {mode}":
                    continue
                with precision(mode):
                    rows += run_case(case, mode, direction, options.rounds)
                path = gpu.write(rows, options.out, "float32")
                print(table(rows).splitlines()[-1], flush=True)
    print(f"{table(rows)}\nTFLOP/s (largest error)\n{path}")
    failed = [row for row in rows if row["impl"] == "flashsdpa" and "ms" not in row]
    for row in failed:
        print("FAILED", row["case"], row["pass"], row["mode"], row.get("note"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
