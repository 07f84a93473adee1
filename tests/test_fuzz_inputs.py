"""Ten thousand random calls (fuzzer.py) in processes of their own: a crash, a hang or an exception that is not meant for a
user fails the test, which names the seed and the call."""

import os
import subprocess
import sys
from pathlib import Path

import fuzzer
import pytest
import torch_flashsdpa
from oracle import SEED

CALLS = 10000
PROCESSES = 2


def test_no_argument_ends_the_process():
    package_root = str(Path(torch_flashsdpa.__file__).resolve().parents[1])
    command = [sys.executable, "-X", "faulthandler", fuzzer.__file__, str(SEED)]
    processes = [
        subprocess.Popen([*command, str(first), str(CALLS), str(PROCESSES)], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": package_root})
        for first in range(PROCESSES)
    ]
    try:
        for process in processes:
            out, errors = process.communicate(timeout=400)
            lines = out.splitlines() or ["before the first call"]
            if process.returncode != 0:
                pytest.fail(f"exit code {process.returncode} in seed {SEED}, {lines[-1]}\n{errors[-3000:]}")
            served, refused = map(int, lines[-1].split()[1:])
            assert min(served, refused) > CALLS / PROCESSES / 10, "most calls are of one kind"
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"a call hangs in seed {SEED}, {(error.stdout or b'').decode().splitlines()[-1:]}")
    finally:
        for process in processes:
            process.kill()
