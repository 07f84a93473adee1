"""What attention costs the host, on the CPU: small eager calls, stock against ours, and the import of the package.

    python benchmarks/host.py --threads 1       # writes benchmarks/results/<date>-<machine>-cpu-host.json

Calls: the same small call with the router absent ("stock"), with ours serving ("flashsdpa"), and one that ours does not take, with
the router in place ("fallback") against without it. Samples take turns. Imports: medians over fresh processes that take turns, each
timing its own statement behind `import torch`. A busy machine makes all of it worthless: the record holds the load.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("torch_flashsdpa") is None:  # not installed: the checkout serves
    sys.path.append(str(ROOT))

import torch  # noqa: E402

import torch_flashsdpa  # noqa: E402
from torch_flashsdpa._doctor import cpu_isa  # noqa: E402
from torch_flashsdpa._loader import PACKAGE, binding  # noqa: E402
from torch_flashsdpa.bench import measure, output, turns  # noqa: E402

# name -> (shape of q, k and v; our part in it). Head dims above 256 go to stock.
CALLS = {"B1 H1 S1 D8": ((1, 1, 1, 8), "flashsdpa"), "B1 H4 S16 D64": ((1, 4, 16, 64), "flashsdpa"),
         "B1 H1 S1 D300": ((1, 1, 1, 300), "fallback")}  # fmt: skip
# name -> (what is timed behind `import torch`, the most milliseconds it should take)
IMPORTS = {"import torch_flashsdpa": ("import torch_flashsdpa", 150.0),
           "import torch, TORCH_FLASHSDPA unset": ("from torch_flashsdpa._autoload import autoload; autoload()", 2.0),
           "import and enable()": ("import torch_flashsdpa; torch_flashsdpa.enable()", None)}  # fmt: skip


def measure_call(name, grad, seconds):
    """Two rows: the call without us, and with us."""
    shape, part = CALLS[name]
    leaves = [torch.randn(shape, requires_grad=grad) for _ in range(3)]
    arguments, grad_out = dict(zip(("query", "key", "value"), leaves)), torch.ones(shape) if grad else None

    def call():
        turns.run(arguments, grad_out)

    with measure.ours():
        before = torch_flashsdpa.routed_calls()
        call()
        assert (torch_flashsdpa.routed_calls() > before) == (part == "flashsdpa")
    samples = turns.time_in_turns({"stock": (measure.stock, call), part: (measure.ours, call)},
                                  torch.device("cpu"), seconds)  # fmt: skip
    cell = {"group": "cpu", "section": "host", "case": name, "dtype": "float32", "pass": "fwd+bwd" if grad else "fwd"}
    rows = [cell | {"impl": impl, "ms": statistics.median(samples[key]) * 1e3, "ms_low": min(samples[key]) * 1e3}
            for impl, key in (("stock", "stock"), ("flashsdpa", part))]  # fmt: skip
    if part == "fallback":
        rows[1]["note"] = "left to stock by our router"
    rows[1]["ratio"] = rows[0]["ms"] / rows[1]["ms"]
    return rows


def measure_imports(processes):
    """A row for each of IMPORTS, and one for `import torch` itself."""
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("TORCH_FLASHSDPA", None)
    timed = "import time; {before}; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    codes = {name: timed.format(before="import torch", statement=statement) for name, (statement, _) in IMPORTS.items()}
    codes["import torch"] = timed.format(before="pass", statement="import torch")
    samples = {name: [] for name in codes}
    for _ in range(processes):
        for name, code in codes.items():
            # -P: the package of this process, not what lies in the current folder.
            done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True)
            samples[name].append(float(done.stdout) * 1e3)
    return [{"group": "cpu", "section": "import", "case": name, "impl": "stock" if name == "import torch" else "flashsdpa",
             "ms": statistics.median(ms), "ms_low": min(ms), "limit_ms": IMPORTS.get(name, (None, None))[1]}
            for name, ms in samples.items()]  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="torch.set_num_threads(N) (default 1)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each implementation of each call (default 2)")
    parser.add_argument("--processes", type=int, default=15, help="of each import (default 15)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the record")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = []
    result = output.record(rows, cpu_isa(binding().kernel_table()), "host")
    for name in CALLS:
        for grad in (False, True):
            rows += measure_call(name, grad, options.seconds)
    rows += measure_imports(options.processes)
    path = options.out / (output.file_stem(result) + ".json")
    output.write_json(result, path)
    for row in rows:
        limit = f"  (at most {row['limit_ms']:g} ms)" if row.get("limit_ms") is not None else ""
        ratio = f"  stock / this {row['ratio']:.2f}" if "ratio" in row else ""
        note = f"  ({row['note']})" if "note" in row else ""
        print(f"{row['case']:38} {row.get('pass', ''):8} {row['impl']:10} {row['ms']:10.4f} ms{ratio}{limit}{note}")
    print(f"\nload {result['load_average']} on {os.cpu_count()} processors\nrecord  {path}")
    return int(any(row.get("limit_ms") is not None and row["ms"] > row["limit_ms"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
