"""Write the README's support table from the kernel table, between its two marks.

    python tools/support_table.py           # rewrites README.md
    python tools/support_table.py --check   # exit code 1 if the README does not agree with the kernel table
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("torch_flashsdpa") is None:  # not installed: the checkout serves
    sys.path.append(str(ROOT))

README = ROOT / "README.md"
BEGIN, END = "<!-- support table: tools/support_table.py -->", "<!-- end of the support table -->"
COLUMNS = ("kernel", "pass", "runs on", "dtypes", "head dim", "takes", "tile", "source")


def _cells(entry):
    where = {"cpu": "CPU", "cuda": "GPU"}[entry["device"]] + f", {entry['isa']}"
    tile = f"{entry['block_m']} x {entry['block_n']}" if entry["block_m"] else "-"
    dim = f"up to {entry['max_dim']}" if entry["max_dim"] else "-"
    takes = ", ".join(feature.replace("_", " ") for feature in entry["features"]) or "-"
    return (f"`{entry['name']}`", entry["pass"].replace("_", " "), where, ", ".join(entry["dtypes"]), dim, takes, tile,
            f"`{entry['source']}`")  # fmt: skip


def support_table(kernels):
    """The kernel table (_C.kernel_table()) as Markdown, in the table's own order."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *map(_cells, kernels)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments):
    from torch_flashsdpa._loader import binding

    text = README.read_text()
    before, mark, rest = text.partition(BEGIN)
    _, end_mark, after = rest.partition(END)
    if not (mark and end_mark):
        print(f"{README.name} lacks the marks {BEGIN} and {END}")
        return 1
    fresh = f"{before}{BEGIN}\n{support_table(binding().kernel_table())}\n{END}{after}"
    if "--check" in arguments:
        if fresh != text:
            print("README.md's support table differs from the kernel table; run `python tools/support_table.py`")
        return int(fresh != text)
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
