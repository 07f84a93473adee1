"""Activation without a change to the code, and what happens where the compiled binding is missing or broken."""

import shutil
from pathlib import Path

import pytest

import torch_flashsdpa
from torch_flashsdpa import _loader

ROUTED = (
    "import torch, torch.nn.functional as F\n"
    "q = torch.randn(1, 2, 20, 16)\n"
    "F.scaled_dot_product_attention(q, q, q)\n"
    "import torch_flashsdpa as t\n"
    "print(t.status()['default'], t.routed_calls())"
)


@pytest.fixture
def package(tmp_path):
    """A copy of the Python package without compiled libraries; returns the folder to put on the path."""
    copy = tmp_path / "copy" / "torch_flashsdpa"
    shutil.copytree(Path(torch_flashsdpa.__file__).parent, copy, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    return copy.parent


def folder_of_binding(package, tag):
    folder = package / "torch_flashsdpa" / "lib" / tag
    folder.mkdir(parents=True)
    return folder


def tag():
    return _loader.folders()[0].name


def test_import_activates_nothing_and_is_cheap(run_python):
    """The package loads no binding and no torch._dynamo, and without torch it needs next to nothing."""
    run_python(
        "import torch, sys; before = set(sys.modules); import torch_flashsdpa\n"
        "assert set(sys.modules) - before <= {'torch_flashsdpa'}, set(sys.modules) - before\n"
        "assert not torch_flashsdpa.is_enabled() and not torch_flashsdpa.status()['router']\n"
        "torch_flashsdpa.enable('flashsdpa')\n"
        "with torch_flashsdpa.sdpa_backend('flashsdpa'): torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)\n"
        "heavy = {'torch._dynamo', 'torch._inductor', 'torch.fx.experimental.symbolic_shapes', 'sympy', 'numpy', 'matplotlib'}\n"
        "new = {m for m in set(sys.modules) - before if not m.startswith('torch_flashsdpa')}\n"
        "assert not heavy & new and len(new) <= 8, new"
    )


def test_a_package_imported_twice_finds_the_flop_counter(run_python):
    """As after a tool that drops modules to load them anew."""
    run_python(
        "import sys, torch\n"
        "for turn in range(2):\n"
        "    import torch_flashsdpa; torch_flashsdpa.enable('flashsdpa')\n"
        "    for name in [name for name in sys.modules if name.startswith('torch_flashsdpa')]: del sys.modules[name]\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as mode:\n"
        "    torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3)\n"
        "assert mode.get_total_flops() == 4 * 2 * 4 * 4 * 8, mode.get_total_flops()"
    )


@pytest.mark.parametrize("before", [True, False], ids=["imported-before", "imported-after"])
def test_flop_counter_counts_ours_whenever_it_is_imported(run_python, before):
    """It is not imported for it, and what is seen of its module is what would be seen without us."""
    counter, ours = "import torch.utils.flop_counter as c", "import torch_flashsdpa as t; t.enable('flashsdpa')"
    loaded = "import sys; assert 'torch.utils.flop_counter' not in sys.modules"
    out = run_python(
        "import torch\n" + "\n".join([counter, ours, counter] if before else [ours, loaded, counter]) + "\n"
        "def count():\n"
        "    with c.FlopCounterMode(display=False) as mode:\n"
        "        torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 2, 4, 8)] * 3)\n"
        "    return {str(op): n for op, n in mode.get_flop_counts()['Global'].items()}\n"
        "import importlib, inspect\n"
        "print(count(), len(inspect.getsource(c)) > 1000, type(c.__loader__) is type(torch.__loader__), c.__spec__.loader is c.__loader__)\n"
        "importlib.reload(c); print(count())"
    )
    counted = {"flashsdpa.forward": 2 * 2 * 2 * 4 * 4 * 8}
    assert out.splitlines() == [f"{counted} True True True", f"{counted}"]


def test_unset_variable_costs_two_small_modules(run_python):
    """What `import torch` pays for the entry point: counted in modules, since a test must not depend on time."""
    out = run_python(
        "import sys, torch; print(sorted(m for m in sys.modules if m.startswith('torch_flashsdpa')))", entry_point=True
    )
    assert out == "['torch_flashsdpa', 'torch_flashsdpa._autoload']"


@pytest.mark.parametrize(
    "value, expected", [("1", "auto"), ("auto", "auto"), ("flashsdpa", "flashsdpa 1"), ("0", "stock 0"), ("fast", "stock 0")]
)
def test_environment_variable(run_python, value, expected):
    out = run_python(ROUTED, env={"TORCH_FLASHSDPA": value}, entry_point=True)
    assert out.startswith(expected)
    warned = "TORCH_FLASHSDPA='fast' is not known" in run_python.stderr
    assert warned == (value == "fast")


def test_autoload_off_is_told_by_doctor(run_python):
    environment = {"TORCH_FLASHSDPA": "flashsdpa", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    out = run_python(ROUTED + "; print(t.doctor())", env=environment, entry_point=True)
    assert out.startswith("stock 0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in out


CHECK_STOCK = (
    "import torch, warnings, torch.nn.functional as F, torch_flashsdpa as t\n"
    "with warnings.catch_warnings(record=True) as seen:\n"
    "    warnings.simplefilter('always')\n"
    "    t.enable()\n"
    "    with t.sdpa_backend('flashsdpa'):\n"
    "        F.scaled_dot_product_attention(*[torch.randn(1, 1, 4, 8)] * 3)\n"
    "assert [w.filename for w in seen] == ['<string>'] * 2, seen\n"
    "assert all('stays stock' in str(w.message) and '\\n' not in str(w.message) for w in seen)\n"
    "for strict in (lambda: t.enable(strict=True), lambda: t.sdpa_backend('auto', strict=True).__enter__(),\n"
    "               lambda: t.attention(*[torch.randn(1, 1, 4, 8)] * 3)):\n"
    "    try: strict()\n"
    "    except RuntimeError as error: assert 'torch_flashsdpa build' in str(error)\n"
    "    else: raise AssertionError\n"
    "assert not t.is_enabled() and t.routed_calls() == 0\n"
    "t.disable()\n"
    "with t.record_dispatch(): pass\n"
    "q = torch.randn(1, 1, 4, 8)\n"
    "assert t.explain(q, q, q).chosen == 'stock'\n"
    "assert not t.doctor().healthy\n"
    "print(t.explain(q, q, q).reasons[0])"
)


def test_missing_binding(run_python, package, tmp_path):
    out = run_python(CHECK_STOCK, package_root=package, env={"HOME": str(tmp_path)})
    assert out == f"no binding for {tag()} (found none); run `python -m torch_flashsdpa build`"


def test_sources_that_hide_an_installation_are_noticed(run_python, package, tmp_path):
    installed = tmp_path / "site" / "torch_flashsdpa"
    (installed / "lib").mkdir(parents=True)
    (installed / "lib" / "libflashsdpa.so").touch()
    # The first entry of the path after the import: the package under test may itself be installed on the path.
    code = f"import sys; import torch_flashsdpa as t; sys.path.insert(0, {str(installed.parent)!r}); print(t.doctor())"
    out = run_python(code, package_root=package, env={"HOME": str(tmp_path)})
    assert f"these sources hide the installed package in {installed.parent}; " in out and "python -P" in out


def test_binding_for_another_torch(run_python, package, tmp_path):
    (folder_of_binding(package, "torch1.0.0-cp27") / "_C.so").write_bytes(b"")
    out = run_python(CHECK_STOCK, package_root=package, env={"HOME": str(tmp_path)})
    assert out == f"no binding for {tag()} (found only bindings for torch1.0.0-cp27); run `python -m torch_flashsdpa build`"


def test_broken_binding(run_python, package, tmp_path):
    (folder_of_binding(package, tag()) / "_C.so").write_bytes(b"no library")
    out = run_python(CHECK_STOCK, package_root=package, env={"HOME": str(tmp_path)})
    assert "_C.so cannot be loaded" in out and "torch_flashsdpa build --force" in out


def test_binding_without_the_kernels(run_python, package, tmp_path):
    folder = folder_of_binding(package, tag())
    for name in ("_C.so", "libflashsdpa_torch.so"):
        # Under a changed name, so that the built-in search path of the original cannot find the kernels either.
        content = (_loader.load().path.parent / name).read_bytes()
        (folder / name).write_bytes(content.replace(b"libflashsdpa.so", b"libflashsdpb.so"))
    out = run_python(CHECK_STOCK, package_root=package, env={"HOME": str(tmp_path)})
    assert "cannot be loaded" in out and "libflashsdpb.so" in out


@pytest.mark.parametrize("fault", ["missing binding", "syntax error", "warnings are errors"])
def test_import_torch_never_breaks(run_python, package, tmp_path, fault):
    if fault == "syntax error":
        (package / "torch_flashsdpa" / "selection.py").write_text("def broken(")
    environment = {"TORCH_FLASHSDPA": "1", "HOME": str(tmp_path)}
    if fault == "warnings are errors":
        environment["PYTHONWARNINGS"] = "error::RuntimeWarning"
    out = run_python("import torch; print(torch.ones(2).sum().item())", env=environment, package_root=package, entry_point=True)
    assert out == "2.0"
    assert ("stays stock" in run_python.stderr) == (fault != "warnings are errors")


def test_import_without_torch(run_python, package):
    """The package itself must not fail where torch cannot be imported."""
    out = run_python(
        "import sys; sys.modules['torch'] = None; import torch_flashsdpa; print(torch_flashsdpa.__version__)",
        package_root=package,
    )
    assert out == torch_flashsdpa.__version__
