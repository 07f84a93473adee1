"""The benchmark as a command: `python -m torch_flashsdpa bench` and benchmarks/cpu.py."""

import argparse
from pathlib import Path

from .cases import GRIDS


def add_arguments(parser, grid):
    parser.add_argument("--grid", choices=sorted([*GRIDS, "length"]), default=grid,
                        help=f"which cases (default {grid}); length: speed against length, every rival that is here")  # fmt: skip
    parser.add_argument("--only", metavar="TEXT", help='run the cells whose "section case dtype pass" holds TEXT')
    parser.add_argument("--threads", type=int, metavar="N", help="torch.set_num_threads(N); default: torch's own")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="interleaved repetitions per cell (default 20)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the JSON record and the plot")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG")
    only = parser.add_argument_group("with --grid length")
    only.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    only.add_argument("--longest", type=int, metavar="N", help="last of the lengths 128, 256, ... (default 2048, on a GPU 16384)")
    only.add_argument("--grad", action="store_true", help="forward and backward")
    only.add_argument("--no-flex", action="store_true", help="without FlexAttention, which is compiled for each case")
    only.add_argument("--seconds", type=float, default=0.5, metavar="S", help="of each implementation in a case (default 0.5)")


def _progress(cells):
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=cells, unit="cell", dynamic_ncols=True)


def _warn_if_busy(result):
    if result["load_average"] > 0.5 + result["threads"]:
        print(f"the machine is busy (load average {result['load_average']}): trust the ratios only, and those not far\n")


def _chosen(cases, options):
    """Those of the cases that --only names; where there are none, says so."""
    chosen = [c for c in cases if not options.only or options.only in f"{c.section} {c.name} {c.dtype} {c.pass_name}"]
    if not chosen:
        print(f"no cell of the grid {options.grid!r} holds {options.only!r}")
    return chosen


def _plot(draw, result, stem, options):
    if options.no_plot:
        return
    try:
        draw(result, stem.with_name(stem.name + ".png"))
        print(f"plot    {stem}.png")
    except ImportError:
        print("plot    none: install matplotlib for it")


def _run_lengths(options, isa, folder):
    from . import lengths, output

    longest = options.longest or (2048 if options.device == "cpu" else 16384)
    panels = lengths.cases(options.device, longest, options.grad)
    chosen = _chosen([case for group in panels.values() for case in group], options)
    if not chosen:
        return 1
    rows = []
    result = output.record(rows, isa, "length")
    if options.device == "cuda":
        import torch

        result |= {"machine": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    kind = "-bwd" if options.grad else ""
    stem = folder / (output.file_stem(result) + kind)
    bar = _progress(len(chosen))
    for case in chosen:
        rows += lengths.measure_case(case, options.device, options.seconds, not options.no_flex)
        output.write_json(result, stem.with_name(stem.name + ".json"))
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()
    print(f"\ntorch {result['torch']}, {result['machine']}, milliseconds, median\n")
    _warn_if_busy(result)
    print(f"{lengths.table(rows)}\n\nrecord  {stem}.json")
    for note in dict.fromkeys(f"{row['impl']}: {row['note']}" for row in rows if "note" in row):
        print(f"note    {note}")
    _plot(lengths.plot, result, stem, options)
    return int(any(row["impl"] == "flashsdpa" and "note" in row for row in rows))


def run(options, default_out=Path("flashsdpa-bench")):
    """Measure, print the table, write JSON and PNG; returns the exit code: 1 where a cell failed."""
    import torch

    from .. import _loader
    from .._doctor import cpu_isa
    from . import measure, output

    library = _loader.load()
    if library.module is None:
        print(f"bench needs our kernels: {library.problem}")
        return 1
    if options.threads:
        torch.set_num_threads(options.threads)
    isa = cpu_isa(library.module.kernel_table())
    if options.grid == "length":
        return _run_lengths(options, isa, options.out or default_out)
    cases = _chosen(GRIDS[options.grid](), options)
    if not cases:
        return 1
    rows = []
    bar = _progress(len(cases))
    if any(case.section == "decode" for case in cases):
        gbps = measure.read_bandwidth()
        rows.append({"group": "cpu", "section": "decode", "case": "read bandwidth", "impl": "read", "gbps": gbps})
    result = output.record(rows, isa, options.grid)
    stem = (options.out or default_out) / output.file_stem(result)
    for case in cases:
        if bar is not None:
            bar.set_description(f"{case.name} {case.dtype} {case.pass_name}")
        rows += measure.measure(case, options.pairs)
        output.write_json(result, stem.with_name(stem.name + ".json"))  # a run that is cut short keeps what it has
        if bar is not None:
            bar.update()
    if bar is not None:
        bar.close()

    print(f"\ntorch {result['torch']}, {result['machine']}, {options.pairs} interleaved pairs, median\n")
    _warn_if_busy(result)
    print(output.table(rows))
    print(f"\nrecord  {stem}.json")
    _plot(output.plot, result, stem, options)
    failed = [row for row in rows if row.get("note", "").startswith("failed")]
    for row in failed:
        print(f"FAILED  {row['case']} {row['dtype']} {row['pass']}: {row['note']}")
    return 1 if failed else 0


def main(arguments=None, grid="cpu", default_out=Path("flashsdpa-bench")):
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, grid)
    return run(parser.parse_args(arguments), default_out)
