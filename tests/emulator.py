"""Our Hopper kernels on a CPU: their sources, compiled by g++ with the PTX layer emulated (tests/emulation).

build() copies src, puts the emulated files in the place of src/ptx, turns kernel<<<...>>> into a call, and links a shared
library. Emulator(library) calls it with CPU tensors. What runs is right or wrong; its time says nothing.
"""

import ctypes
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launchers import Launchers

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ["-std=c++20", "-O2", "-march=native", "-fPIC", "-fvisibility=hidden", "-Wno-unknown-pragmas", "-Wno-psabi"]
LAUNCH = re.compile(r"(\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\(", re.DOTALL)


class BuildFailed(Exception):
    """A source that does not compile: tools/mutants tells it from a test that fails."""


def copy_sources(folder):
    """src with the emulated PTX layer, tests/gpu, and the emulator, under `folder`."""
    ignore = shutil.ignore_patterns("cpu", "binding", "__pycache__")
    for name in ("src", "tests/gpu", "tests/emulation"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for emulated in (folder / "tests/emulation/ptx").iterdir():
        shutil.copy(emulated, folder / "src/ptx")
    for path in (p for top in ("src/cuda", "tests") for p in (folder / top).rglob("*.cu*")):
        text = path.read_text().replace("extern __shared__", "extern")  # what stays shared is one static variable a block
        path.write_text(LAUNCH.sub(r"launch(\1, \2)(", text))


def build(folder, sources, program=False):
    """The library, or program, of the files that match `sources`, patterns relative to the root. Returns its path."""
    copy_sources(folder)
    files = [path for pattern in (*sources, "tests/emulation/*.cpp") for path in sorted(folder.glob(pattern))]
    compiler = [*(["ccache"] if shutil.which("ccache") else []), "g++"]
    include = ["-I", ".", "-I", "tests/emulation/include", "-include", "tests/emulation/device.h"]

    def compile_one(path):
        done = subprocess.run([*compiler, *OPTIONS, *include, "-x", "c++", "-c", path.relative_to(folder), "-o", f"{path.stem}.o"],
                              cwd=folder, capture_output=True, text=True, timeout=600)  # fmt: skip
        if done.returncode:
            raise BuildFailed(done.stderr)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, files))
    result = folder / "emulated"
    subprocess.run(["g++", *([] if program else ["-shared"]), "-o", result, *(f"{path.stem}.o" for path in files)],
                   cwd=folder, check=True)  # fmt: skip
    return result


class Emulator(Launchers):
    """The launchers of an emulated library, called with CPU tensors."""

    def __init__(self, library):
        super().__init__(library)
        self.library.emulator_configure.argtypes = [ctypes.c_uint64, ctypes.c_uint32]

    def configure(self, seed, processors):
        """The order of threads and of asynchronous work from now on, and how many blocks run at a time."""
        self.library.emulator_configure(seed, processors)

    def mask_plan(self, mask, plan, stream=None):
        super().mask_plan(mask, plan, stream)
        self.library.emulator_finish()
