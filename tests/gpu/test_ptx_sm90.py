"""The PTX layer by itself: ptx_self_test.cu, compiled here and run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                       reason="needs a Hopper GPU"),
    pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc"),
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def test_ptx_layer(tmp_path):
    program = tmp_path / "ptx_self_test"
    subprocess.run(["nvcc", "--options-file", ROOT / "src/cuda/nvcc_options.txt", "-o", program,
                    ROOT / "tests/gpu/ptx_self_test.cu"], check=True, timeout=180)
    answer = subprocess.run([program], capture_output=True, text=True, timeout=60)
    print(answer.stdout)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    widths = re.findall(r"struct Wgmma<(\d+)>", (ROOT / "src/ptx/wgmma_shapes.cuh").read_text())
    for width in widths:
        for form in ("ss", "rs"):
            for dtype in ("bfloat16", "float16"):
                assert f"ok    wgmma {form} m64n{width} {dtype}\n" in answer.stdout
