"""The emulator against the checks that the hardware passes (tests/gpu/ptx_self_test.cu), and the faults it must name."""

import platform
import subprocess

import pytest
from emulator import build

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is tried on x86-64 alone")
FAULTS = (  # in the order of tests/emulation/faulty.cu
    "",
    "deadlock",
    "too many arrivals at the mbarrier",
    "an mbarrier whose initialisation was not fenced",
    "is outside the block's",
    "the asynchronous proxy meets an unfenced ordinary write",
    "the asynchronous proxy meets an unfenced ordinary write",
    "a wait for products that were not committed",
    "a warpgroup product without a fence",
    "named barrier 1 is used with different counts",
    "threads of a warpgroup issue different products",
)


def test_the_self_test_of_the_ptx_layer(tmp_path):
    program = build(tmp_path, ["tests/gpu/ptx_self_test.cu"], program=True)
    answer = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.count("ok    wgmma") == 9 * 2 * 4 and "FAIL" not in answer.stdout


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return build(tmp_path_factory.mktemp("faulty"), ["tests/emulation/faulty.cu"], program=True)


@pytest.mark.parametrize("number, text", list(enumerate(FAULTS)))
def test_faults_are_named(faulty, number, text):
    answer = subprocess.run([faulty, str(number)], capture_output=True, text=True, timeout=60)
    said = answer.stdout.strip()
    assert text in said if text else said == "", said
