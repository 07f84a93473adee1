"""The gradient of an additive mask on Hopper, without a GPU: against float64 over broadcasts, strides, dtypes, bands, heads, lengths."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BANDS, BROADCASTS, MASK_STRIDES, Case, inputs, make_mask
from oracle import INF, Call, check, check_counting, keep_of
from test_emulated_backward import HALVES, attention, emulator, pytestmark, runner  # noqa: F401

CLASSES = (64, 128, 256)
DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (256, 256))
KINDS = ("bias", "bias32", "bias_inf", "zeros", "all_inf", "lowest")


def case(name, mask, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", batch=1, **options):
    return Case(f"{name}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, mask=mask, mask_grad=True, call=BANDS[band], **options)


def hold(attention, *args, odd=False, **options):
    """Right, and exactly 0 where no score takes part."""
    its_case = case(*args, **options)
    x = inputs(its_case)
    got = check(x, its_case.call, runner(attention, odd=odd))
    keep = keep_of(x, its_case.call).expand(x.q.size(0), x.q.size(1), -1, -1)
    assert (got.grads["dmask"][~(keep.long().sum_to_size(x.mask.shape) > 0)] == 0).all(), "a removed score has a gradient"
    return got


@pytest.mark.parametrize("dim", CLASSES)
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_broadcasts(attention, axes, dim):
    for band in ("full", "causal"):
        hold(attention, "broadcasts", f"bias_inf:{axes or '-'}", batch=2, lengths=(130, 201), dims=(dim, dim), band=band)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(attention, kind, dtype):
    for axes, dim in zip(("bhqk", "hqk", "qk", "bk", "q"), itertools.cycle(CLASSES)):
        hold(attention, "kinds", f"{kind}:{axes}", batch=2, dims=(dim, dim), dtype=dtype, lse_grad=dim == 128)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
def test_strides(attention, strides):
    for axes, kind in (("hqk", "bias_inf"), ("bk", "bias32"), ("q", "bias"), ("bhqk", "bias")):
        hold(attention, "strides", f"{kind}:{axes}:{strides}", batch=2, heads=(2, 1), lengths=(130, 200))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(attention, dims):
    for axes, band in itertools.product(("hqk", "k"), ("full", "causal")):
        hold(attention, "dims", f"bias:{axes}", dims=dims, band=band)


@pytest.mark.parametrize("band", BANDS)
def test_bands(attention, band):
    """Tiles and visits that the band empties, beside those that the mask does."""
    for axes, lengths in itertools.product(("qk", "k", "q", "h"), ((300, 200), (129, 500))):
        hold(attention, "bands", f"bias_inf:{axes}", heads=(2, 1), lengths=lengths, band=band)


@pytest.mark.parametrize("seq_q", (1, 63, 65, 129, 300))
def test_lengths(attention, seq_q):
    dims, axes = itertools.cycle(CLASSES), itertools.cycle(("bhqk", "qk", "bhk", "q", "h"))
    for seq_k, kind in itertools.product((1, 63, 64, 65, 129, 400), ("bias", "bias_inf")):
        dim = next(dims)
        hold(attention, "lengths", f"{kind}:{next(axes)}", heads=(2, 1), lengths=(seq_q, seq_k), dims=(dim, dim))


@pytest.mark.parametrize("dim", CLASSES)
def test_many_visits(attention, dim):
    """Stages and slots go round; tiles that the plan empties between those that it does not."""
    for axes, heads, lengths in (("qk", (8, 2), (300, 300)), ("k", (4, 1), (700, 200)), ("q", (4, 4), (200, 700)),
                                 ("bhk", (8, 1), (200, 300)), ("bh", (8, 8), (130, 130))):  # fmt: skip
        hold(attention, "visits", f"bias:{axes}", batch=2, heads=heads, lengths=lengths, dims=(dim, dim))
    shape = (1, 1, 400, 600)
    x = replace(inputs(case("granules", "bias:qk", heads=(2, 2), lengths=shape[2:], dims=(dim, dim))))
    x.mask = torch.where(make_mask("granules", "holes", shape, torch.bfloat16), x.mask, -INF)
    check(x, run=runner(attention))


@pytest.mark.parametrize("dim", CLASSES)
def test_values_by_vectors(attention, dim):
    """Rows of values that start at multiples of 16 bytes, of many tiles one after the other; 328 keys end within a tile."""
    for mask, heads, band in (("bias:hqk", (2, 1), "full"), ("bias_inf:bhqk", (4, 2), "causal"), ("bias:qk", (2, 2), "full")):
        hold(attention, "vectors", mask, batch=2, heads=heads, lengths=(330, 328), dims=(dim, dim), band=band)


@pytest.mark.parametrize("dim", (64, 70, 192))
def test_tensors_that_tma_cannot_reach(attention, dim):
    for axes in ("hqk", "k"):
        hold(attention, "plain", f"bias:{axes}", lengths=(130, 200), dims=(dim, dim), layout=("offset", "bhs", "offset"), odd=True)


def test_gradients_as_autograd_gives_them(attention):
    """A grad_out that TMA cannot read is copied first."""
    for grad in ("sum", "columns", "expand_seq"):
        hold(attention, "grads", "bias:hqk", lengths=(130, 200), grad=grad)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(attention, scale):
    for axes, dim in itertools.product(("hqk", "k"), (64, 192)):
        x = inputs(case("scale", f"bias_inf:{axes}", heads=(2, 2), lengths=(100, 200), dims=(dim, dim), dtype=torch.float16))
        check(x, Call(scale=scale, is_causal=True), runner(attention))


@pytest.mark.parametrize("kind", ("random", "granules", "document", "causal", "one_key"))
def test_counting(attention, kind):
    for dim, (seq_q, seq_k) in ((64, (65, 129)), (128, (193, 260)), (256, (130, 130))):
        keep = make_mask(kind, f"counting{dim}", (1, 2, seq_q, seq_k), torch.bfloat16)
        mask = torch.zeros(keep.shape, dtype=torch.bfloat16).masked_fill_(~keep, -INF)
        check_counting(1, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=mask, call=Call(is_causal=True), forward=attention)


@pytest.mark.parametrize("dim", CLASSES)
def test_only_the_mask_needs_a_gradient(attention, dim):
    for axes in ("hqk", "bk"):
        x = inputs(case("only", f"bias_inf:{axes}", batch=2, lengths=(130, 200), dims=(dim, dim)))
        want = runner(attention, deterministic=True)(x, Call()).grads["dmask"]
        mask = x.mask.detach().requires_grad_()
        out, _ = attention(x.q, x.k, x.v, mask, **Call().op_arguments(), deterministic=True)
        assert torch.equal(torch.autograd.grad(out, mask, x.grad_out)[0], want)


@pytest.mark.parametrize("dim", CLASSES)
def test_always_the_same_bits(attention, dim):
    """Every sum has one order, whichever block takes which unit; parts of a tile wait for each other. Not asked for, and so
    the number of processors is drawn: with it the number of parts changes, and the sums of parts by their last bits."""
    for axes, band in (("qk", "full"), ("k", "causal"), ("q", "full"), ("", "full")):
        its_case = case("fixed", f"bias32:{axes or '-'}", batch=2, heads=(2, 1), lengths=(200, 300), dims=(dim, dim), band=band)
        x, run = inputs(its_case), runner(attention, deterministic=True)
        first = check(x, its_case.call, run).grads["dmask"]
        for _ in range(3):
            assert torch.equal(run(x, its_case.call).grads["dmask"], first)


@pytest.mark.parametrize("magnitude", (1e2, 1e4))
def test_large_scores(attention, magnitude):
    """Rows whose log-sum-exp has lost the logarithm of the sum."""
    for dim, axes in itertools.product((64, 192), ("hqk", "k")):
        x = inputs(case(f"large{magnitude}", f"bias_inf:{axes}", heads=(2, 2), lengths=(70, 100), dims=(dim, dim)))
        check(replace(x, q=(x.q * magnitude).bfloat16()), run=runner(attention))


def test_bad_numbers_of_removed_keys(attention):
    """NaN in K of keys that the mask removes reaches no element of its gradient, in V none of theirs."""
    for dim, axes in itertools.product(CLASSES, ("hqk", "k", "bk")):
        x = inputs(case("bad", f"bias:{axes}", heads=(2, 2), lengths=(130, 330), dims=(dim, dim)))
        x.mask[..., 100:256] = -INF
        bad, worse = replace(x, k=x.k.clone()), replace(x, v=x.v.clone())
        bad.k[:, :, 100:256] = worse.v[:, :, 110:140] = float("nan")
        want, got, rest = (runner(attention)(y, Call()).grads["dmask"].float() for y in (x, bad, worse))
        assert (got - want).abs().max() <= 2**-6 * want.abs().max()
        assert (rest[..., 100:256] == 0).all()
