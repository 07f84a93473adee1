"""The Hopper forward with a mask, without a GPU: both oracles over kinds, broadcasts, strides, bands, heads and lengths."""

import itertools

import pytest
import torch
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES, Case, inputs, make_mask
from oracle import INF, Call, check, check_counting, generator
from reference_plan import reference_plan
from test_emulated_forward import HALVES, emulator, forward, pytestmark, runner  # noqa: F401

DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (256, 256))


def hold(forward, name, mask, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", batch=1, **options):
    case = Case(f"{name}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, mask=mask, call=BANDS[band], grad="")
    check(inputs(case), case.call, runner(forward, **options))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_kinds(forward, kind, dtype):
    hold(forward, "kinds", kind, dtype=dtype)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(forward, dims):
    for mask, band in itertools.product(("document", "bias_inf"), ("full", "causal")):
        hold(forward, "dims", mask, dims=dims, band=band)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_layouts(forward, axes, strides):
    for kind in ("granules", "bias_inf"):
        hold(forward, "layouts", f"{kind}:{axes or '-'}:{strides}", batch=2, heads=(2, 1), lengths=(130, 200))


@pytest.mark.parametrize("band", BANDS)
def test_bands(forward, band):
    """A plan and a band together: blocks that only one of them rules out, tiles that both empty."""
    for mask in ("granules", "window", "rows_false"):
        hold(forward, "bands", mask, lengths=(300, 200), band=band)


@pytest.mark.parametrize("seq_q", (1, 63, 65, 129, 300))
def test_lengths(forward, seq_q):
    for seq_k, mask in itertools.product((1, 63, 64, 65, 129, 400), ("random", "causal", "bias")):
        hold(forward, "lengths", mask, heads=(2, 1), lengths=(seq_q, seq_k))


@pytest.mark.parametrize("mask", ("padding", "random", "bias", "rows_false:bhk", "all_false", "random:k", "random:q"))
def test_few_queries(forward, mask):
    """One granule of queries: keys split, and, under one mask for all heads, heads packed."""
    for lengths, splits in (((1, 700), 3), ((5, 300), 2), ((16, 130), 1)):
        for dims in ((64, 64), (128, 128), (256, 256)):
            hold(forward, "few", mask, heads=(4, 2), lengths=lengths, dims=dims, way=(1, 1, splits), batch=2)
        if mask.endswith((":k", ":q")):
            hold(forward, "few", mask, heads=(6, 2), lengths=lengths, way=(1, 3, splits), batch=2)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(forward, scale):
    for mask in ("random", "bias_inf"):
        x = inputs(Case(f"scale-{mask}", 1, (2, 2), (100, 200), (64, 64), torch.float16, mask=mask, grad=""))
        check(x, Call(scale=scale, is_causal=True), runner(forward))


@pytest.mark.parametrize("kind", ("random", "granules", "document", "causal", "one_key"))
def test_counting(forward, kind):
    for dim, (seq_q, seq_k) in ((64, (65, 129)), (128, (193, 260)), (256, (130, 130))):
        mask = make_mask(kind, f"counting{dim}", (1, 2, seq_q, seq_k), torch.bfloat16)
        for call in (Call(), Call(is_causal=True)):
            for given in (mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
                check_counting(1, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=given, call=call, backward=False, forward=forward)


@pytest.mark.parametrize("value", (torch.finfo(torch.bfloat16).min, -1e30, -1e4))
def test_rows_of_one_large_bias_average_v(forward, value):
    """A finite bias is arithmetic: where all are equal it cancels, however large."""
    x = inputs(Case("large", 1, (2, 2), (70, 200), (64, 64), torch.bfloat16, grad=""))
    x.mask = torch.full((1, 1, 70, 200), value, dtype=torch.bfloat16)
    out, lse = forward(x.q * 0, x.k, x.v, x.mask, **Call().op_arguments())
    assert (out.float() - x.v.float().mean(2, keepdim=True)).abs().max() < 1e-2 and lse.isfinite().all()


def test_bad_numbers_of_removed_keys(forward):
    """NaN and infinity in K where the mask removes the score: in granules skipped, described by bits, and with values."""
    x = inputs(Case("bad", 1, (2, 2), (130, 260), (64, 64), torch.bfloat16, grad=""))
    keep = torch.ones(1, 1, 130, 260, dtype=torch.bool)
    keep[..., 64:140] = False
    keep[..., 200] = False
    bias = torch.randn(1, 1, 130, 260, generator=generator("bad")).bfloat16().masked_fill_(~keep, -INF)
    bad = x.k.clone()
    bad[:, :, 64:140], bad[:, :, 200] = float("nan"), INF
    for mask in (keep, bias):
        want = forward(x.q, x.k, x.v, mask, **Call().op_arguments())
        got = forward(x.q, bad, x.v, mask, **Call().op_arguments())
        # Not bit for bit: a row's bad numbers may make it take another reference.
        assert all((a.float() - b.float()).abs().max() <= 2**-7 for a, b in zip(got, want))


def test_values_of_skipped_granules_are_not_read(forward):
    x = inputs(Case("skipped", 1, (2, 2), (130, 256), (64, 64), torch.bfloat16, grad=""))
    keep = torch.ones(1, 1, 130, 256, dtype=torch.bool)
    keep[..., 128:] = False
    x.v[:, :, 128:] = float("nan")
    out, _ = forward(x.q, x.k, x.v, keep, reference_plan(keep), **Call().op_arguments())
    assert out.isfinite().all()


def test_heads_in_sections(forward):
    """Five heads, two of which fit a section of the cache, so that the last section has three: removed keys change only the order."""
    q, k, v = (torch.randn(1, 5, rows, 64, generator=generator("sections")).bfloat16() for rows in (300, 40000, 40000))
    keep = torch.arange(40000)[None, None, None] < 300
    long = forward(q, k, v, keep, **Call().op_arguments())
    short = forward(q, k[:, :, :300], v[:, :, :300], keep[..., :300], **Call().op_arguments())
    assert (long[0] == short[0]).all() and (long[1] == short[1]).all()
