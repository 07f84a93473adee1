"""Finds and loads the compiled binding. Nothing here raises for a binding that is missing, built for another torch or
broken: the result says in one line what is wrong, and attention stays stock."""

import ctypes
import importlib.machinery
import importlib.util
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from ._build import tag

PACKAGE = Path(__file__).parent
REMEDY = "python -m torch_flashsdpa build"


@dataclass(frozen=True)
class Library:
    """The outcome of loading: `module` is torch_flashsdpa._C, or None with the `problem` in one line."""

    module: ModuleType | None
    path: Path | None = None
    problem: str | None = None
    searched: list = field(default_factory=list)


def folders():
    """Where a binding for this torch and Python may lie: in the package, or, where that is read-only, in the user's cache."""
    return [PACKAGE / "lib" / tag(), Path.home() / ".cache" / "torch_flashsdpa" / tag()]


def kernel_library():
    """The path of libflashsdpa.so, which every binding shares."""
    return PACKAGE / "lib" / "libflashsdpa.so"


def hidden_installation():
    """The installed package that these sources, found first on sys.path, stand in front of; None if there is none."""
    for entry in sys.path:
        package = Path(entry or ".").resolve() / PACKAGE.name
        if package != PACKAGE.resolve() and (package / "lib" / kernel_library().name).exists():
            return package
    return None


def _other_builds(searched):
    builds = {found.parent.name for folder in searched for found in folder.parent.glob("*/_C*.so")}
    return sorted(builds - {tag()})


def _import_binding(path):
    if kernel_library().exists():
        # Loaded first by full path, so that a binding outside the package finds it by its name.
        ctypes.CDLL(str(kernel_library()))
    name = "torch_flashsdpa._C"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def _load():
    try:
        import torch  # noqa: F401  its libraries must be in the process before the binding's
    except Exception as error:
        return Library(None, problem=f"torch cannot be imported: {error}")
    try:
        searched = folders()
        path = next((folder / "_C.so" for folder in searched if (folder / "_C.so").exists()), None)
        if path is None:
            others = _other_builds(searched)
            found = f"found only bindings for {', '.join(others)}" if others else "found none"
            return Library(None, None, f"no binding for {tag()} ({found}); run `{REMEDY}`", searched)
        try:
            return Library(_import_binding(path), path, None, searched)
        except Exception as error:
            reason = " ".join(str(error).split())
            return Library(None, path, f"{path} cannot be loaded ({reason}); run `{REMEDY} --force`", searched)
    except Exception as error:  # an unreadable home folder and the like
        return Library(None, None, f"the search for a binding failed ({error}); run `{REMEDY}`")


_lock = threading.RLock()
_library = None


def load():
    """The loaded library, the same object on every call; the first call loads it and connects it to torch."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
                if _library.module is not None:
                    _connect(_library.module)
    return _library


def binding():
    """torch_flashsdpa._C. Raises RuntimeError, naming the remedy, where there is none."""
    library = load()
    if library.module is None:
        raise RuntimeError(f"torch_flashsdpa: {library.problem}")
    return library.module


def _connect(_C):
    """What the binding needs from Python once: the hook, the table of "auto", FLOP formulas, the log."""
    from . import _hook, auto_table, flops, report

    _hook.connect(_C)
    _C.set_auto_table(auto_table.rows())
    flops.register()
    report.log_from_environment()
