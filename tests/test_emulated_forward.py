"""The Hopper forward kernel without a GPU: its sources on the emulator of tests/emulation, both oracles, fresh thread orders.

What runs here is what nvcc compiles, but for the PTX layer, which tests/gpu/test_ptx_sm90.py holds against the hardware.
"""

import itertools
import platform
from dataclasses import replace

import pytest
import torch
from cases import BANDS, Case, inputs
from emulator import Emulator, build
from launchers import MANY_QUERIES, band_of
from oracle import Call, Inputs, Result, check, check_counting, generator
from reference_plan import reference_plan

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is tried on x86-64 alone")
HALVES = (torch.bfloat16, torch.float16)
DIMS = ((64, 64), (40, 64), (96, 96), (70, 33), (128, 128), (192, 128), (160, 192), (256, 256), (1, 200))


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(build(tmp_path_factory.mktemp("forward"), ["src/cuda/sm90/fwd_*.cu", "tests/gpu/forward_shim.cu"]))


@pytest.fixture
def forward(emulator, request):
    """forward(q, k, v, **arguments of the op): (out, lse), both poisoned before; another order of threads each time."""
    orders = generator(request.node.name)

    def run(q, k, v, attn_mask=None, mask_plan=None, scale=None, *, odd=False, dynamic=True, way=MANY_QUERIES, terms={}, **band):
        if attn_mask is not None and mask_plan is None:
            mask_plan = reference_plan(attn_mask)
        seed, processors = (int(torch.randint(high, (), generator=orders)) for high in (2**31, 4))
        emulator.configure(seed, processors + 1)
        shape = (*q.shape[:3], v.size(3))
        out = torch.full((q.numel() // max(q.size(3), 1) * v.size(3) + odd,), float("nan"), dtype=q.dtype)[odd:].view(shape)
        lse = torch.full(shape[:3], float("nan"))
        counter = torch.full((1,), -1, dtype=torch.int32) if dynamic else None
        limits = band_of(**band, seq_q=q.size(2), seq_k=k.size(2))
        emulator.forward(q, k, v, out, lse, counter, limits, scale, way=way, mask=attn_mask, mask_plan=mask_plan, **terms)
        return out, lse

    return run


def runner(forward, **options):
    def run(x, call):
        return Result(*forward(x.q, x.k, x.v, x.mask, **call.op_arguments(), **options), {})

    return run


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_dims(forward, dims, dtype):
    for band, heads, lengths in zip(("full", "causal", "causal_br"), ((2, 2), (4, 2), (3, 1)), ((200, 333), (300, 300), (130, 257))):
        case = Case(f"D{dims}-{band}", 1, heads, lengths, dims, dtype, call=BANDS[band], grad="")
        check(inputs(case), case.call, runner(forward))


@pytest.mark.parametrize("seq_q", (1, 63, 64, 65, 129, 193))
def test_lengths(forward, seq_q):
    dims = itertools.cycle((64, 128))
    for seq_k, band in itertools.product((1, 2, 63, 64, 65, 113, 129), ("full", "causal_br")):
        dim = next(dims)
        case = Case(f"{seq_q}x{seq_k}-{band}", 1, (2, 1), (seq_q, seq_k), (dim, dim), HALVES[seq_k % 2], call=BANDS[band], grad="")
        check(inputs(case), case.call, runner(forward))


@pytest.mark.parametrize("band", BANDS)
def test_bands(forward, band):
    for (seq_q, seq_k), dim in itertools.product(((300, 200), (129, 500)), (64, 96)):
        case = Case(f"{band}-{seq_q}x{seq_k}", 1, (2, 1), (seq_q, seq_k), (dim, dim), torch.bfloat16, call=BANDS[band], grad="")
        check(inputs(case), case.call, runner(forward))


@pytest.mark.parametrize("dynamic", (True, False), ids=("counter", "in turn"))
@pytest.mark.parametrize("layout", ("bhs", "bsh", "packed"))
def test_many_tiles(forward, layout, dynamic):
    """Several tiles for each block, with and without the counter; D64 from 1536 keys on has tiles of its own."""
    for dims, lengths, band in (((64, 64), (300, 1600), "full"), ((64, 64), (500, 260), "causal"), ((192, 192), (260, 200), "causal")):
        case = Case(f"tiles-{dims}-{band}", 2, (4, 2), lengths, dims, torch.bfloat16, call=BANDS[band], layout=(layout,) * 3, grad="")
        check(inputs(case), case.call, runner(forward, dynamic=dynamic))


@pytest.mark.parametrize("layout", ("expand_batch", "expand_heads", "expand_seq"))
def test_broadcast_axes(forward, layout):
    layouts = ("bhs", layout, layout)
    case = Case(f"{layout}", 2, (4, 2), (130, 200), (64, 64), torch.bfloat16, call=BANDS["causal"], layout=layouts, grad="")
    check(inputs(case), case.call, runner(forward))


@pytest.mark.parametrize("dim", (64, 70, 128, 192))
def test_tensors_that_tma_cannot_reach(forward, dim):
    for layout, odd in (("offset", True), ("offset", False), ("bsh", True)):
        layouts = (layout, "bhs", layout)
        case = Case(f"plain-{layouts}", 1, (4, 2), (130, 200), (dim, dim), torch.bfloat16, call=BANDS["causal"], layout=layouts, grad="")
        check(inputs(case), case.call, runner(forward, odd=odd))


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(forward, scale):
    case = Case(f"scale{scale}", 1, (2, 2), (100, 300), (64, 64), torch.float16, call=replace(BANDS["causal_br"], scale=scale), grad="")
    check(inputs(case), case.call, runner(forward))


@pytest.mark.parametrize("order", (1, -1))
def test_running_maximum_rises_in_every_block(forward, order):
    for dim in (64, 128):
        q = torch.ones(1, 1, 70, dim, dtype=torch.bfloat16)
        k = (order * torch.linspace(-2, 2, 1000)[:, None] * torch.ones(dim)).bfloat16()[None, None]
        v = torch.randn(1, 1, 1000, dim, generator=generator(f"rise{dim}")).bfloat16()
        check(Inputs(q, k, v), run=runner(forward))


@pytest.mark.parametrize("dim", (64, 72))
def test_equal_scores_of_any_magnitude_weigh_the_same(forward, dim):
    """Some of the magnitudes leave a remainder above, some one below what a scaled reference rounds to."""
    v = torch.randn(1, 1, 300, dim, generator=generator("equal")).bfloat16()
    for magnitude in (1.0, 1e5, 133120.0, 1.7e5, 2.5e5, 4e5, 1e6, 1e18):
        q, k = (torch.full((1, 1, rows, dim), magnitude, dtype=torch.bfloat16) for rows in (65, 300))
        out, lse = forward(q, k, v, **Call().op_arguments())
        assert (out.float() - v.float().mean(2, keepdim=True)).abs().max() < 1e-2
        assert lse.isfinite().all()


def test_heads_in_sections(forward):
    """Three heads, two of which fit a section of the cache: keys that no query sees change only the order of tiles."""
    q, k, v = (torch.randn(1, 3, rows, 64, generator=generator("sections")).bfloat16() for rows in (300, 40000, 40000))
    long = forward(q, k, v, **Call(is_causal=True).op_arguments())
    short = forward(q, k[:, :, :300], v[:, :, :300], **Call(is_causal=True).op_arguments())
    # Not bit for bit: with that many keys D64 has other tiles.
    assert (long[0].float() - short[0].float()).abs().max() < 0.02 and (long[1] - short[1]).abs().max() < 1e-5


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
def test_counting(forward, dim):
    for (seq_q, seq_k), dtype in zip(((65, 63), (127, 129), (193, 385)), itertools.cycle(HALVES)):
        for call in (Call(), Call(is_causal=True), Call(window=(70, 3))):
            check_counting(1, 2, 1, seq_q, seq_k, dim, dtype, call=call, backward=False, forward=forward)


def test_bitwise_equal_in_any_order(forward):
    x = inputs(Case("orders", 1, (4, 2), (260, 300), (128, 128), torch.bfloat16, grad=""))
    results = [forward(x.q, x.k, x.v, **Call(is_causal=True).op_arguments()) for _ in range(20)]
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results[1:])
