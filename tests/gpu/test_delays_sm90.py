"""The Hopper kernels, forward and backward, with random pauses in all of their roles and NaN in their shared memory: an error
that moves is a race. They are compiled here with FLASHSDPA_TEST_DELAYS (src/cuda/sm90/fwd_delays.cuh), without torch."""

import itertools
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hopper import needs_hopper, needs_nvcc
from launchers import MANY_QUERIES, OPEN, Launchers
from oracle import attention64, generator

pytestmark = [needs_hopper, needs_nvcc]
ROOT = Path(__file__).resolve().parents[2]
RUNS = 200
BATCH, HEADS, HEADS_KV = 2, 36, 12  # with 333 queries already more tiles than processors, so that the counter is used
DTYPES = {64: torch.bfloat16, 128: torch.float16, 256: torch.bfloat16}
ODD = {"tma": (), "odd": ("q", "k", "v", "out"), "odd_v": ("v",)}  # which tensors lie where TMA cannot reach them
CASES = [
    *itertools.product(DTYPES, (333, 1500), ("tma",), (MANY_QUERIES,)),
    (64, 1600, "tma", MANY_QUERIES),  # from 1536 keys on, D64 has tiles of its own
    *itertools.product(DTYPES, (333,), ("odd", "odd_v"), (MANY_QUERIES,)),
    *itertools.product(DTYPES, (333,), ("tma", "odd_v"), ((1, 3, 2), (2, 3, 3))),  # packed and split
]


def nvcc(*arguments):
    done = subprocess.run(["nvcc", *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Potential Performance Loss" not in done.stdout + done.stderr  # products one by one hide races


def build(folder):
    """The library of the CUDA kernels alone, with delays; its path. All files at once, as many as there are processors."""
    sources = [*sorted((ROOT / "src/cuda/sm90").glob("[fb]wd_*.cu")), *sorted((ROOT / "tests/gpu").glob("*ward_shim.cu"))]
    options = ["--options-file", ROOT / "src/cuda/nvcc_options.txt", "-I", ROOT]

    def compile_one(source):
        # Kernels with terms have no registers for delays; their roles are those of the others.
        delays = [] if "_terms_" in source.stem else ["-DFLASHSDPA_TEST_DELAYS"]
        nvcc(*options, *delays, "-c", source, "-o", folder / f"{source.stem}.o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))
    library = folder / "delays.so"
    nvcc("-shared", "-cudart", "static", "-o", library, *(folder / f"{source.stem}.o" for source in sources))
    return library


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    return Launchers(build(tmp_path_factory.mktemp("delays")))


@pytest.fixture
def delayed_forward(launchers):
    def forward(q, k, v, out, lse, counter, is_causal, way):
        band = (-OPEN, 0 if is_causal else OPEN)
        launchers.forward(q, k, v, out, lse, counter, band, stream=torch.cuda.current_stream().cuda_stream, way=way)

    return forward


def place(tensor, odd):
    """A copy on the GPU; `odd`: its base is 2 bytes past a multiple of 16."""
    flat = torch.empty(tensor.numel() + 8, dtype=tensor.dtype, device="cuda")[odd : odd + tensor.numel()]
    return flat.view(tensor.shape).copy_(tensor)


def within_tolerance(out, lse, q, k, v, is_causal):
    keep = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device="cuda")
    want, want_lse, _ = attention64(q.double(), k.double(), v.double(), None,
                                    (keep.tril() if is_causal else keep)[None, None], q.size(3) ** -0.5)
    error = (out.double() - want).abs().max().item()
    assert error < 0.02 * want.abs().max().item(), f"error {error}"  # not so either if it is NaN
    assert (lse.double() - want_lse).abs().max().item() < 1e-3


@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("dim, seq, layout, way", CASES)
def test_delays(delayed_forward, dim, seq, is_causal, layout, way):
    normal = generator(f"delays{dim}-{seq}")
    q, k, v = (place(torch.randn(BATCH, heads, seq, dim, generator=normal).to(DTYPES[dim]), name in ODD[layout])
               for name, heads in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV)))  # fmt: skip
    out, lse = place(q, "out" in ODD[layout]), torch.empty(BATCH, HEADS, seq, device="cuda")
    noise = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    counter = torch.full((1,), -1, dtype=torch.int32, device="cuda")
    busy = torch.cuda.Stream()

    first = None
    for counter_in_use, turn in itertools.product((counter, None), range(RUNS)):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        if turn % 3 == 0:  # other work takes processors, so that blocks start late and in another order
            with torch.cuda.stream(busy):
                noise @ noise
        delayed_forward(q, k, v, out, lse, counter_in_use, is_causal, way)
        if first is None:
            first = out.clone(), lse.clone()
            within_tolerance(*first, q, k, v, is_causal)
        same = torch.equal(out, first[0]) and torch.equal(lse, first[1])
        assert same, f"run {turn} {'with' if counter_in_use is not None else 'without'} the counter differs"
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("deterministic", (False, True), ids=("any order", "fixed order"))
@pytest.mark.parametrize("dim, seq, layout", [*itertools.product((64, 96, 128, 192, 256), (333,), ("tma",)), (128, 1500, "tma"),
                                              (64, 333, "odd"), (256, 333, "odd")])  # fmt: skip
def test_backward_delays(launchers, dim, seq, is_causal, layout, deterministic):
    """dk and dv have one order of additions; dq too if it is fixed, and else moves by rounding alone."""
    normal, dtype = generator(f"delays{dim}-{seq}"), DTYPES.get(dim, torch.bfloat16)
    tensors = {name: place(torch.randn(BATCH, heads, seq, dim, generator=normal).to(dtype), name in ODD[layout])
               for name, heads in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV), ("grad_out", HEADS))}  # fmt: skip
    q, k, v, grad_out = tensors.values()
    band, stream = (-OPEN, 0 if is_causal else OPEN), torch.cuda.current_stream().cuda_stream
    out, lse = torch.empty_like(q), torch.empty(BATCH, HEADS, seq, device="cuda")
    launchers.forward(q, k, v, out, lse, None, band, stream=stream)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    keep = torch.ones(seq, seq, dtype=torch.bool, device="cuda")
    want_out, _, _ = attention64(*wide, None, (keep.tril() if is_causal else keep)[None, None], dim**-0.5)
    want = torch.autograd.grad(want_out, wide, grad_out.double())
    noise, busy = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream()
    first = None
    for turn in range(RUNS // 2):
        grads = [place(torch.full_like(t, float("nan")), layout == "odd") for t in (q, k, v)]
        if turn % 3 == 0:
            with torch.cuda.stream(busy):
                noise @ noise
        launchers.backward(grad_out, q, k, v, out, lse, *grads, band=band, deterministic=deterministic, stream=stream)
        if first is None:
            first = grads
            for grad, exact in zip(grads, want):
                assert (grad.double() - exact).abs().max() < 0.02 * exact.abs().max()
        for grad, before, exact in zip(grads, first, (deterministic, True, True)):
            close = (grad.float() - before.float()).abs().max() <= 2**-7 * before.float().abs().max()
            assert torch.equal(grad, before) if exact else close, f"run {turn} differs"
    torch.cuda.synchronize()
