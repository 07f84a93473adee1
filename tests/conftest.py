"""What all tests share: the package (an installed one first, else the checkout) and the helpers of this folder are
importable, compiled code is cached in a folder of this run, and each test ends with stock attention."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.append(str(TESTS))
if importlib.util.find_spec("torch_flashsdpa") is None:
    sys.path.append(str(TESTS.parent))
# A cache left by an earlier run must not stand for what this one compiles.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="flashsdpa-inductor-"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin at barriers starve each other on a busy machine
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes, each of which imports torch
for _name in ("TORCH_FLASHSDPA", "TORCH_FLASHSDPA_LOG"):
    os.environ.pop(_name, None)

import pytest  # noqa: E402
import torch  # noqa: E402

import torch_flashsdpa  # noqa: E402

PACKAGE_ROOT = Path(torch_flashsdpa.__file__).resolve().parent.parent


def pytest_sessionstart(session):
    problem = torch_flashsdpa.status()["problem"]
    if problem is not None:
        pytest.exit(f"the tests need the compiled library: {problem}", returncode=3)


@pytest.fixture(autouse=True)
def stock_before_and_after():
    """Selection, compiled code and counters of one test do not reach the next."""
    yield
    torch_flashsdpa.disable()
    torch_flashsdpa.reset_routed_calls()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def routed():
    """routed(f, *args): how many executions of flashsdpa::forward one call of f causes."""

    def count(function, *args, **kwargs):
        before = torch_flashsdpa.routed_calls()
        function(*args, **kwargs)
        return torch_flashsdpa.routed_calls() - before

    return count


@pytest.fixture
def package_root():
    """The folder a fresh Python has to look in for the package under test. (A fixture: `conftest` as a module is that of
    whichever folder was collected last.)"""
    return PACKAGE_ROOT


@pytest.fixture
def run_python(tmp_path):
    """run_python(code, env={...}): the standard output of a fresh Python; fails the test if that exits with an error.

    The package comes from `package_root` (the one under test by default); with entry_point=True torch finds its entry
    point although it may not be installed.
    """

    def run(code, env=None, package_root=PACKAGE_ROOT, entry_point=False, check=True):
        paths = [str(package_root)]
        if entry_point:
            info = tmp_path / "site" / "torch_flashsdpa-0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-flashsdpa\nVersion: 0\n")
            (info / "entry_points.txt").write_text("[torch.backends]\nflashsdpa = torch_flashsdpa._autoload:autoload\n")
            paths.append(str(tmp_path / "site"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})}
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
        if check:
            assert process.returncode == 0, f"exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
        run.stderr = process.stderr
        return process.stdout.strip()

    return run
