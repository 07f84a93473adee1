"""What a run leaves behind: the table, the JSON record of benchmarks/results, the plot."""

import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from .._loader import PACKAGE, binding


def processor():
    """The processor's name as Linux tells it."""
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1].strip()
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def commit():
    """The checkout's commit, with "-dirty" where files differ from it; outside a checkout what FLASHSDPA_COMMIT names."""
    if named := os.environ.get("FLASHSDPA_COMMIT"):
        return named
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return answer.stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def record(rows, isa, grid):
    """The run as one JSON document: the machine, the versions, the rows."""
    return {
        "grid": grid,
        "machine": f"{processor()}, {torch.get_num_threads()} threads, {isa}",
        "threads": torch.get_num_threads(),
        "isa": isa,
        "load_average": round(os.getloadavg()[0], 2),
        "driver": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None,
        "library": binding().build_info(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "clocks": None,
        "rows": rows,
    }


def file_stem(run):
    """The name of a recorded run: <date>-<processor>-<threads>t-<isa>-cpu, of one on a GPU <date>-<GPU>; grids other than the project's own
    add theirs."""
    grid = "" if run["grid"] == "cpu" else f"-{run['grid']}"
    if run["cudnn"]:
        return f"{run['date'][:10]}-{_slug(run['machine'])}{grid}"
    machine = _slug(re.sub(r"\(r\)|\(tm\)|cpu|processor|@.*", "", processor().lower()))
    return f"{run['date'][:10]}-{machine}-{run['threads']}t-{run['isa']}-cpu{grid}"


def _slug(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_json(run, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run | {"rows": "ROWS"}, indent=1).replace('"ROWS"', _rows_text(run["rows"])) + "\n")


def _rows_text(rows):
    # One row a line: a diff of two runs then reads like a table.
    return "[\n" + ",\n".join("  " + json.dumps(_rounded(row)) for row in rows) + "\n ]"


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def pairs_of(rows):
    """[(stock's row or None, our row)], one per cell, in order."""
    stock = {_cell(row): row for row in rows if row["impl"] == "stock"}
    return [(stock.get(_cell(row)), row) for row in rows if row["impl"] == "flashsdpa"]


def _cell(row):
    return row["section"], row["case"], row["dtype"], row["pass"]


def _ms(row):
    ms = row["ms"]
    return f"{ms * 1e3:.1f} us" if ms < 0.1 else f"{ms:.3g} ms" if ms < 100 else f"{ms:.0f} ms"


def _rate(row):
    return f"{row['gbps']:.1f} GB/s" if "gbps" in row else f"{row['tflops'] * 1e3:.0f} GFLOP/s"


def _mib(row):
    return "-" if row.get("peak_mib") is None else f"{row['peak_mib']:.0f}"


def table(rows):
    """The run as a Markdown table that also reads well in a terminal."""
    lines = [("case", "dtype", "pass", "stock", "ours", "speedup", "at least", "rate", "peak MiB", "error", "kernel")]
    for stock, ours in pairs_of(rows):
        head = (ours["case"], ours["dtype"], ours["pass"])
        if stock is None:
            lines.append((*head, "", "", "", "", "", "", "", ours["note"]))
            continue
        peak = f"{_mib(stock)} / {_mib(ours)}"
        ratio, low = f"{ours['ratio']:.2f}x", f"{ours['ratio_low']:.2f}x"
        lines.append(
            (*head, _ms(stock), _ms(ours), ratio, low, _rate(ours), peak, f"{ours['error']:.1e}", ours["note"])
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    for row in rows:
        if row["impl"] == "read":
            text.append(f"\nReadable memory bandwidth in this run: {row['gbps']:.1f} GB/s.")
    return "\n".join(text)


def plot(run, path):
    """Speedup over stock per cell, as horizontal bars, in a PNG at `path`. Needs matplotlib."""
    from matplotlib.figure import Figure

    cells = [ours for stock, ours in pairs_of(run["rows"]) if stock is not None]
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(cells)), layout="constrained")
    axes = figure.subplots()
    ratios = [row["ratio"] for row in cells]
    colours = ["#2f6f9f" if row["pass"] == "fwd" else "#e08e2b" for row in cells]
    axes.barh(range(len(cells)), [ratio - 1 for ratio in ratios], left=1, color=colours)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}x")
    for place, row in enumerate(cells):
        axes.text(max(row["ratio"], 1.0), place, f" {row['ratio']:.2f}x", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cells)), [f"{row['case']} {row['dtype']} {row['pass']}" for row in cells], fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlim(min(0.7, *ratios) / 1.2, max(2.0, *ratios) * 1.5)
    axes.set_xlabel("time of stock PyTorch / time of torch_flashsdpa (blue: fwd, orange: fwd+bwd)")
    axes.set_title(f"torch {run['torch']}, {run['machine']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
