"""Soft cap, slopes, sinks and batch invariance on the Hopper kernels: the float64 oracle for each and all together, gradients
too."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BANDS, Case, inputs, make_mask, placed
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import INF, Call, Inputs, check, generator, ops

import torch_flashsdpa
from torch_flashsdpa.profiler import kernels_run

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
DIMS = ((64, 64), (40, 20), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
TERMS = {"softcap": dict(softcap=2.0), "slopes": dict(slopes="h"), "sinks": dict(sinks=True)}
ALL = dict(softcap=3.0, slopes="bh", sinks=True)


def make(name, band="full", lengths=(200, 333), dims=(64, 64), heads=(4, 2), dtype=torch.bfloat16, batch=2, mask="",
         softcap=0.0, slopes="", sinks=False, grad="dense", layout="bhs", scale=None):
    """(inputs on the GPU, call)."""
    call = replace(BANDS[band], softcap=softcap, scale=scale)
    case = Case(f"{name}-{band}-{lengths}-{dims}-{mask}", batch, heads, lengths, dims, dtype, call=call, layout=(layout,) * 3,
                grad=grad, lse_grad=bool(grad), slopes=slopes, sinks=sinks)  # fmt: skip
    x = inputs(case, "cuda")
    if mask:
        with torch.device("cpu"):
            x.mask = placed(make_mask(mask, str(case), (batch, heads[0], *lengths), dtype), "cuda")
    return x, call


def hold(*arguments, **options):
    return check(*make(*arguments, **options))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_each(term, dtype):
    for band, lengths in itertools.product(("full", "causal", "window_20_5"), ((200, 333), (700, 700))):
        hold(term, band, lengths, dtype=dtype, **TERMS[term])


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims):
    for dtype, band in itertools.product(HALVES, ("causal", "full")):
        hold("dims", band, dims=dims, dtype=dtype, **ALL)


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for lengths in ((150, 300), (300, 150)):
        hold("bands", band, lengths, **ALL)


@pytest.mark.parametrize("mask", ("random", "bias_inf", "padding:bk", "granules", "rows_false", "all_false", "random:k", "bias:hq"))
def test_masks(mask):
    for band, dims in itertools.product(("full", "causal"), ((64, 64), (128, 128), (256, 256))):
        hold("masks", band, mask=mask, dims=dims, **ALL)


@pytest.mark.parametrize("seq_q", (1, 5, 63, 65, 129, 1000))
def test_lengths(seq_q):
    for seq_k in (1, 63, 64, 65, 129, 1021):
        hold("lengths", "causal_br", (seq_q, seq_k), heads=(8, 1), **ALL)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(scale):
    for mask, terms in itertools.product(("", "random", "bias_inf"), (ALL, dict(sinks=True))):
        hold("scales", "causal", mask=mask, scale=scale, dtype=torch.float16, **terms)


@pytest.mark.parametrize("layout", ("bsh", "packed", "offset", "expand_heads"))
def test_layouts(layout):
    hold("layouts", "causal", layout=layout, **ALL)


@pytest.mark.parametrize("softcap", (0.05, 50.0, 1e4))
def test_caps(softcap):
    """From one that leaves little of the scores to one that should not be seen."""
    hold("caps", softcap=softcap, scale=1.0, dtype=torch.float16)


@pytest.mark.parametrize("sink", (-1e4, -50.0, 50.0, 1e4))
def test_sinks_of_any_size(sink):
    x, call = make(f"sink{sink}", sinks=True)
    x.sinks = x.sinks + sink
    check(x, call)


def test_rows_without_a_key_are_all_the_sinks():
    x, _ = make("blind", grad="", sinks=True)
    mask = torch.zeros(1, 1, 1, x.k.size(2), dtype=torch.bool)
    q, sinks = x.q.requires_grad_(), x.sinks.requires_grad_()
    out, lse = ops().forward(q, x.k, x.v, attn_mask=mask, sinks=sinks)
    assert (out == 0).all() and (lse - sinks.detach()[None, :, None]).abs().max() < 1e-5
    weight = torch.randn_like(lse)
    dq, dsinks = torch.autograd.grad(lse, (q, sinks), weight)
    assert (dq == 0).all() and torch.allclose(dsinks, weight.sum((0, 2)), atol=1e-4)
    out, lse = ops().forward(x.q, x.k, x.v, attn_mask=mask, sinks=torch.full((x.q.size(1),), -INF))
    assert (out == 0).all() and (lse == -INF).all()


def test_slopes_far_from_the_first_key():
    """Positions that float32 holds, but not half precision."""
    x, call = make("far", "causal_br", (1, 9000), slopes="h")
    x.slopes = x.slopes.abs() + 0.01
    check(x, call)


def test_large():
    """Many tiles for each block: the backward's sums and the forward's rows, against plain PyTorch in float32."""
    q, k, v, grad = (torch.randn(2, 8, 3000, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    slopes, sinks = torch.rand(8) * 0.02, torch.randn(8, requires_grad=True)

    def plain(q, k, v, sinks):
        scores = 20 * (q @ k.transpose(-1, -2) * 128**-0.5 / 20).tanh()
        scores = scores - slopes[:, None, None] * (torch.arange(3000)[:, None] - torch.arange(3000)).abs()
        scores = scores.masked_fill(torch.ones(3000, 3000, dtype=torch.bool).triu(1), -INF)
        return torch.cat([scores, sinks[:, None, None].expand(2, 8, 3000, 1)], -1).softmax(-1)[..., :-1] @ v

    leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
    out = torch_flashsdpa.attention(q, k, v, is_causal=True, softcap=20.0, alibi_slopes=slopes, sinks=sinks)
    got = out, *torch.autograd.grad(out, (q, k, v, sinks), grad)
    out = plain(*leaves, sinks)
    want = out, *torch.autograd.grad(out, (*leaves, sinks), grad.float())
    for a, b in zip(got, want):
        assert (a.float() - b).abs().max() < 0.02 * b.abs().max()


def test_the_kernels_that_run():
    q, k, v = (torch.randn(1, 2, 200, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with kernels_run() as kernels:
        torch_flashsdpa.attention(q, k, v, softcap=5.0).sum().backward()
    assert "flashsdpa_fwd_sm90" in kernels and "flashsdpa_bwd_sm90" in kernels


def test_a_sequence_in_any_batch():
    """Bit for bit, gradients too, whatever kernel and splits a batch of this size would get."""
    for lengths, heads in (((1, 3000), (8, 2)), ((5, 700), (8, 2)), ((700, 900), (4, 2))):
        x, _ = make("any", lengths=lengths, heads=heads, batch=7)

        def run(b):
            leaves = [t[b].detach().requires_grad_() for t in (x.q, x.k, x.v)]
            options = dict(return_lse=True, batch_invariant=True, deterministic=True)
            out, lse = torch_flashsdpa.attention(*leaves, enable_gqa=True, **options)
            return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, x.grad_out[b])

        together = run(slice(None))
        for b in range(7):
            assert all(torch.equal(t[b : b + 1], alone) for t, alone in zip(together, run(slice(b, b + 1))))


def test_bitwise_equal_in_every_run():
    x, call = make("again", "causal", (700, 700), dims=(128, 128), **ALL)

    def run():
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.sinks)]
        out, lse = ops().forward(*leaves[:3], alibi_slopes=x.slopes, sinks=leaves[3], deterministic=True, **call.op_arguments())
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, x.grad_out)

    first = run()
    assert all(all(torch.equal(a, b) for a, b in zip(run(), first)) for _ in range(10))


def test_captured():
    """In a CUDA graph, where a replay reads other numbers."""
    x, call = make("graph", "causal", grad="", **ALL)

    def run():
        return ops().forward(x.q, x.k, x.v, alibi_slopes=x.slopes, sinks=x.sinks, **call.op_arguments())[0]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for t in (x.q, x.slopes, x.sinks):
        t.copy_(torch.randn(t.shape, generator=generator("other"), device="cpu"))
    graph.replay()
    assert torch.equal(out, run())


def test_gradient_of_a_mask_with_terms():
    x, call = make("dmask", mask="bias", **ALL)
    check(replace(x, mask_grad=True), call)


def test_bad_numbers():
    """NaN of an allowed score shows behind the cap, that of a removed one does not."""
    x = Inputs(*(torch.randn(1, 2, n, 64, dtype=torch.bfloat16) for n in (70, 130, 130)))
    x.k[:, :, 100] = float("nan")
    keep = (torch.arange(130) != 100).expand(1, 1, 70, 130)
    for mask, finite in ((keep, True), (torch.zeros(1, 1, 70, 130).masked_fill(~keep, -INF), True), (None, False)):
        out, lse = ops().forward(x.q, x.k, x.v, attn_mask=mask, **Call(softcap=3.0).op_arguments())
        assert bool(out.isfinite().all()) == bool(lse.isfinite().all()) == finite
