"""The emulator against the checks that the hardware passes (tests/gpu/ptx_self_test.cu), and what it must notice."""

import platform
import subprocess

import pytest
from emulator import build

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is tried on x86-64 alone")


def test_the_self_test_of_the_ptx_layer(tmp_path):
    answer = subprocess.run([build(tmp_path, ["tests/gpu/ptx_self_test.cu"], program=True)], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.count("ok    wgmma") == 24 and "FAIL" not in answer.stdout
