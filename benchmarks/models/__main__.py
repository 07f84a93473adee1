import importlib.util
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path[0] = str(BENCHMARKS)  # in the place of this folder, whose modules are a package's
if importlib.util.find_spec("torch_flashsdpa") is None:  # not installed: the checkout serves
    sys.path.append(str(BENCHMARKS.parent))

from models import command  # noqa: E402

sys.exit(command.main())
