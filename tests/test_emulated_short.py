"""The Hopper kernels for short sequences, forward and backward, without a GPU: both oracles over dims, lengths, masks, strides."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES, Case, inputs, make_mask
from oracle import INF, Call, check, check_counting, keep_of
from test_emulated_backward import HALVES, attention, emulator, pytestmark, runner  # noqa: F401

DIMS = ((32, 32), (1, 7), (20, 32), (33, 40), (64, 64), (64, 8), (8, 64))
LENGTHS = ((49, 49), (64, 64), (1, 1), (1, 64), (64, 1), (17, 33), (16, 48))


def hold(attention, name, mask=None, heads=(3, 3), lengths=(49, 49), dims=(32, 32), dtype=torch.bfloat16, band="full", batch=2,
         odd=False, **options):
    case = Case(f"short-{name}-{mask}-{dims}-{lengths}-{band}", batch, heads, lengths, dims, dtype, mask=mask or "", call=BANDS[band],
                **options)
    return check(inputs(case), case.call, runner(attention, planned=False, odd=odd))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(attention, dims, dtype):
    for lengths, band in zip(LENGTHS, itertools.cycle(BANDS)):
        hold(attention, "dims", lengths=lengths, dims=dims, dtype=dtype, band=band, lse_grad=True)


@pytest.mark.parametrize("band", BANDS)
def test_bands(attention, band):
    for lengths in LENGTHS:
        hold(attention, "bands", "random", lengths=lengths, band=band)


def test_one_size_more_is_not_short(attention):
    """65 queries or keys, 65 columns: the other kernels."""
    for lengths, dim in (((65, 64), 32), ((64, 65), 32), ((64, 64), 65)):
        hold(attention, "more", lengths=lengths, dims=(dim, dim))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_mask_kinds(attention, kind, dtype):
    for dim, band in ((32, "full"), (64, "causal")):
        hold(attention, "kinds", kind, dims=(dim, dim), dtype=dtype, band=band)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_masks_of_any_layout(attention, axes, strides):
    for kind in ("random", "bias_inf"):
        hold(attention, "layouts", f"{kind}:{axes or '-'}:{strides}", lengths=(40, 50))


@pytest.mark.parametrize("kind", ("bias", "bias32", "bias_inf", "all_inf", "lowest"))
@pytest.mark.parametrize("axes", ("bhqk", "hqk", "bqk", "qk"))
def test_gradient_of_a_mask(attention, axes, kind):
    """A plane for each (batch, head), or sums over one of them, or over both in a number of parts."""
    for lengths, batch, dtype in (((49, 49), 7, torch.bfloat16), ((64, 33), 2, torch.float16)):
        got = hold(attention, "gradient", f"{kind}:{axes}", lengths=lengths, batch=batch, dtype=dtype, mask_grad=True, lse_grad=True)
        case = Case(f"short-gradient-{kind}:{axes}-(32, 32)-{lengths}-full", batch, (3, 3), lengths, (32, 32), dtype, mask=f"{kind}:{axes}")
        x = inputs(case)
        keep = keep_of(x, Call()).expand(batch, 3, -1, -1)
        assert (got.grads["dmask"][~(keep.long().sum_to_size(x.mask.shape) > 0)] == 0).all(), "a removed score has a gradient"


def test_gradient_of_a_mask_at_64_columns(attention):
    for axes, lengths in itertools.product(("bhqk", "hqk", "qk"), ((64, 64), (1, 9))):
        hold(attention, "gradient", f"bias:{axes}", lengths=lengths, dims=(64, 64), mask_grad=True)


@pytest.mark.parametrize("mask", ("bias:k", "bias:q", "bias:hqk"))
def test_gradients_that_the_other_kernels_take(attention, mask):
    """A mask of one row or column, heads in groups: behind the same forward, with a plan of their own."""
    case = Case(f"short-others-{mask}", 2, (4, 2) if mask == "bias:hqk" else (2, 2), (40, 50), (32, 32), torch.bfloat16, mask=mask,
                mask_grad=True)  # fmt: skip
    check(inputs(case), case.call, runner(attention))


def test_only_the_mask_needs_a_gradient(attention):
    for axes in ("bhqk", "hqk"):
        case = Case(f"short-only-{axes}", 3, (2, 2), (49, 49), (32, 32), torch.bfloat16, mask=f"bias_inf:{axes}", mask_grad=True)
        x = inputs(case)
        want = runner(attention, planned=False)(x, Call()).grads["dmask"]
        mask = x.mask.detach().requires_grad_()
        out, _ = attention(x.q, x.k, x.v, mask, **Call().op_arguments(), planned=False)
        assert torch.equal(torch.autograd.grad(out, mask, x.grad_out)[0], want)


def test_grouped_heads(attention):
    for heads, band in itertools.product(((4, 2), (3, 1)), ("full", "causal")):
        hold(attention, "groups", heads=heads, band=band)


@pytest.mark.parametrize("layout, odd", (("offset", True), ("offset", False), ("bsh", True), ("packed", False)))
def test_layouts(attention, layout, odd):
    for dim in (32, 40, 33):
        hold(attention, "layouts", dims=(dim, dim), layout=(layout, "bhs", layout), odd=odd)


@pytest.mark.parametrize("grad", ("sum", "columns", "expand_seq"))
def test_gradients_as_autograd_gives_them(attention, grad):
    hold(attention, "grads", "random", grad=grad)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(attention, scale):
    for mask in ("random", "bias_inf"):
        x = inputs(Case("short-scale", 1, (2, 2), (49, 60), (32, 32), torch.float16, mask=mask))
        check(x, Call(scale=scale, is_causal=True), runner(attention, planned=False))


@pytest.mark.parametrize("magnitude", (1e2, 1e4))
def test_large_scores(attention, magnitude):
    x = inputs(Case(f"short-large{magnitude}", 1, (2, 2), (49, 60), (64, 64), torch.bfloat16))
    check(replace(x, q=(x.q * magnitude).bfloat16()), run=runner(attention))


@pytest.mark.parametrize("kind", ("random", "causal", "one_key", "rows_false"))
def test_counting(attention, kind):
    forward = partial(attention, planned=False)
    for dim, (seq_q, seq_k) in ((32, (49, 49)), (64, (64, 64)), (64, (30, 64))):
        keep = make_mask(kind, f"short-counting{dim}", (1, 2, seq_q, seq_k), torch.bfloat16)
        mask = torch.zeros(keep.shape, dtype=torch.bfloat16).masked_fill_(~keep, -INF)
        check_counting(1, 2, 2, seq_q, seq_k, dim, torch.bfloat16, mask=mask, call=Call(is_causal=True), forward=forward)
        check_counting(1, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=keep, call=Call(), forward=attention)  # heads in groups


def test_a_sequence_has_its_bits_in_any_batch(attention):
    """And at every call: out, lse and all gradients but that of a mask that batches share."""
    case = Case("short-batches", 5, (2, 2), (49, 49), (32, 32), torch.bfloat16, mask="bias:hqk", mask_grad=True)
    x = inputs(case)
    run = runner(attention, planned=False)
    whole = run(x, Call())
    for i in (0, 3):
        one = run(replace(x, q=x.q[i : i + 1], k=x.k[i : i + 1], v=x.v[i : i + 1], grad_out=x.grad_out[i : i + 1]), Call())
        assert torch.equal(one.out, whole.out[i : i + 1]) and torch.equal(one.lse, whole.lse[i : i + 1])
        assert all(torch.equal(one.grads[name], whole.grads[name][i : i + 1]) for name in ("dq", "dk", "dv"))
