"""The float32 Hopper kernels: both oracles over head dims, lengths, bands, masks, heads and layouts, forward and backward; TF32 where
torch allows its own products the same; streams, capture, equal bits. Everything is made on the GPU, also the float64 reference."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, BROADCASTS, GRAD_LAYOUTS, LAYOUTS, MASK_KINDS, Case, inputs
from hopper import capture, needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import (INF, Call, Inputs, check, check_counting, check_exact_zeros, generator, ops, reference, run_op,
                    run_sdpa)
from test_masks_sm90 import make

import torch_flashsdpa

pytestmark = needs_hopper
DIMS = (1, 8, 40, 64, 70, 96, 128, 160, 200, 256)
CLASSES = (64, 128, 256)
MIXED_DIMS = ((192, 128), (128, 192), (64, 256), (96, 33), (5, 70), (64, 1), (1, 64), (0, 8), (24, 0))
LENGTHS = (1, 2, 31, 33, 64, 65, 127, 129, 1000)
HEADS = ((2, 2), (4, 1), (6, 3), (7, 1))


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def poison():
    """NaN in freed blocks of the sizes that outputs and scratch memory of these tests ask for."""
    blocks = [torch.full((floats,), float("nan")) for floats in (2**8, 2**12, 2**14, 2**17, 2**20, 2**22) for _ in range(2)]
    del blocks


def hold(name, heads=(4, 2), lengths=(200, 300), dims=(64, 64), band="full", batch=2, mask="", **more):
    case = Case(f"{name}-{dims}-{band}", batch, heads, lengths, dims, torch.float32, call=BANDS[band], **more)
    x = inputs(case, "cuda")
    x.mask = make(mask, str(case), (batch, heads[0], *lengths), torch.float32) if mask else None
    poison()
    check(x, case.call)


def normal(name, *shape):
    return torch.randn(shape, generator=generator(name), device="cpu").cuda()


@pytest.mark.parametrize("dim", DIMS)
def test_dims(dim):
    for band, heads in zip(("full", "causal", "causal_br"), HEADS):
        hold("dims", heads, dims=(dim, dim), band=band, lse_grad=band == "causal")


@pytest.mark.parametrize("dims", MIXED_DIMS, ids=str)
def test_head_dims_of_q_and_v_differ(dims):
    for band in ("full", "causal"):
        hold("mixed", lengths=(300, 200), dims=dims, band=band, lse_grad=True)


@pytest.mark.parametrize("seq_q", LENGTHS)
def test_lengths(seq_q):
    dims, heads = itertools.cycle(DIMS[2:]), itertools.cycle(HEADS)
    for seq_k, band in itertools.product(LENGTHS, ("full", "causal", "causal_br")):
        dim = next(dims)
        hold(f"lengths-{seq_q}-{seq_k}", next(heads), (seq_q, seq_k), (dim, dim), band, batch=1)


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for lengths, dim in itertools.product(((300, 200), (129, 500), (513, 513)), CLASSES):
        hold("bands", (2, 1), lengths, (dim, dim), band)


@pytest.mark.parametrize("dim", CLASSES)
@pytest.mark.parametrize("length", (2048, 4096, 8192))
def test_long(dim, length):
    hold("long", (1, 1), (length, length), (dim, dim), "causal" if length == 4096 else "full", batch=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for dim, band in itertools.product((64, 70, 128), ("full", "causal")):
        hold(f"layouts-{layout}", dims=(dim, dim), band=band, layout=(layout,) * 3)


@pytest.mark.parametrize("grad", [g for g in GRAD_LAYOUTS if g])
def test_layouts_of_the_gradient(grad):
    for dim in (64, 70, 256):
        hold(f"grads-{grad}", dims=(dim, dim), grad=grad)


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_masks(kind):
    for dim, band in itertools.product(CLASSES, ("full", "causal")):
        hold(f"masks-{kind}", lengths=(300, 333), dims=(dim, dim), band=band, mask=kind)


@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_mask_broadcasts(axes):
    for kind, dim in itertools.product(("granules", "bias_inf"), (64, 128)):
        hold(f"broadcast-{kind}", (4, 2), (200, 260), (dim, dim), mask=f"{kind}:{axes or '-'}")


@pytest.mark.parametrize("dim", CLASSES)
def test_counting(dim):
    for (seq_q, seq_k), call in itertools.product(((65, 63), (127, 129), (500, 385)), (Call(), Call(is_causal=True), Call(window=(70, 3)))):
        check_counting(1, 4, 2, seq_q, seq_k, dim, torch.float32, call=call)
    for kind in ("random", "granules", "document"):
        mask = make(kind, f"counting{dim}", (1, 2, 193, 260), torch.float32)
        check_counting(1, 2, 1, 193, 260, dim, torch.float32, mask=mask)
        bias = torch.zeros(mask.shape).masked_fill_(~mask, -INF)
        check_counting(1, 2, 1, 193, 260, dim, torch.float32, mask=bias)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(scale):
    for dim in CLASSES:
        case = Case(f"scale{scale}", 1, (2, 2), (100, 300), (dim, dim), torch.float32, call=replace(BANDS["causal_br"], scale=scale))
        check(inputs(case, "cuda"), case.call)


@pytest.mark.parametrize("magnitude", (16.0, 133120.0, 1e18))
def test_equal_scores_of_any_magnitude(magnitude):
    """Also where the log-sum-exp has lost the logarithm of the sum: all kernels make the same bits of the same score."""
    for dim in CLASSES:
        q, k = torch.full((1, 2, 70, dim), magnitude), torch.full((1, 1, 100, dim), 0.7 * magnitude)
        v, grad = normal("v", 1, 1, 100, dim), normal("g", 1, 2, 70, dim)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        _, _, dv = torch.autograd.grad(ops().forward(*leaves)[0], leaves, grad)
        want = (grad.double().sum((1, 2)) / 100).expand_as(dv)
        assert (dv.double() - want).abs().max() < 1e-4 * want.abs().max()


def test_long_sums_do_not_drift():
    """Values of one sign: what the tensor cores cut off of every sum would add up over the keys. The 2x rule holds but for the
    roundings of 512 additions to one sum, which the math path has fewer of: 1.7e-6 of it at 8192 keys, 0.8e-6 there."""
    for dim in CLASSES:
        x = Inputs(normal("q", 1, 1, 300, dim), normal("k", 1, 1, 8192, dim), 1 + normal("v", 1, 1, 8192, dim).abs())
        got = run_op(x, Call())
        want = torch.softmax(x.q.double() @ x.k.double().mT * dim**-0.5, -1) @ x.v.double()
        assert (got.out.double() - want).abs().max() < 2e-6 * want.max()


def test_through_the_unchanged_call():
    for causal in (False, True):
        check(inputs(Case("sdpa", 2, (4, 2), (200, 200), (64, 64), torch.float32), "cuda"), Call(is_causal=causal), run_sdpa)


def test_nan_stays_where_it_is():
    q, k, v = (normal(f"nan{i}", 1, 2, 200, 64) for i in range(3))
    clean, _ = ops().forward(q, k, v, is_causal=True)
    bad = k.clone()
    bad[0, 1, 150] = float("nan")
    out, _ = ops().forward(q, bad, v, is_causal=True)
    assert torch.equal(out[0, 0], clean[0, 0]) and torch.equal(out[0, 1, :150], clean[0, 1, :150])
    assert out[0, 1, 150:].isnan().all()


def test_bits_do_not_depend_on_the_batch():
    q, k, v, grad = (normal(f"batch{i}", 5, 4, 300, 128) for i in range(4))

    def all_of(*tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True, batch_invariant=True):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return out, leaves

    out, leaves = all_of(q, k, v)
    whole = (out, *torch.autograd.grad(out, leaves, grad))
    out, leaves = all_of(*(t[3:4] for t in (q, k, v)))
    alone = (out, *torch.autograd.grad(out, leaves, grad[3:4]))
    assert all(torch.equal(a[3:4], b) for a, b in zip(whole, alone))


def test_capture():
    q, k, v = (normal(f"capture{i}", 2, 4, 300, 64).requires_grad_() for i in range(3))

    def step():
        out, _ = ops().forward(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    want = step()
    got, replay = capture(step)
    for t in got:
        t.fill_(float("nan"))
    replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


# --- TF32 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ((64, 64), (40, 70), (128, 128), (256, 256)), ids=str)
def test_tf32(tf32, dims):
    """Within four rounding steps of TF32, in norm. (The math path is no yardstick: cuBLAS takes TF32 for some sizes only.)"""
    cases = [("full", (300, 200), ""), ("causal", (513, 513), ""), ("window_20_5", (1000, 1000), ""), ("full", (300, 333), "random"),
             ("causal", (2000, 2000), "")]  # fmt: skip
    for band, lengths, mask in cases:
        case = Case(f"tf32-{dims}-{band}-{mask}", 1, (4, 2), lengths, dims, torch.float32, call=BANDS[band], lse_grad=True)
        x = inputs(case, "cuda")
        x.mask = make(mask, str(case), (1, 4, *lengths), torch.float32) if mask else None
        poison()
        got, want = run_op(x, case.call), reference(x, case.call)
        for name, ours, exact in (("out", got.out, want.out), ("lse", got.lse, want.lse),
                                  *((name, got.grads[name], want.grads[name]) for name in got.grads)):  # fmt: skip
            there = exact.isfinite()
            error = ((ours.double() - exact)[there].norm() / exact[there].norm()).item()
            assert error < 4 * 2**-11, f"{name} of {case} is off by {error:.2g}"
        check_exact_zeros(x, case.call, got)


def test_tf32_keeps_numbers_that_it_holds(tf32):
    check_counting(1, 2, 1, 193, 260, 64, torch.float32, call=Call(is_causal=True))


def test_precision_follows_the_setting_of_matmul(tf32):
    q, k, v = (normal(f"setting{i}", 1, 2, 300, 64) for i in range(3))
    rounded, _ = ops().forward(q, k, v)
    torch.set_float32_matmul_precision("highest")
    exact, _ = ops().forward(q, k, v)
    want = torch.softmax(q.double() @ k.double().mT / 8, -1) @ v.double()
    error, coarse = ((t.double() - want).abs().max().item() for t in (exact, rounded))
    assert error < 1e-6 < coarse < 1e-2
