"""The Hopper backward with a mask, without a GPU: both oracles over kinds, broadcasts, strides, bands, heads and lengths."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES, Case, inputs, make_mask
from oracle import INF, Call, check, check_counting
from test_emulated_backward import HALVES, attention, emulator, pytestmark, runner  # noqa: F401

CLASSES = (64, 128, 256)
DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (256, 256))


def hold(attention, name, mask, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", batch=1,
         lse_grad=False, **options):
    case = Case(f"{name}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, mask=mask, call=BANDS[band], lse_grad=lse_grad)
    check(inputs(case), case.call, runner(attention, **options))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_kinds(attention, kind, dtype):
    for dim in CLASSES if dtype == torch.bfloat16 else (64,):
        hold(attention, "kinds", kind, dims=(dim, dim), dtype=dtype, lse_grad=dim == 128)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(attention, dims):
    for mask, band in itertools.product(("document", "bias_inf"), ("full", "causal")):
        hold(attention, "dims", mask, dims=dims, band=band)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_layouts(attention, axes, strides):
    for kind, dim in itertools.product(("granules", "bias_inf"), (64, 256)):
        hold(attention, "layouts", f"{kind}:{axes or '-'}:{strides}", batch=2, heads=(2, 1), lengths=(130, 200), dims=(dim, dim))


@pytest.mark.parametrize("band", BANDS)
def test_bands(attention, band):
    """A plan and a band together: blocks that only one of them rules out, tiles that both empty."""
    for mask, dim in itertools.product(("granules", "window", "rows_false", "bias32"), CLASSES):
        hold(attention, "bands", mask, lengths=(300, 200), band=band, dims=(dim, dim))


@pytest.mark.parametrize("seq_q", (1, 63, 65, 129, 300))
def test_lengths(attention, seq_q):
    dims = itertools.cycle(CLASSES)
    for seq_k, mask in itertools.product((1, 63, 64, 65, 129, 400), ("random", "causal", "bias")):
        dim = next(dims)
        hold(attention, "lengths", mask, heads=(2, 1), lengths=(seq_q, seq_k), dims=(dim, dim))


@pytest.mark.parametrize("dim", CLASSES)
def test_many_tiles(attention, dim):
    """Many blocks of queries a tile, of several heads: the stages go round, also where what the loader told does."""
    for mask, band in itertools.product(("granules", "all_true", "bias", "granules:bk"), ("full", "causal")):
        hold(attention, "tiles", mask, batch=2, heads=(4, 1), lengths=(900, 300), dims=(dim, dim), band=band)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", CLASSES)
def test_values_by_vectors(attention, dim, dtype):
    """Rows of values that start at multiples of 16 bytes; 300 and 328 keys end within a block."""
    for mask, keys, batch in (("bias_inf", 328, 1), ("bias:hqk", 128, 2), ("bias32", 300, 1)):
        hold(attention, "vectors", mask, heads=(4, 2), lengths=(330, keys), dims=(dim, dim), dtype=dtype, batch=batch)


@pytest.mark.parametrize("dim", (64, 70, 192))
def test_tensors_that_tma_cannot_reach(attention, dim):
    for mask in ("granules", "bias_inf"):
        case = Case(f"plain-{mask}", 1, (4, 2), (130, 200), (dim, dim), torch.bfloat16, mask=mask, layout=("offset", "bhs", "offset"))
        check(inputs(case), case.call, runner(attention, odd=True))


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(attention, scale):
    for mask, dim in itertools.product(("random", "bias_inf"), (64, 192)):
        case = Case(f"scale-{mask}", 1, (2, 2), (100, 200), (dim, dim), torch.float16, mask=mask)
        check(inputs(case), Call(scale=scale, is_causal=True), runner(attention))


@pytest.mark.parametrize("kind", ("random", "granules", "document", "causal", "one_key"))
def test_counting(attention, kind):
    for dim, (seq_q, seq_k) in ((64, (65, 129)), (128, (193, 260)), (256, (130, 130))):
        mask = make_mask(kind, f"counting{dim}", (1, 2, seq_q, seq_k), torch.bfloat16)
        for call in (Call(), Call(is_causal=True)):
            for given in (mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
                check_counting(1, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=given, call=call, mask_grad=False,
                               forward=attention)  # fmt: skip


@pytest.mark.parametrize("dim", CLASSES)
def test_deterministic(attention, dim):
    """Who adds to a block of queries follows from the plan; the sums before rounding have the same bits in any order of blocks."""
    for mask, band, heads in (("granules", "full", (2, 2)), ("window", "causal", (4, 2)), ("random:bk", "full", (2, 1)),
                              ("bias:bq", "window_64_63", (2, 1)), ("document:qk", "full", (2, 2))):
        case = Case(f"fixed-{mask}", 1, heads, (260, 400), (dim, dim), torch.bfloat16, mask=mask, call=BANDS[band])
        x, first, run = inputs(case), None, runner(attention, deterministic=True)
        for _ in range(4):
            got = run(x, case.call) if first else check(x, case.call, run)
            counter_words = 64
            bits = [*got.grads.values(), attention.scratch.view(torch.int32)[counter_words:]]
            first = first or bits
            assert all(torch.equal(a, b) for a, b in zip(bits, first))


@pytest.mark.parametrize("magnitude", (1e2, 1e4))
def test_large_scores(attention, magnitude):
    """Rows whose log-sum-exp has lost the logarithm of the sum, with keys that the mask removes."""
    for dim, mask in itertools.product((64, 192), ("rows_false", "bias_inf")):
        x = inputs(Case(f"large{magnitude}-{mask}", 1, (2, 2), (70, 100), (dim, dim), torch.bfloat16, mask=mask))
        check(replace(x, q=(x.q * magnitude).bfloat16()), run=runner(attention))


@pytest.mark.parametrize("magnitude", (1e2, 133120.0))
def test_equal_scores_of_any_magnitude(attention, magnitude):
    """Where the log-sum-exp has lost the logarithm of the sum, the keys that the mask keeps are counted, and no others."""
    for dim, kind in itertools.product((64, 192), ("random", "bias_inf")):
        x = inputs(Case(f"equal-{kind}", 1, (2, 1), (70, 100), (dim, dim), torch.bfloat16, mask=kind))
        keep = x.mask if x.mask.dtype == torch.bool else x.mask != -INF
        mask = x.mask if x.mask.dtype == torch.bool else torch.zeros_like(x.mask).masked_fill_(~keep, -INF)
        leaves = [t.detach().requires_grad_() for t in (torch.full_like(x.q, magnitude), torch.full_like(x.k, magnitude), x.v)]
        out, _ = attention(*leaves, mask, **Call().op_arguments())
        dv = torch.autograd.grad(out, leaves, x.grad_out)[2]
        weights = keep.double() / keep.double().sum(-1, keepdim=True).clamp(min=1)
        want = (weights.transpose(-1, -2) @ x.grad_out.double()).sum(1, keepdim=True)
        assert (dv.double() - want).abs().max() < 0.01 * want.abs().max()


def test_bad_numbers_of_removed_keys(attention):
    """NaN in K and V of keys that are skipped reaches no gradient of the others; in K where bits or values remove the score, not
    those of K and V."""
    for dim in CLASSES:
        x = inputs(Case("bad", 1, (2, 2), (130, 330), (dim, dim), torch.bfloat16))
        keep = torch.ones(1, 1, 130, 330, dtype=torch.bool)
        keep[..., 128:256] = False
        bad = replace(x, k=x.k.clone(), v=x.v.clone())
        bad.k[:, :, 128:256] = bad.v[:, :, 128:256] = float("nan")
        part = keep.clone()
        part[..., 300] = False
        worse = replace(x, k=x.k.clone())
        worse.k[:, :, 300] = float("nan")
        for mask, given, names in ((keep, bad, ("dq", "dk", "dv")), (part, worse, ("dk", "dv"))):
            for m in (mask, torch.ones_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
                want = runner(attention)(replace(x, mask=m), Call()).grads
                got = runner(attention)(replace(given, mask=m), Call()).grads
                for name in names:
                    assert (got[name].float() - want[name].float()).abs().max() <= 2**-6 * want[name].float().abs().max(), name
