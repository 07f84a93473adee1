"""The float32 Hopper kernels without a GPU: their sources on the emulator of tests/emulation, forward and backward, exact.

Out, lse and gradients against both oracles, over dims, lengths, bands, masks, heads and strides; poisoned outputs and scratch,
another order of threads at each call.
"""

import itertools
import platform
from dataclasses import replace

import pytest
import torch
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES, Case, inputs, make_mask
from emulator import Emulator, build
from oracle import INF, Call, Inputs, check, check_counting, generator, reference
from test_emulated_backward import attention, runner  # noqa: F401

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is tried on x86-64 alone")
CLASSES = (64, 128, 256)
DIMS = ((64, 64), (40, 64), (70, 33), (96, 96), (128, 128), (192, 128), (160, 192), (256, 256), (1, 200), (3, 1))


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """What `attention` runs on, in this module."""
    return Emulator(build(tmp_path_factory.mktemp("float32"), ["src/cuda/sm90/f32_*.cu", "tests/gpu/float32_shim.cu"]))


def hold(attention, name, heads=(2, 1), lengths=(130, 200), dims=(64, 64), band="full", batch=1, **more):
    case = Case(f"{name}-{dims}-{band}", batch, heads, lengths, dims, torch.float32, call=BANDS[band], **more)
    check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(attention, dims):
    for band, heads, lengths in (("full", (1, 1), (70, 140)), ("causal_br", (2, 1), (130, 100))):
        hold(attention, "dims", heads, lengths, dims, band, lse_grad=True)


@pytest.mark.parametrize("seq_q", (1, 63, 65, 129, 193))
def test_lengths(attention, seq_q):
    for seq_k, dim, band in zip((1, 2, 33, 64, 65, 129), itertools.cycle(CLASSES), itertools.cycle(("full", "causal_br"))):
        hold(attention, f"lengths-{seq_q}-{seq_k}", (2, 1), (seq_q, seq_k), (dim, dim), band)


@pytest.mark.parametrize("band", BANDS)
def test_bands(attention, band):
    for lengths, dim in (((200, 150), 64), ((129, 260), 128), ((70, 100), 256)):
        hold(attention, "bands", (2, 1), lengths, (dim, dim), band)


@pytest.mark.parametrize("layout", (("bsh",) * 3, ("packed",) * 3, ("offset", "bhs", "offset"), ("bhs", "offset", "bhs")), ids="-".join)
def test_layouts(attention, layout):
    for dim, band in ((64, "full"), (70, "causal")):
        hold(attention, "layouts", (4, 2), (130, 100), (dim, dim), band, batch=2, layout=layout)


@pytest.mark.parametrize("dim", (64, 70, 192))
def test_gradients_as_autograd_gives_them(attention, dim):
    """Stride 0 in some axes or all, another layout than out's, an odd address."""
    case = Case("strides", 1, (2, 1), (130, 200), (dim, dim), torch.float32)
    x = inputs(case)
    row, wide = x.grad_out[:, :, :1], torch.cat((x.grad_out, x.grad_out), 3)
    for grad in (torch.ones(1, 1, 1, 1).expand_as(x.grad_out), row.expand_as(x.grad_out), row[..., :1].expand_as(x.grad_out),
                 x.grad_out.transpose(1, 2).contiguous().transpose(1, 2), wide[..., 1 : dim + 1]):  # fmt: skip
        check(replace(x, grad_out=grad), case.call, runner(attention))


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(attention, scale):
    for dim in (64, 192):
        case = Case(f"scale{scale}", 1, (2, 2), (100, 300), (dim, dim), torch.float32, call=replace(BANDS["causal_br"], scale=scale))
        check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("dim", CLASSES)
def test_counting(attention, dim):
    for (seq_q, seq_k), call in zip(((65, 63), (127, 129), (193, 260)), (Call(), Call(is_causal=True), Call(window=(70, 3)))):
        check_counting(1, 2, 1, seq_q, seq_k, dim, torch.float32, call=call, forward=attention)


@pytest.mark.parametrize("kind", ("random", "granules", "document", "one_key"))
def test_counting_with_masks(attention, kind):
    for dim, (seq_q, seq_k) in ((64, (65, 129)), (128, (193, 160)), (256, (130, 130))):
        mask = make_mask(kind, f"counting{dim}", (1, 2, seq_q, seq_k), torch.float32)
        for given in (mask, torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -INF)):
            check_counting(1, 2, 1, seq_q, seq_k, dim, torch.float32, mask=given, forward=attention, mask_grad=False)


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_mask_kinds(attention, kind):
    dim = CLASSES[tuple(MASK_KINDS).index(kind) % 3]
    hold(attention, f"kinds-{kind}", (2, 1), (130, 260), (dim, dim), mask=kind)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_mask_layouts(attention, axes, strides):
    for kind in ("granules", "bias_inf"):
        mask = f"{kind}:{axes or '-'}:{strides}"
        hold(attention, f"mask-{mask}", (2, 1), (130, 140), (20, 20), batch=2, mask=mask)


@pytest.mark.parametrize("band", BANDS)
def test_masks_and_bands(attention, band):
    for mask in ("granules", "rows_false", "bias"):
        hold(attention, f"both-{mask}", (2, 1), (150, 130), (30, 30), band, mask=mask)


def test_many_tiles_of_several_heads(attention):
    for mask, band in (("", "causal"), ("granules", "full"), ("bias:bk", "causal")):
        hold(attention, f"tiles-{mask}", (4, 1), (300, 260), (64, 64), band, mask=mask)


@pytest.mark.parametrize("magnitude", (16.0, 1e2, 133120.0, 1e18))
@pytest.mark.parametrize("sign", (1, -1))
def test_equal_scores_of_any_magnitude(attention, sign, magnitude):
    """Also where the log-sum-exp has lost the logarithm of the sum."""
    for dim, call in itertools.product((64, 192), (Call(), Call(is_causal=True, bottom_right=True))):
        x = inputs(Case("equal", 1, (2, 1), (70, 100), (dim, dim), torch.float32))
        x.q, x.k = torch.full_like(x.q, sign * magnitude), torch.full_like(x.k, 0.7 * magnitude)
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out, _ = attention(*leaves, **call.op_arguments())
        dq, dk, dv = torch.autograd.grad(out, leaves, x.grad_out)
        keep = call.visible(70, 100).double()
        want = ((keep / keep.sum(1, keepdim=True)).T @ x.grad_out.double()).sum(1, keepdim=True)
        assert (dv.double() - want).abs().max() < 1e-4 * want.abs().max()
        if magnitude < 1e18:
            assert dq.isfinite().all() and dk.isfinite().all()


@pytest.mark.parametrize("magnitude", (1e2, 1e4))
def test_large_scores(attention, magnitude):
    for dim in (64, 192):
        x = inputs(Case(f"large{magnitude}", 1, (2, 2), (70, 100), (dim, dim), torch.float32))
        check(replace(x, q=x.q * magnitude), run=runner(attention))


def test_rows_that_no_key_sees(attention):
    x = Inputs(*(torch.randn(1, 2, rows, 64, generator=generator(f"blind{rows}")) for rows in (300, 100, 100)))
    x.grad_out = torch.randn(1, 2, 300, 64, generator=generator("blind"))
    check(x, Call(is_causal=True, bottom_right=True), runner(attention))


def test_bits_do_not_depend_on_the_batch_or_the_order(attention):
    x = inputs(Case("bits", 3, (4, 2), (200, 260), (128, 128), torch.float32))
    run = runner(attention)
    whole, again = run(x, Call(is_causal=True)), run(x, Call(is_causal=True))
    alone = run(replace(x, q=x.q[1:2], k=x.k[1:2], v=x.v[1:2], grad_out=x.grad_out[1:2]), Call(is_causal=True))
    for one, two, part in zip(*((r.out, r.lse, *r.grads.values()) for r in (whole, again, alone))):
        assert torch.equal(one, two) and torch.equal(one[1:2], part)


def test_long_sums_do_not_drift(attention):
    """Values of one sign: what the tensor cores cut off of every sum would add up over 4000 keys."""
    q, k = (torch.randn(1, 1, rows, 64, generator=generator(f"drift{rows}")) for rows in (20, 4000))
    x = Inputs(q, k, 1 + torch.rand(1, 1, 4000, 64, generator=generator("drift")), grad_out=torch.rand(1, 1, 20, 64, generator=generator("g")))
    check(x, run=runner(attention))
    got = runner(attention)(x, Call())
    want = torch.softmax(q.double() @ k.double().mT / 8, -1) @ x.v.double()
    assert (got.out.double() - want).abs().max() < 2e-6 * want.max()


def test_bad_numbers_of_removed_keys(attention):
    x = inputs(Case("bad", 1, (2, 2), (130, 260), (64, 64), torch.float32, grad=""))
    keep = torch.ones(1, 1, 130, 260, dtype=torch.bool)
    keep[..., 64:140] = keep[..., 200] = False
    bad = x.k.clone()
    bad[:, :, 64:140], bad[:, :, 200] = float("nan"), INF
    for mask in (keep, torch.zeros(keep.shape).masked_fill_(~keep, -INF)):
        for one, two in zip(attention(x.q, bad, x.v, mask, **Call().op_arguments()), attention(x.q, x.k, x.v, mask, **Call().op_arguments())):
            assert torch.equal(one, two)


def test_values_of_skipped_granules_are_not_read(attention):
    x = inputs(Case("skipped", 1, (2, 2), (130, 256), (64, 64), torch.float32, grad=""))
    keep = torch.ones(1, 1, 130, 256, dtype=torch.bool)
    keep[..., 128:] = False
    x.v[:, :, 128:] = float("nan")
    assert attention(x.q, x.k, x.v, keep, **Call().op_arguments())[0].isfinite().all()


@pytest.fixture
def tf32(emulator):
    emulator.library.allow_tf32(1)
    yield
    emulator.library.allow_tf32(0)


@pytest.mark.parametrize("dim", CLASSES)
def test_tf32(attention, tf32, dim):
    """Errors of TF32, not more; numbers that it holds stay what they are."""
    check_counting(1, 2, 1, 65, 129, dim, torch.float32, call=Call(is_causal=True), forward=attention)
    x = inputs(Case("tf32", 1, (2, 1), (70, 100), (dim, dim), torch.float32))
    got, want = runner(attention)(x, Call()), reference(x, Call())
    for name, one, other in (("out", got.out, want.out), *((n, got.grads[n], want.grads[n]) for n in got.grads)):
        error = ((one.double() - other).abs().max() / other.abs().max()).item()
        assert 1e-5 < error < 2e-3, (name, error)
