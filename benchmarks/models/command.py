"""Whole models, stock attention against ours in one run.

    python benchmarks/models [--mode eager,compiled] [--only TEXT ...] [--rounds N] [--budget SECONDS] [--size small|full]

Correct first: outputs, or loss and gradients, are held against the same step in a wider dtype. Then the two take turns. MFU is
the step's model FLOP per second over those of a matrix product measured here. Writes DIR/<date>-<machine>-<NAME>.json after each
case. Models come from transformers and timm with random weights, MiniLM with its own; nothing is downloaded.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import gpu
import torch

from torch_flashsdpa._doctor import cpu_isa
from torch_flashsdpa._loader import binding
from torch_flashsdpa.bench import output

from .registry import CASES
from .runs import MODES, Bench

RESULTS = Path(__file__).resolve().parent.parent / "results"
NEVER_SLOWER = 0.03  # what the upper bound of a slowdown has to stay below
COLUMNS = ("case", "mode", "stock ms", "ours ms", "speed-up", "at least", "MFU", "peak MiB", "attention", "error", "routed",
           "stock ran")  # fmt: skip


def arguments(given):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="benchmarks/models")
    parser.add_argument("--mode", default="eager,compiled", metavar="LIST",
                        help=f"of {', '.join(MODES)}; compiled: each block by itself (default eager,compiled)")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="interleaved pairs (default 20); 0 only compares")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no case after that")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=("small", "full"), help="small: to try the code (default on a CPU)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default bfloat16, on a CPU float32")
    parser.add_argument("--backend", choices=("auto", "flashsdpa"), default="auto", help="ours as selected by (default auto)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=RESULTS)
    parser.add_argument("--name", default="models", help="end of the record's name, where a run covers a part (default models)")
    options = parser.parse_args(given)
    options.mode = options.mode.split(",")
    if unknown := set(options.mode) - set(MODES):
        parser.error(f"--mode: {', '.join(sorted(unknown))}; choose of {', '.join(MODES)}")
    options.size = options.size or ("full" if options.device == "cuda" else "small")
    options.dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    return options


def write(rows, options):
    if options.device == "cuda":
        return gpu.write(rows, options.out, options.name)
    run = output.record(rows, cpu_isa(binding().kernel_table()), options.name)
    path = options.out / f"{output.file_stem(run)}.json"
    output.write_json(run, path)
    return path


def lines_of(rows):
    """The table's lines of some rows: one for each case and mode."""
    stocks = {(row["case"], row["mode"]): row for row in rows if row["impl"] == "stock"}
    for ours in (row for row in rows if row["impl"] == "flashsdpa"):
        stock = stocks.get((ours["case"], ours["mode"]))
        if stock is not None:
            errors, routed = f"{stock['error']:.1e} / {ours['error']:.1e}", f"{ours['routed']}/{ours['sdpa_calls']}"
        if "ms" not in ours:
            yield (ours["case"], ours["mode"], ours.get("note") or f"error {errors}, routed {routed}")
            continue
        yield (ours["case"], ours["mode"], f"{stock['ms']:.2f}", f"{ours['ms']:.2f}", f"{ours['speedup']:.3f}",
               f"{ours['speedup_lower_95']:.3f}", f"{stock['mfu']:.1%} -> {ours['mfu']:.1%}",
               f"{stock['peak_mib'] or 0:.0f} -> {ours['peak_mib'] or 0:.0f}",
               f"{stock['attention_share']:.0%} -> {ours['attention_share']:.0%}",
               errors, routed, stock["stock_backend"])  # fmt: skip


def verdict(rows):
    """What the run says of "never slower by 3 %": a sentence for each row that does not show it."""
    for row in rows:
        if row["impl"] == "flashsdpa" and "ms" in row and not row["slowdown_upper_95"] < NEVER_SLOWER:
            yield (f"not shown to be never slower: {row['case']} {row['mode']}, {row['speedup']:.3f}x, slower by up to "
                   f"{row['slowdown_upper_95']:.1%}")  # fmt: skip


def main(given=None):
    options = arguments(given)
    cases = [case for case in CASES if any(text in case.name for text in options.only)]
    if options.list or not cases:
        print("\n".join(case.name for case in cases) or f"no case holds {' or '.join(options.only)}")
        return 0 if cases else 1
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.backends.cudnn.allow_tf32 = False  # convolutions of the reference are float32's
    bench = Bench(options.device, options.dtype, options.size, options.backend, options.rounds)
    started, rows, path = time.monotonic(), [], None
    print(" | ".join(COLUMNS), flush=True)
    for case in cases:
        if options.budget and time.monotonic() - started > options.budget:
            print(f"{case.name}: not run, the budget is spent")
            continue
        new = bench.measure(case, options.mode)
        if not rows:  # what MFU is a share of; the device is warm now
            rows.append({"group": "models", "case": "matrix product", "dtype": str(options.dtype).removeprefix("torch."),
                         "impl": "product", "tflops": bench.peak / 1e12})  # fmt: skip
        rows += new
        path = write(rows, options)
        for line in lines_of(new):
            print(" | ".join(line), flush=True)
    if not rows:
        return 1
    print(f"{time.monotonic() - started:.0f} s; a matrix product makes {bench.peak / 1e12:.3g} TFLOP/s\n{path}")
    for sentence in verdict(rows):
        print(sentence)
    noted = [row for row in rows if "note" in row]
    for row in noted:
        print(f"{row['case']} {row['mode']} {row['impl']}: {row['note']}")
    return int(any(row["note"].startswith("failed") for row in noted))


if __name__ == "__main__":
    sys.exit(main())
