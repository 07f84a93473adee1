"""The Hopper forward with a mask: both oracles over kinds, broadcasts, strides, bands, heads, lengths; size, capture, streams."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES, Case, inputs, make_mask
from hopper import needs_hopper, on_the_gpu  # noqa: F401
from oracle import INF, Call, check, check_counting, generator, ops

import torch_flashsdpa

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def on_gpu(mask):
    """The same view of a copy of its whole storage: strides and offset kept."""
    storage = mask.new_empty(0, device="cpu").set_(mask.untyped_storage())
    return storage.cuda().as_strided(mask.size(), mask.stride(), mask.storage_offset())


def make(mask, name, shape, dtype):
    with torch.device("cpu"):
        return on_gpu(make_mask(mask, name, shape, dtype))


def hold(name, mask, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", batch=1):
    case = Case(f"{name}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, call=BANDS[band], grad="")
    x = inputs(case, "cuda")
    x.mask = make(mask, str(case), (batch, heads[0], *lengths), dtype)
    check(x, case.call)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_kinds(kind, dtype):
    hold("kinds", kind, dtype=dtype)
    hold("kinds", kind, dtype=dtype, lengths=(700, 1100), dims=(128, 128))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims):
    for mask, band in itertools.product(("document", "bias_inf"), ("full", "causal")):
        hold("dims", mask, dims=dims, band=band)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_layouts(axes, strides):
    for kind in ("granules", "bias_inf"):
        hold("layouts", f"{kind}:{axes or '-'}:{strides}", batch=2, lengths=(130, 300))


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for mask in ("granules", "window", "rows_false"):
        hold("bands", mask, lengths=(300, 200), band=band)


@pytest.mark.parametrize("seq_q", (1, 5, 63, 64, 65, 129, 1000))
def test_lengths(seq_q):
    for seq_k, mask in itertools.product((1, 63, 64, 65, 129, 1021), ("random", "causal", "bias", "padding:bk")):
        hold("lengths", mask, heads=(8, 2), lengths=(seq_q, seq_k), batch=2)


@pytest.mark.parametrize("seq_q", (1, 4, 16, 64))
@pytest.mark.parametrize("mask", ("padding:bk", "random", "bias", "random:bqk"))
def test_few_queries_on_long_keys(mask, seq_q):
    """Keys are split, and heads packed where one mask is for all."""
    for dim, batch in ((64, 1), (128, 4), (256, 1)):
        hold("few", mask, heads=(8, 2), lengths=(seq_q, 3000), dims=(dim, dim), batch=batch)


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("kind", ("random", "granules", "document", "causal", "one_key", "checkerboard", "single_true"))
def test_counting(kind, dim):
    for seq_q, seq_k in ((65, 129), (193, 385), (500, 320)):
        mask = make(kind, f"counting{dim}", (2, 2, seq_q, seq_k), torch.bfloat16)
        for call in (Call(), Call(is_causal=True)):
            for given in (mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
                check_counting(2, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=given, call=call, backward=False)


def test_bad_numbers_of_removed_keys():
    x = inputs(Case("bad", 1, (2, 2), (130, 260), (64, 64), torch.bfloat16, grad=""), "cuda")
    keep = torch.ones(1, 1, 130, 260, dtype=torch.bool)
    keep[..., 64:140] = False
    keep[..., 200] = False
    bias = torch.randn(1, 1, 130, 260).bfloat16().masked_fill_(~keep, -INF)
    bad = x.k.clone()
    bad[:, :, 64:140], bad[:, :, 200] = float("nan"), INF
    for mask in (keep, bias):
        want, got = (ops().forward(x.q, k, x.v, attn_mask=mask) for k in (x.k, bad))
        # Not bit for bit: a row's bad numbers may make it take another reference.
        assert all((a.float() - b.float()).abs().max() <= 2**-7 for a, b in zip(got, want))


def test_a_changed_mask_is_seen():
    """In place, in a graph's static input, and as another slice of one tensor."""
    g = generator("changed")
    q, k, v = (torch.randn(1, 2, 300, 64, generator=g, device="cpu").bfloat16().cuda() for _ in range(3))
    masks = (torch.rand(4, 1, 300, 300, generator=g, device="cpu") < 0.5).cuda()

    def want(mask):
        with torch_flashsdpa.sdpa_backend("stock"):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)

    static = masks[0].clone()
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        for mask in masks:
            static.copy_(mask)
            for given in (static, mask):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
                assert (out.float() - want(mask)).abs().max() < 0.03
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=static)
        for mask in masks:
            F.scaled_dot_product_attention(q, k, v, attn_mask=masks[0])  # eager work in between
            static.copy_(mask)
            graph.replay()
            assert (out.float() - want(mask)).abs().max() < 0.03


def test_a_mask_of_more_than_2_to_the_31_elements():
    seq = 49152
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).tril_()
    assert mask.numel() > 2**31
    q, k, v = (torch.randn(1, 1, seq, 64).bfloat16() for _ in range(3))
    out, lse = ops().forward(q, k, v, attn_mask=mask)
    want, want_lse = ops().forward(q, k, v, is_causal=True)
    assert (out.float() - want.float()).abs().max() < 0.02 and (lse - want_lse).abs().max() < 1e-4


def test_the_profiler_names_both_kernels():
    q, k, v = (torch.randn(1, 2, 256, 64).bfloat16() for _ in range(3))
    mask = torch.rand(1, 1, 256, 256) < 0.5
    ops().forward(q, k, v, attn_mask=mask)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops().forward(q, k, v, attn_mask=mask)
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profile.events())
    assert "flashsdpa_mask_plan_sm90" in names and "flashsdpa_fwd_sm90" in names
