"""Dropout on the Hopper kernels: every decision of both passes, the float64 oracle with bands, masks, dims and terms, and what
torch does with generators."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, Case, inputs, make_mask, placed
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import check, generator, ops
from reference_dropout import dropout_factor, dropout_kept
from test_score_terms_sm90 import ALL, DIMS, HALVES
from torch.utils.checkpoint import checkpoint

import torch_flashsdpa
from torch_flashsdpa import enable, sdpa_backend

pytestmark = needs_hopper


def fresh_state(name):
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator(name), device="cpu").cuda()


def hold(name, band="full", lengths=(200, 333), dims=(64, 64), heads=(4, 2), dtype=torch.bfloat16, batch=2, mask="", p=0.3,
         softcap=0.0, slopes="", sinks=False, layout="bhs", scale=None):
    call = replace(BANDS[band], dropout_p=p, softcap=softcap, scale=scale)
    text = f"{name}-{band}-{lengths}-{dims}-{mask}-{p}"
    case = Case(text, batch, heads, lengths, dims, dtype, call=call, layout=(layout,) * 3, lse_grad=True, slopes=slopes, sinks=sinks)
    x = inputs(case, "cuda")
    if mask:
        with torch.device("cpu"):
            x.mask = placed(make_mask(mask, str(case), (batch, heads[0], *lengths), dtype), "cuda")
    check(x, call)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_every_decision(dim, dtype):
    """Of the forward: equal scores, unit vectors for values, one weight by one."""
    state = fresh_state("forward")
    for (seq_q, seq_k), p in itertools.product(((1, 300), (70, 200), (257, 400)), (0.001, 0.1, 0.5, 0.9, 1.0)):
        q, k = (torch.zeros(2, 3, rows, dim, dtype=dtype) for rows in (seq_q, seq_k))
        want = dropout_kept(state, p, 2, 3, seq_q, seq_k)
        for start in range(0, seq_k, dim):
            units = torch.eye(seq_k, dtype=dtype)[None, None, :, start : start + dim].expand(2, 3, -1, -1)
            out, _ = ops().forward(q, k, units, dropout_p=p, rng_state=state)
            assert torch.equal(out != 0, want[..., start : start + dim]), p


@pytest.mark.parametrize("dim", (64, 128, 256))
def test_every_decision_of_the_backward(dim):
    """Of dV, from one query at a time; and of dQ, which K of unit vectors shows: V and grad_out of ones leave
    dS = (Z - mean Z) / n."""
    batch, heads, length, p = 2, 2, dim, 0.4  # as many keys and queries as there are columns
    state = fresh_state("backward")
    factor = dropout_factor(state, p, batch, heads, length, length)
    q = torch.zeros(batch, heads, length, dim, dtype=torch.bfloat16, requires_grad=True)
    k = torch.eye(length, dtype=torch.bfloat16).expand(batch, heads, -1, -1).clone()
    v = torch.ones(batch, heads, length, dim, dtype=torch.bfloat16, requires_grad=True)
    out, _ = ops().forward(q, k, v, scale=1.0, dropout_p=p, rng_state=state)
    (dv,) = torch.autograd.grad(out, v, torch.eye(length, dtype=torch.bfloat16).expand(batch, heads, -1, -1))
    assert torch.equal(dv.transpose(-1, -2) != 0, factor != 0)
    out, _ = ops().forward(q, k, v[..., :8], scale=1.0, dropout_p=p, rng_state=state)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out) / 8)
    assert (dq * length + factor.mean(-1, keepdim=True) - factor).abs().max() < 0.03


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims):
    for dtype, band, p in zip((*HALVES, torch.bfloat16), ("causal", "full", "window_20_5"), (0.1, 0.5, 0.9)):
        hold("dims", band, dims=dims, dtype=dtype, p=p)


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for lengths in ((150, 300), (300, 150)):
        hold("bands", band, lengths)


@pytest.mark.parametrize("mask", ("random", "bias_inf", "padding:bk", "granules", "rows_false", "all_false"))
def test_masks(mask):
    for band, dims in itertools.product(("full", "causal"), ((64, 64), (128, 128))):
        hold("masks", band, mask=mask, dims=dims)


@pytest.mark.parametrize("seq_q", (1, 5, 63, 65, 129, 1000))
def test_lengths(seq_q):
    for seq_k in (1, 17, 64, 65, 1021):
        hold("lengths", "causal_br", (seq_q, seq_k), heads=(8, 1))


@pytest.mark.parametrize("p", (0.00001, 0.001, 0.5, 0.9, 1.0))
def test_probabilities(p):
    hold("p", "causal", p=p)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(scale):
    for mask in ("", "random", "bias_inf"):
        hold("scales", "causal", mask=mask, dtype=torch.float16, scale=scale)


def test_with_all_other_terms():
    for dtype, mask in itertools.product(HALVES, ("", "bias")):
        hold("all", "causal", dtype=dtype, mask=mask, **ALL)


@pytest.mark.parametrize("layout", ("bsh", "packed", "offset"))
def test_layouts(layout):
    hold("layouts", "causal", layout=layout)


def test_under_the_router():
    """F.sdpa: what the op gives for the state that torch's generator stands at; the same again under the same seed; rates."""
    q, k, v, grad = (torch.randn(2, 4, 300, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))

    def run(seed):
        torch.manual_seed(seed)
        with sdpa_backend("flashsdpa", strict=True):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
            return out, *torch.autograd.grad(out, (q, k, v), grad)

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert all(torch.allclose(a, b, atol=0.02, rtol=0.02) for a, b in zip(first, again))
    torch.manual_seed(1)
    out, _ = ops().forward(q, k, v, dropout_p=0.2, is_causal=True, rng_state=ops().rng_state(device=q.device))
    assert torch.equal(out, first[0])
    with sdpa_backend("flashsdpa", strict=True):
        assert (F.scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()
        means = torch.stack([F.scaled_dot_product_attention(q, k, v, dropout_p=0.2) for _ in range(300)]).float().mean(0)
        assert (means - F.scaled_dot_product_attention(q, k, v).float()).abs().max() < 0.1


def test_checkpointed():
    """The recomputed forward draws the same weights."""
    leaves = [torch.randn(1, 2, 200, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def attend(q, k, v):
        return torch_flashsdpa.attention(q, k, v, dropout_p=0.5, deterministic=True)

    def run(function):
        torch.manual_seed(5)
        return torch.autograd.grad(function(*leaves).sum(), leaves)

    plain, recomputed = run(attend), run(lambda *t: checkpoint(attend, *t, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed))


def test_each_replay_of_a_graph_draws_anew():
    """And what a replay drew is what its state says: the kernels read seed and offset from memory."""
    q, k, v = (torch.randn(1, 2, 200, 64, dtype=torch.bfloat16) for _ in range(3))
    enable("flashsdpa", strict=True)
    try:
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            results = []
            for _ in range(3):
                graph.replay()
                results.append(out.clone())
    finally:
        torch_flashsdpa.disable()
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])
    state = fresh_state("graph")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = ops().forward(q, k, v, dropout_p=0.5, rng_state=state)
    state.copy_(fresh_state("another"))
    graph.replay()
    assert torch.equal(out, ops().forward(q, k, v, dropout_p=0.5, rng_state=state)[0])
