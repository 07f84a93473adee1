"""The CPU benchmark of this project: the named cases of the grid "cpu", stock PyTorch against ours in one run.

    python benchmarks/cpu.py --threads 2          # writes benchmarks/results/<date>-<machine>-cpu.json and .png
    python benchmarks/cpu.py --grid auto --pairs 7 --no-plot    # the runs that the table of "auto" is made from
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("torch_flashsdpa") is None:  # not installed: the checkout serves
    sys.path.append(str(ROOT))

from torch_flashsdpa.bench.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(grid="cpu", default_out=ROOT / "benchmarks" / "results"))
