"""The Hopper backward kernels without a GPU: their sources on the emulator of tests/emulation, behind the emulated forward.

Gradients of out and of lse against both oracles; poisoned outputs and scratch, another order of threads at each call.
"""

import itertools
import platform
from dataclasses import replace

import pytest
import torch
from cases import BANDS, Case, inputs
from emulator import Emulator, build
from launchers import band_of
from oracle import Call, Inputs, Result, check, check_counting, generator
from reference_plan import reference_plan

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is tried on x86-64 alone")
HALVES = (torch.bfloat16, torch.float16)
DIMS = ((64, 64), (40, 64), (96, 96), (70, 33), (128, 128), (192, 128), (160, 192), (256, 256), (1, 200))
CLASSES = (64, 96, 128, 192, 256)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    sources = ["src/cuda/sm90/[fb]wd_*.cu", "tests/gpu/forward_shim.cu", "tests/gpu/backward_shim.cu"]
    return Emulator(build(tmp_path_factory.mktemp("backward"), sources))


def poisoned(like, shape=None, odd=False):
    """NaN, in the layout of `like` or of `shape`; odd: from an address that TMA cannot reach."""
    if shape is None and not odd:
        return torch.full_like(like, float("nan"))
    shape = shape or like.shape
    return torch.full((shape.numel() + odd,), float("nan"), dtype=like.dtype)[int(odd):].view(shape)


@pytest.fixture
def attention(emulator, request):
    """attention(q, k, v, **arguments of the op): (out, lse), differentiable."""
    orders = generator(request.node.name)

    def shuffle(processors=0):
        seed, drawn = (int(torch.randint(high, (), generator=orders)) for high in (2**31, 4))
        emulator.configure(seed, processors or drawn + 1)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, mask, plan, scale, band, deterministic, odd):
            shuffle()
            out = poisoned(q, torch.Size((*q.shape[:3], v.size(3))))
            lse = torch.full(q.shape[:3], float("nan"))
            emulator.forward(q, k, v, out, lse, torch.full((1,), -1, dtype=torch.int32), band, scale,
                             mask=mask, mask_plan=plan)
            ctx.save_for_backward(q, k, v, out, lse, mask, plan)
            ctx.options = band, scale, deterministic, odd
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            *want_inputs, want_mask = ctx.needs_input_grad[:4]
            q, k, v, out, lse, mask, plan = ctx.saved_tensors
            band, scale, deterministic, odd = ctx.options
            if grad_out is None:
                grad_out = torch.zeros(1, 1, 1, 1, dtype=q.dtype).expand_as(out)
            grads = [poisoned(t, odd=odd) if any(want_inputs) else None for t in (q, k, v)]
            grad_mask = torch.full(mask.shape, float("nan"), dtype=mask.dtype) if want_mask else None
            shuffle(3 if deterministic else 0)  # the order is fixed for a number of processors
            run.scratch = emulator.backward(grad_out, q, k, v, out, lse, *grads, grad_lse, band, scale, deterministic,
                                            mask=mask, mask_plan=plan, grad_mask=grad_mask)  # fmt: skip
            return (*grads, grad_mask, *[None] * 5)

    def run(q, k, v, attn_mask=None, mask_plan=None, scale=None, *, deterministic=False, odd=False, planned=True, **band):
        if attn_mask is not None and mask_plan is None and planned:
            mask_plan = reference_plan(attn_mask)
        return Attention.apply(q, k, v, attn_mask, mask_plan, scale, band_of(**band, seq_q=q.size(2), seq_k=k.size(2)), deterministic, odd)

    return run


def runner(attention, **options):
    def run(x, call):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, *[x.mask] * x.mask_grad)]
        out, lse = attention(*leaves[:3], leaves[3] if x.mask_grad else x.mask, **call.op_arguments(), **options)
        pairs = [(o, c) for o, c in ((out, x.grad_out), (lse, x.grad_lse)) if c is not None]
        grads = torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs])
        return Result(out.detach(), lse.detach(), dict(zip(x.names(), grads)))

    return run


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_dims(attention, dims, dtype):
    for band, heads, lengths in zip(("full", "causal", "causal_br"), ((2, 2), (4, 2), (3, 1)), ((200, 333), (300, 300), (130, 257))):
        case = Case(f"D{dims}-{band}", 1, heads, lengths, dims, dtype, call=BANDS[band], lse_grad=True)
        check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("seq_q", (1, 63, 64, 65, 129, 193))
def test_lengths(attention, seq_q):
    dims = itertools.cycle((64, 128, 192, 96, 256))
    for seq_k, band in itertools.product((1, 2, 63, 64, 65, 113, 129), ("full", "causal_br")):
        dim = next(dims)
        case = Case(f"{seq_q}x{seq_k}-{band}", 1, (2, 1), (seq_q, seq_k), (dim, dim), HALVES[seq_k % 2], call=BANDS[band])
        check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("band", BANDS)
def test_bands(attention, band):
    for (seq_q, seq_k), dim in itertools.product(((300, 200), (129, 500)), (64, 96, 256)):
        case = Case(f"{band}-{seq_q}x{seq_k}", 1, (2, 1), (seq_q, seq_k), (dim, dim), torch.bfloat16, call=BANDS[band])
        check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("layout", ("bhs", "bsh", "packed"))
def test_many_tiles(attention, layout):
    for dim, band in itertools.product(CLASSES, ("full", "causal")):
        case = Case(f"tiles-{dim}-{band}", 2, (4, 2), (260, 300), (dim, dim), torch.bfloat16, call=BANDS[band], layout=(layout,) * 3)
        check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("dim", (64, 70, 128, 192))
def test_tensors_that_tma_cannot_reach(attention, dim):
    for layout, odd in (("offset", True), ("offset", False), ("bsh", True)):
        layouts = (layout, "bhs", layout)
        case = Case(f"plain-{layouts}", 1, (4, 2), (130, 200), (dim, dim), torch.bfloat16, call=BANDS["causal"], layout=layouts)
        check(inputs(case), case.call, runner(attention, odd=odd))


@pytest.mark.parametrize("dim", (64, 72, 192))
def test_gradients_as_autograd_gives_them(attention, dim):
    """Stride 0 in some axes or all, another layout than out's, an odd address."""
    case = Case("strides", 1, (2, 1), (130, 200), (dim, dim), torch.bfloat16)
    x = inputs(case)
    row, wide = x.grad_out[:, :, :1], torch.cat((x.grad_out, x.grad_out), 3)
    for grad in (torch.ones(1, 1, 1, 1, dtype=torch.bfloat16).expand_as(x.grad_out), row.expand_as(x.grad_out),
                 row[..., :1].expand_as(x.grad_out), x.grad_out.transpose(1, 2).contiguous().transpose(1, 2),
                 wide[..., 1 : dim + 1]):  # fmt: skip
        check(replace(x, grad_out=grad), case.call, runner(attention))


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(attention, scale):
    for dim in (64, 192):
        case = Case(f"scale{scale}", 1, (2, 2), (100, 300), (dim, dim), torch.float16, call=replace(BANDS["causal_br"], scale=scale))
        check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("dim", CLASSES)
def test_counting(attention, dim):
    for (seq_q, seq_k), dtype in zip(((65, 63), (127, 129), (193, 385)), itertools.cycle(HALVES)):
        for call in (Call(), Call(is_causal=True), Call(window=(70, 3))):
            check_counting(1, 2, 1, seq_q, seq_k, dim, dtype, call=call, forward=attention)


@pytest.mark.parametrize("magnitude", (16.0, 1e2, 133120.0, 1e18))
@pytest.mark.parametrize("sign", (1, -1))
def test_equal_scores_of_any_magnitude(attention, sign, magnitude):
    """Also where the log-sum-exp has lost the logarithm of the sum, and where a key that fills a block up would weigh more
    than a float holds (16: scores of -2048)."""
    for dim, call in itertools.product((64, 192), (Call(), Call(is_causal=True, bottom_right=True))):
        x = inputs(Case("equal", 1, (2, 1), (70, 100), (dim, dim), torch.bfloat16))
        x.q, x.k = torch.full_like(x.q, sign * magnitude), torch.full_like(x.k, magnitude)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out, _ = attention(*leaves, **call.op_arguments())
        dq, dk, dv = torch.autograd.grad(out, leaves, x.grad_out)
        keep = call.visible(70, 100).double()
        want = ((keep / keep.sum(1, keepdim=True)).T @ x.grad_out.double()).sum(1, keepdim=True)
        assert (dv.double() - want).abs().max() < 0.01 * want.abs().max()
        if magnitude < 1e18:
            assert dq.isfinite().all() and dk.isfinite().all()


@pytest.mark.parametrize("magnitude", (1e2, 1e4))
def test_large_scores(attention, magnitude):
    for dim in (64, 192):
        x = inputs(Case(f"large{magnitude}", 1, (2, 2), (70, 100), (dim, dim), torch.bfloat16))
        check(replace(x, q=(x.q * magnitude).bfloat16()), run=runner(attention))


@pytest.mark.parametrize("dim", CLASSES)
def test_deterministic(attention, dim):
    """A fixed order of additions gives the same bits whichever block comes first, and right ones; the sums of dq too, before
    they are rounded."""
    for band, heads in (("full", (2, 2)), ("causal", (4, 2)), ("window_64_63", (2, 1))):
        case = Case(f"fixed-{band}", 1, heads, (260, 400), (dim, dim), torch.bfloat16, call=BANDS[band])
        x, first, run = inputs(case), None, runner(attention, deterministic=True)
        for _ in range(4):
            got = run(x, case.call) if first else check(x, case.call, run)
            counter_words = 64
            bits = [*got.grads.values(), attention.scratch.view(torch.int32)[counter_words:]]
            first = first or bits
            assert all(torch.equal(a, b) for a, b in zip(bits, first))


def test_rows_that_no_key_sees(attention):
    x = Inputs(*(torch.randn(1, 2, rows, 64, generator=generator(f"blind{rows}")).bfloat16() for rows in (300, 100, 100)))
    x.grad_out = torch.randn(1, 2, 300, 64, generator=generator("blind")).bfloat16()
    check(x, Call(is_causal=True, bottom_right=True), runner(attention))
