"""Builds the binding (libflashsdpa_torch.so and _C.so) against the installed torch.

g++ and, where found, ninja do the work: no nvcc, no CMake, no CUDA header, and only the standard library here. CMake
calls this very script, and so does ``python -m torch_flashsdpa build`` after a torch upgrade.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
STAMP = "build.txt"  # beside the two libraries: what they were built from
# Sources that are compiled together. Parsing torch's headers is most of the time, so those that share the heavy ones
# share a compiler run. The unit `module` becomes _C.so, the others libflashsdpa_torch.so.
UNITS = {
    "ops": ("ops.cpp", "autograd.cpp", "autocast.cpp", "batching.cpp", "jvp.cpp", "dropout_factor.cpp", "execute.cpp"),
    "module": ("module.cpp",),
    "router": ("router.cpp", "refused_calls.cpp", "checks.cpp", "normalise.cpp", "selection.cpp", "auto_table.cpp", "report.cpp"),
}


class BuildError(RuntimeError):
    """The binding could not be built; the text says what failed and what to install or change."""


@functools.lru_cache(maxsize=None)
def torch_dir() -> Path:
    """Folder of the installed torch package, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed; install torch 2.11 or newer, then build again")
    return Path(spec.origin).parent


@functools.lru_cache(maxsize=None)
def torch_version() -> str:
    """``torch.__version__``, read from torch/version.py."""
    text = (torch_dir() / "version.py").read_text()
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if match is None:
        raise BuildError(f"{torch_dir() / 'version.py'} holds no __version__; reinstall torch")
    return match.group(1)


def tag() -> str:
    """Name of the folder that holds a binding for this torch and Python, such as ``torch2.13.0+cpu-cp311``."""
    return f"torch{torch_version()}-cp{sys.version_info.major}{sys.version_info.minor}"


def source_dir() -> Path:
    """Folder with params.h and binding/: the installed copy, or src/ of a checkout."""
    for folder in (PACKAGE / "_src", PACKAGE.parent / "src"):
        if (folder / "binding" / "ops.cpp").is_file():
            return folder
    raise BuildError(f"no binding sources in {PACKAGE / '_src'} or {PACKAGE.parent / 'src'}; reinstall torch_flashsdpa")


def default_out_dir() -> Path:
    """``lib/<tag>`` in the package, or a per-user cache folder where the package is read-only."""
    lib = PACKAGE / "lib"
    if os.access(lib if lib.is_dir() else PACKAGE, os.W_OK):
        return lib / tag()
    return Path.home() / ".cache" / "torch_flashsdpa" / tag()


def _cxx11_abi() -> str:
    config = torch_dir() / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    match = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", config.read_text()) if config.is_file() else None
    return match.group(1) if match else "1"


def _compile_flags(sources: Path) -> list[str]:
    include = torch_dir() / "include"
    return [
        "-std=c++20", "-O2", "-fPIC", "-Wall", "-Wno-unknown-pragmas",
        # torch's parallel_for is a template over its own OpenMP runtime; none is linked here, so torch's is used.
        "-fopenmp",
        f"-D_GLIBCXX_USE_CXX11_ABI={_cxx11_abi()}",
        f"-I{sources}", f"-I{sources / 'binding'}",
        "-isystem", str(include),
        "-isystem", str(include / "torch" / "csrc" / "api" / "include"),
        "-isystem", sysconfig.get_paths()["include"],
    ]


def _compile_commands(compiler: list[str], flags: list[str], sources: Path, work: Path) -> list[tuple[Path, Path, list[str]]]:
    """(source, object, command) of each unit."""
    commands = []
    for unit, names in UNITS.items():
        source = work / f"{unit}.cpp"
        text = "".join(f'#include "{sources / "binding" / name}"\n' for name in names)
        if not source.is_file() or source.read_text() != text:
            source.write_text(text)
        target = work / f"{unit}.o"
        commands.append((source, target, [*compiler, *flags, "-c", str(source), "-o", str(target)]))
    return commands


def _link_commands(compiler: list[str], work: Path, out: Path, lib: Path) -> list[tuple[Path, list[Path], list[str]]]:
    """(product, inputs, command) of the two libraries, in the order to link them."""
    torch_lib = torch_dir() / "lib"
    library, module = out / "libflashsdpa_torch.so", out / "_C.so"
    parts = [work / f"{unit}.o" for unit in UNITS if unit != "module"]
    common = [*compiler, "-shared", "-Wl,--as-needed", f"-L{torch_lib}", f"-L{lib}",
              *(f"-Wl,-rpath,{folder}" for folder in ("$ORIGIN", "$ORIGIN/..", lib, torch_lib))]
    libraries = ["-lflashsdpa", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [
        (library, [*parts, lib / "libflashsdpa.so"],
         [*common, *map(str, parts), "-o", str(library), "-Wl,-soname,libflashsdpa_torch.so", *libraries]),
        (module, [work / "module.o", library],
         [*common, str(work / "module.o"), "-o", str(module), f"-L{out}", "-lflashsdpa_torch", "-ltorch_python", *libraries]),
    ]


def _fingerprint(sources: Path, flags: list[str]) -> str:
    """What a finished binding depends on: its sources, torch, Python and the flags."""
    digest = hashlib.sha256(repr((tag(), flags)).encode())
    for path in [*sorted(sources.glob("*.h")), *sorted((sources / "binding").iterdir())]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _run(command: list[str], verbose: bool) -> None:
    if verbose:
        print(shlex.join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if verbose and done.stdout:
        print(done.stdout, flush=True)
    if done.returncode != 0:
        raise BuildError(f"command failed: {shlex.join(command)}\n{done.stdout}")


def _ninja() -> str | None:
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def _build_with_ninja(ninja: str, work: Path, compiles, links, verbose: bool) -> None:
    def escape(path) -> str:
        return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    def quote(command: list[str]) -> str:
        return shlex.join(command).replace("$", "$$")

    lines = ["rule compile", "  command = $cmd -MMD -MF $out.d", "  depfile = $out.d", "  deps = gcc",
             "  description = compile $in", "rule link", "  command = $cmd", "  description = link $out", ""]
    for source, output, command in compiles:
        lines += [f"build {escape(output)}: compile {escape(source)}", f"  cmd = {quote(command)}"]
    for product, inputs, command in links:
        lines += [f"build {escape(product)}: link {' '.join(map(escape, inputs))}", f"  cmd = {quote(command)}"]
    (work / "build.ninja").write_text("\n".join(lines) + "\n")
    _run([ninja, "-C", str(work), *(["-v"] if verbose else [])], verbose)


def _build_with_threads(compiles, links, verbose: bool) -> None:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for future in [pool.submit(_run, command, verbose) for _, _, command in compiles]:
            future.result()
    for _, _, command in links:
        _run(command, verbose)


def build(out_dir: str | os.PathLike | None = None, force: bool = False, verbose: bool = False, *,
          lib_dir: str | os.PathLike | None = None) -> Path:
    """Builds the binding for the installed torch and returns its folder.

    Args:
        out_dir: folder for the two libraries; by default ``lib/<tag>`` of the package, or a per-user cache folder.
        force: build although the libraries there were made from the same sources, torch and flags.
        verbose: print the commands and their output.
        lib_dir: folder of libflashsdpa.so; by default ``lib`` of the package.

    Raises:
        BuildError: no torch, no compiler, no libflashsdpa.so, or a command failed (with its output).
    """
    lib = Path(lib_dir) if lib_dir else PACKAGE / "lib"
    if not (lib / "libflashsdpa.so").is_file():
        raise BuildError(f"{lib / 'libflashsdpa.so'} is missing; build the kernels first: "
                         "cmake -S . -B build -G Ninja && cmake --build build, or reinstall torch_flashsdpa")
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "")
    if not compiler:
        raise BuildError("no C++ compiler found; install g++ 11 or newer, or set CXX")
    lib = lib.resolve()
    out = Path(out_dir).resolve() if out_dir else default_out_dir()
    sources = source_dir()
    flags = _compile_flags(sources)
    fingerprint = _fingerprint(sources, flags)
    products = [out / "libflashsdpa_torch.so", out / "_C.so"]
    stamp = out / STAMP
    if not force and all(p.is_file() for p in products) and stamp.is_file() and stamp.read_text() == fingerprint:
        return out

    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="torch_flashsdpa-") as work_name:
        work = Path(work_name)
        # A checkout keeps its object files, so that an edit recompiles what it touches.
        if sources == PACKAGE.parent / "src" and not force:
            work = PACKAGE.parent / "build" / f"binding-{tag()}"
            work.mkdir(parents=True, exist_ok=True)
        ccache = [found] if (found := shutil.which("ccache")) else []
        compiles = _compile_commands([*ccache, *compiler], flags, sources, work)
        links = _link_commands(compiler, work, out, lib)
        ninja = _ninja()
        if ninja:
            _build_with_ninja(ninja, work, compiles, links, verbose)
        else:
            _build_with_threads(compiles, links, verbose)
    stamp.write_text(fingerprint)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the binding of torch_flashsdpa for the installed torch.")
    parser.add_argument("--out", help="folder for libflashsdpa_torch.so and _C.so")
    parser.add_argument("--lib", help="folder of libflashsdpa.so")
    parser.add_argument("--force", action="store_true", help="build although nothing changed")
    parser.add_argument("--verbose", action="store_true", help="print the commands")
    parser.add_argument("--tag", action="store_true", help="print the name of the binding's folder and stop")
    args = parser.parse_args(argv)
    try:
        print(tag() if args.tag else build(args.out, args.force, args.verbose, lib_dir=args.lib))
    except BuildError as error:
        print(f"torch_flashsdpa: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
