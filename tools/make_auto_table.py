"""Make the table of "auto", torch_flashsdpa/data/auto_table.json, from the recorded runs in benchmarks/results.

Each row of ours with a measured ratio becomes one row. Where runs repeat a cell, those of the newest date count, and of them the
lowest ratio, so that a call is only routed where none has seen stock win. For masked calls the worst of the recorded bool masks, and
of the additive ones ("bias"), stands for its shape.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLE = ROOT / "torch_flashsdpa" / "data" / "auto_table.json"
RECORDS = ("cpu", "cpu-auto", "forward", "forward-auto", "forward-decode", "backward-auto", "masks", "masks-auto", "dropout", "float32")


def table_rows(runs):
    """The table's rows of these runs (parsed JSON documents), sorted."""
    lowest = {}  # key: (date, ratio)
    for run in runs:
        date = run["date"][:10]
        for row in run["rows"]:
            if row.get("impl") != "flashsdpa" or "ratio" not in row or row["section"] == "memory" or row["pass"] == "bwd":
                continue  # a backward alone is no call
            shape, additive = row["shape"], row.get("group") == "bias"
            key = (row["isa"], row["dtype"], "bias" if additive else shape["kind"], row["pass"] == "fwd+bwd",
                   shape["dim"], shape["seq_q"], shape["seq_k"])  # fmt: skip
            before, ratio = lowest.get(key, (date, row["ratio"]))
            if date >= before:
                lowest[key] = date, min(ratio, row["ratio"]) if date == before else row["ratio"]
    names = ("isa", "dtype", "kind", "grad", "dim", "seq_q", "seq_k")
    return [{"device": "cuda" if key[0].startswith("sm") else "cpu", **dict(zip(names, key)), "ratio": round(lowest[key][1], 3)}
            for key in sorted(lowest)]


def main():
    paths = sorted(path for name in RECORDS for path in RESULTS.glob(f"*-{name}.json"))
    if not paths:
        print(f"no recorded runs in {RESULTS}; make one with `python benchmarks/cpu.py --grid auto`, on a GPU with "
              "`python benchmarks/forward.py --grid auto`")
        return 1
    rows = table_rows([json.loads(path.read_text()) for path in paths])
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    sources = json.dumps([path.name for path in paths])
    TABLE.write_text(f'{{\n "made_from": {sources},\n "rows": [\n{text}\n ]\n}}\n')
    print(f"{len(rows)} rows from {len(paths)} runs -> {TABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
