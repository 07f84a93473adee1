"""Write docs/api.md from the docstrings of everything public.

    python tools/api_reference.py           # writes docs/api.md
    python tools/api_reference.py --check   # exit code 1 if it does not agree
"""

import importlib.util
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("torch_flashsdpa") is None:  # not installed: the checkout serves
    sys.path.append(str(ROOT))

PAGE = ROOT / "docs" / "api.md"
HEAD = """# API reference

Written by `tools/api_reference.py` from the docstrings. `torch_flashsdpa.X` is loaded when it is first used.
"""


def _entry(name, item, depth):
    """A heading, the signature, the docstring."""
    signature = f"{name}{inspect.signature(item)}" if callable(item) and not _bare_class(item) else name
    text = inspect.getdoc(item) or ""
    return f"{'#' * depth} `{name}`\n\n```text\n{signature}\n\n{text}\n```\n"


def _bare_class(item):
    """A class that users get and do not make."""
    return inspect.isclass(item)


def _members(name, cls):
    """The public methods and properties that the class itself defines and describes."""
    for key, value in vars(cls).items():
        value = getattr(value, "fget", None) or getattr(value, "func", None) or value
        if not key.startswith("_") and inspect.isfunction(value) and value.__doc__:
            yield _entry(f"{name}.{key}", value, 4)


def _listed(prefix, items):
    for name, item in items:
        yield _entry(f"{prefix}.{name}", item, 3)
        if inspect.isclass(item):
            yield from _members(name, item)


def reference():
    """The page as text."""
    import torch_flashsdpa
    from torch_flashsdpa import _doctor, integrations, profiler, profiling, report

    modules = {"integrations": integrations, "profiler": profiler}
    names = [name for name in torch_flashsdpa.__all__ if name not in modules]
    parts = [HEAD, "## torch_flashsdpa\n"]
    parts += _listed("torch_flashsdpa", [(name, getattr(torch_flashsdpa, name)) for name in names])
    for module_name, module in modules.items():
        parts.append(f"## torch_flashsdpa.{module_name}\n\n{inspect.getdoc(module)}\n")
        own = [(name, item) for name, item in vars(module).items()
               if not name.startswith("_") and getattr(item, "__module__", None) == module.__name__]  # fmt: skip
        parts += _listed(f"torch_flashsdpa.{module_name}", own)
    parts.append("## What they return\n")
    for cls in (report.Recorder, report.PlanShares, profiling.Profile, _doctor.Diagnosis):
        parts.append(_entry(cls.__name__, cls, 3))
        parts += _members(cls.__name__, cls)
    return "\n".join(parts)


def main(arguments):
    if "--check" in arguments:
        agrees = PAGE.exists() and PAGE.read_text() == reference()
        if not agrees:
            print("docs/api.md is not what the docstrings say; run `python tools/api_reference.py`")
        return int(not agrees)
    PAGE.write_text(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
