"""The PTX layer by itself: ptx_self_test.cu, compiled here and run."""

import re
import subprocess
from pathlib import Path

from hopper import needs_hopper, needs_nvcc

pytestmark = [needs_hopper, needs_nvcc]
ROOT = Path(__file__).resolve().parents[2]


def test_ptx_layer(tmp_path):
    program = tmp_path / "ptx_self_test"
    subprocess.run(["nvcc", "--options-file", ROOT / "src/cuda/nvcc_options.txt", "-o", program,
                    ROOT / "tests/gpu/ptx_self_test.cu"], check=True, timeout=180)
    answer = subprocess.run([program], capture_output=True, text=True, timeout=60)
    print(answer.stdout)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "ok    mma tf32\n" in answer.stdout
    widths = re.findall(r"struct Wgmma<(\d+)>", (ROOT / "src/ptx/wgmma_shapes.cuh").read_text())
    for width in widths:
        for form in ("ss", "rs"):
            for dtype in ("bfloat16", "float16"):
                assert f"ok    wgmma {form} m64n{width} {dtype}\n" in answer.stdout
