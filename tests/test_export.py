"""docs/export.md, run as a reader would: exported and packaged in one process, loaded in another, then in a C++ program."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch_flashsdpa import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "export.md"
CODE = {"python": [], "cpp": [], "bash": []}
for _language, _code in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
    CODE[_language].append(_code)
# Packaging one program does not pay for a precompiled header.
QUICK = "import torch._inductor.config\ntorch._inductor.config.aot_inductor.precompile_headers = False\n"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor and the C++ program need g++")


def run(command, folder, package_root):
    environment = {**os.environ, "PYTHONPATH": str(package_root),
                   "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}  # fmt: skip
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def succeed(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the first block has been run; the process that ran it is gone."""
    import torch_flashsdpa

    folder = tmp_path_factory.mktemp("export")
    succeed([sys.executable, "-c", QUICK + CODE["python"][0]], folder, Path(torch_flashsdpa.__file__).resolve().parent.parent)
    return folder


def test_loaded_in_a_fresh_process(folder, package_root):
    succeed([sys.executable, "-c", CODE["python"][1]], folder, package_root)


def test_loaded_by_a_cpp_program(folder, package_root):
    """Both lengths: our op ran, once each, and gave what PyTorch's own gives in the same program."""
    (folder / "attend.cpp").write_text(CODE["cpp"][0])
    lines = succeed(["bash", "-e", "-c", CODE["bash"][0]], folder, package_root).splitlines()
    told = [re.fullmatch(r"length (\d+): calls of ours (\d+), largest difference from stock (\S+)", line) for line in lines]
    assert [match and (int(match[1]), int(match[2])) for match in told] == [(70, 1), (200, 2)]
    assert all(0 < float(match[3]) < 2e-6 for match in told)
    needed = succeed(["ldd", "attend"], folder, package_root)
    assert "libflashsdpa_torch.so" in needed and "libtorch_python" not in needed and "libpython" not in needed


def test_a_package_without_our_ops_says_what_is_missing(folder, package_root):
    code = "import torch\ntorch._inductor.aoti_load_package('attend.pt2')"
    done = run([sys.executable, "-c", code], folder, package_root)
    assert done.returncode == 1 and "flashsdpa" in done.stderr


def test_where(capsys, monkeypatch):
    assert cli.main(["build", "--where"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "libflashsdpa_torch.so").exists()
    from torch_flashsdpa import _loader

    monkeypatch.setattr(_loader, "_library", _loader.Library(None, problem="none here"))
    assert cli.main(["build", "--where"]) == 1
    assert capsys.readouterr() == ("", "torch_flashsdpa: none here\n")
