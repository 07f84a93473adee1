"""Write the README's tables between their marks: the support table from the kernel table that dispatch itself reads, the
measurements from the recorded runs in benchmarks/results.

    python tools/readme_tables.py           # rewrites README.md
    python tools/readme_tables.py --check   # exit code 1 if the README does not agree
"""

import importlib.util
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("torch_flashsdpa") is None:  # not installed: the checkout serves
    sys.path.append(str(ROOT))

README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
MARK, END = "<!-- table: {}, by tools/readme_tables.py -->", "<!-- end of table: {} -->"
SUPPORT_COLUMNS = ("kernel", "pass", "runs on", "dtypes", "head dim", "takes", "tile", "source")


def markdown(lines):
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ["---"] * len(lines[0]), *lines[1:]])


def _cells(entry):
    where = {"cpu": "CPU", "cuda": "GPU"}[entry["device"]] + f", {entry['isa']}"
    tile = f"{entry['block_m']} x {entry['block_n']}" if entry["block_m"] else "-"
    dim = f"up to {entry['max_dim']}" if entry["max_dim"] else "-"
    takes = ", ".join(feature.replace("_", " ") for feature in entry["features"]) or "-"
    return (f"`{entry['name']}`", entry["pass"].replace("_", " "), where, ", ".join(entry["dtypes"]), dim, takes, tile,
            f"`{entry['source']}`")  # fmt: skip


def support_table(kernels):
    """The kernel table (_C.kernel_table()) as Markdown, in the table's own order."""
    return markdown([SUPPORT_COLUMNS, *map(_cells, kernels)])


def milliseconds(ms):
    return f"{ms * 1e3:.1f} µs" if ms < 0.5 else f"{ms:.3g} ms" if ms < 100 else f"{ms:.0f} ms"


def cpu_table():
    """Stock / ours = ratio for each cell; one column for each machine's newest record of the grid "cpu"."""
    runs = {}
    for path in sorted(RESULTS.glob("*-cpu.json")):
        run = json.loads(path.read_text())
        runs[path.name[11:]] = run  # without the date: the newest of a machine wins
    cells, memory = {}, []
    for run in runs.values():
        for row in run["rows"]:
            if row.get("section") in ("dense", "mask", "decode", "host") and "ms" in row:
                cell = cells.setdefault((row["case"], row["dtype"], row["pass"]), {})
                cell.setdefault(run["machine"], {})[row["impl"]] = row
    machines = [run["machine"] for run in runs.values()]
    lines = [["case", "dtype", "pass", *(f"{run['machine'].split(',')[0]} ({run['isa']}), torch {run['torch'].split('+')[0]}" for run in runs.values())]]
    for (case, dtype, name), by_machine in cells.items():
        texts = []
        for machine in machines:
            rows = by_machine.get(machine, {})
            if "ratio" not in rows.get("flashsdpa", {}):
                texts.append("-")
                continue
            ours, stock = rows["flashsdpa"], rows["stock"]
            texts.append(f"{milliseconds(stock['ms'])} / {milliseconds(ours['ms'])} = {ours['ratio']:.2f}x")
        lines.append([case, dtype, name, *texts])
    for run in runs.values():
        rows = [r for r in run["rows"] if r.get("section") == "memory" and r["impl"] == "flashsdpa" and r.get("peak_mib")]
        if rows:
            sizes = ", ".join(f"{r['case'].split()[-1]} {r['peak_mib']:.0f} MiB" for r in rows)
            memory.append(f"{run['machine'].split(',')[0]}: {sizes}")
    text = markdown(lines)
    if memory:
        text += "\n\nPeak memory above the inputs, float32 D64 H8, forward and backward: " + "; ".join(memory) + "."
    return text


IMPLEMENTATIONS = ("flashsdpa", "stock", "cudnn", "flash", "efficient", "flex", "fa3")


def newest(record):
    """The newest record DATE-MACHINE-`record`.json."""
    return json.loads(max(RESULTS.glob(f"*-{record}.json")).read_text())


def gpu_table(record, which="fwd"):
    """TFLOP/s of every implementation in a record, of one pass. A note in a row makes a column of its own after those that
    "ours / best rival" compares: a structure stated instead of shown."""
    run = newest(record)
    cells, noted = {}, {}
    for row in run["rows"]:
        if row["pass"] != which or row.get("note", "").endswith(("deterministic", "with the bias's gradient")):
            continue
        note = {"the structure as an argument": "told"}.get(row.get("note"))
        name = f"{row['impl']}, {note}" if note else row["impl"]
        if note:
            noted[name] = None
        if "tflops" in row:
            cells.setdefault(row["case"], {})[name] = row["tflops"]
    names = [n for n in IMPLEMENTATIONS if any(n in speed for speed in cells.values())]
    lines, shares = [["case", *names, "ours / best rival", *noted]], []
    for case, speed in cells.items():
        share = speed.get("flashsdpa", 0) / max(speed[n] for n in names[1:] if n in speed)
        shares.append(share)
        number = lambda n: f"{speed[n]:.0f}" if n in speed else "-"  # noqa: B023, E731
        lines.append([case, *map(number, names), f"{share:.2f}" if share else "-", *map(number, noted)])
    mean = math.prod(shares) ** (1 / len(shares))
    return (markdown(lines) + f"\n\n{run['machine']}, driver {run['driver']}, torch {run['torch']}, bfloat16, TFLOP/s. Least of "
            f"\"ours / best rival\" {min(shares):.2f}, geometric mean {mean:.2f}.")  # fmt: skip


def fixed_order_table():
    """Our backward under torch.use_deterministic_algorithms(True) beside the fast one, TFLOP/s."""
    run = newest("backward")
    cells = {}
    for row in run["rows"]:
        if row["impl"] == "flashsdpa" and "tflops" in row:
            cells.setdefault(row["case"], {})[row.get("note")] = row["tflops"]
    lines = [["case", "fast", "deterministic", "ratio"]]
    lines += [[case, *(f"{speed[note]:.0f}" for note in (None, "deterministic")), f"{speed['deterministic'] / speed[None]:.2f}"]
              for case, speed in cells.items()]  # fmt: skip
    return markdown(lines)


def models_table():
    """Steps of whole models, stock / ours = speed-up, from the newest record that timed a (case, mode)."""
    runs = sorted((json.loads(path.read_text()) for path in RESULTS.glob("*-models-*.json")), key=lambda run: run["date"])
    cells = {}
    for run in runs:
        for row in run["rows"]:
            if row["group"] == "models" and "ms" in row:
                cells.setdefault(row["case"], {}).setdefault(row["mode"], {})[row["impl"]] = row
    modes = ("eager", "compiled")
    lines = [["step", *modes, "attention's share, stock", "stock ran", "peak memory, MiB"]]
    for case, by_mode in cells.items():
        stock = by_mode[min(by_mode, key=modes.index)]["stock"]
        ours = by_mode[stock["mode"]]["flashsdpa"]
        times = [f"{by_mode[mode]['stock']['ms']:.1f} / {by_mode[mode]['flashsdpa']['ms']:.1f} ms = {by_mode[mode]['flashsdpa']['speedup']:.2f}x"
                 if mode in by_mode else "-" for mode in modes]  # fmt: skip
        lines.append([case, *times, f"{stock['attention_share']:.0%}", stock["stock_backend"].replace("_attention", ""),
                      f"{stock['peak_mib']:.0f} -> {ours['peak_mib']:.0f}"])  # fmt: skip
    run = runs[-1]
    return (markdown(lines) + f"\n\n{run['machine']}, driver {run['driver']}, torch {run['torch']}, bfloat16. Share, backends and memory are of the "
            "first mode given.")  # fmt: skip


def measurements():
    """{name: the Markdown of the table}"""
    return {"gpu forward": gpu_table("forward"), "gpu backward": gpu_table("backward", "bwd"),
            "gpu backward fixed order": fixed_order_table(), "gpu masks": gpu_table("masks"),
            "gpu masks backward": gpu_table("masks", "bwd"), "models": models_table(), "cpu": cpu_table()}  # fmt: skip


def tables():
    """The measurements, and what there is."""
    from torch_flashsdpa._loader import binding

    return {"support": support_table(binding().kernel_table()), **measurements()}


def main(arguments):
    text = fresh = README.read_text()
    for name, table in tables().items():
        before, mark, rest = fresh.partition(MARK.format(name))
        _, end, after = rest.partition(END.format(name))
        if not (mark and end):
            print(f"{README.name} lacks the marks of the table {name!r}")
            return 1
        fresh = f"{before}{mark}\n{table}\n{end}{after}"
    if "--check" in arguments:
        if fresh != text:
            print("README.md's tables are not what the kernel table and the records say; run `python tools/readme_tables.py`")
        return int(fresh != text)
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
