"""What the tests of Hopper kernels share."""

import shutil

import pytest
import torch

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")


@pytest.fixture(autouse=True)
def on_the_gpu():
    """New tensors are on the GPU, and no gradient is recorded. For modules that import it."""
    if not IS_HOPPER:
        yield
        return
    with torch.device("cuda"), torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def on_the_gpu_with_gradients():
    """New tensors are on the GPU. For modules that import it."""
    if not IS_HOPPER:
        yield
        return
    with torch.device("cuda"):
        yield


def capture(run):
    """(what run() returns, replay): run() on another stream first, as torch asks, then recorded once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph.replay
