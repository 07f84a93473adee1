"""Our Hopper kernels on a CPU: their sources, compiled by g++ with the PTX layer emulated (tests/emulation).

build() copies src, puts the emulated files in the place of src/ptx, turns kernel<<<...>>> into a call, and links a shared
library. Emulator(library) calls it with CPU tensors. A run is right or wrong, never fast or slow.
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
LAUNCH = re.compile(r"(\w+)<<<(.*?)>>>\(", re.DOTALL)


def copy_sources(folder, source=ROOT):
    """src with the emulated ptx, and the emulator beside it."""
    tests = Path(__file__).resolve().parent
    shutil.copytree(source / "src", folder / "src", ignore=shutil.ignore_patterns("cpu", "binding"))
    shutil.copytree(tests / "emulation", folder / "emulation")
    for emulated in (folder / "emulation/ptx").iterdir():
        shutil.copy(emulated, folder / "src/ptx")
    for path in (folder / "src/cuda").rglob("*.cu*"):
        path.write_text(LAUNCH.sub(r"launch(\1, \2)(", path.read_text()))
    for shim in (tests / "gpu").glob("*_shim.cu"):
        shutil.copy(shim, folder)


def build(folder, sources, source=ROOT):
    """The library of these files of src/cuda/sm90 (glob patterns) and of the shims of tests/gpu named beside them."""
    copy_sources(folder, source)
    files = [path for pattern in sources for path in sorted((folder / "src/cuda/sm90").glob(pattern)) + sorted(folder.glob(pattern))]
    files += sorted((folder / "emulation").glob("*.cpp"))
    compiler = [*(["ccache"] if shutil.which("ccache") else []), "g++"]
    include = ["-I", ".", "-I", "emulation/include", "-include", "emulation/device.h"]

    def compile_one(path):
        done = subprocess.run([*compiler, *OPTIONS, *include, "-x", "c++", "-c", path.relative_to(folder), "-o", f"{path.stem}.o"],
                              cwd=folder, capture_output=True, text=True, timeout=600)  # fmt: skip
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, files))
    library = folder / "emulated.so"
    subprocess.run(["g++", "-shared", "-o", library, *(f"{path.stem}.o" for path in files)], cwd=folder, check=True)
    return library


class Emulator(Launchers):
    """The launchers of an emulated library, called with CPU tensors."""

    def __init__(self, library):
        super().__init__(library)
        self.library.emulator_configure.argtypes = [ctypes.c_uint64, ctypes.c_uint32]

    def configure(self, seed, processors):
        """The order of threads and of asynchronous work from now on, and how many blocks run at a time."""
        self.library.emulator_configure(seed, processors)
