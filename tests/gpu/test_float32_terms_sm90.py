"""The float32 Hopper kernels with soft cap, slopes, sinks, dropout and the gradient of a mask: what the half-precision kernels are held to,
and what is float32's alone: the same bits in every run and batch."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, BROADCASTS
from hopper import capture, needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import INF, Call, check, ops, reference, run_op, run_sdpa
from reference_dropout import dropout_factor, dropout_kept
from test_dropout_sm90 import fresh_state
from test_dropout_sm90 import hold as hold_dropout
from test_float32_sm90 import CLASSES, poison, tf32  # noqa: F401
from test_mask_gradient_sm90 import biased
from test_mask_gradient_sm90 import hold as hold_mask_gradient
from test_score_terms_sm90 import ALL, TERMS, make

import torch_flashsdpa
from torch_flashsdpa import sdpa_backend
from torch_flashsdpa.profiler import kernels_run

pytestmark = needs_hopper
DIMS = ((64, 64), (40, 20), (96, 96), (128, 128), (192, 128), (256, 256), (1, 200))
FLOAT = dict(dtype=torch.float32)


def hold(*arguments, **options):
    x, call = make(*arguments, **FLOAT, **options)
    poison()
    return check(x, call)


@pytest.mark.parametrize("term", TERMS)
def test_each_term(term):
    for band, lengths, dim in itertools.product(("full", "causal", "window_20_5"), ((200, 333), (700, 700)), CLASSES):
        hold(term, band, lengths, dims=(dim, dim), **TERMS[term])


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims):
    for band, mask in itertools.product(("causal", "full"), ("", "bias_inf")):
        hold("dims", band, dims=dims, mask=mask, **ALL)
        hold_dropout("dims", band, dims=dims, mask=mask, **ALL, **FLOAT)


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for lengths, mask in itertools.product(((150, 300), (300, 150)), ("", "granules")):
        hold_dropout("bands", band, lengths, mask=mask, **ALL, **FLOAT)


@pytest.mark.parametrize("mask", ("random", "bias_inf", "padding:bk", "granules", "rows_false", "all_false", "random:k", "bias:hq"))
def test_masks(mask):
    for band, dim in itertools.product(("full", "causal"), CLASSES):
        hold_dropout("masks", band, mask=mask, dims=(dim, dim), **ALL, **FLOAT)


@pytest.mark.parametrize("seq_q", (1, 5, 63, 65, 129, 1000))
def test_lengths(seq_q):
    for seq_k, dim in zip((1, 63, 64, 65, 129, 1021), itertools.cycle(CLASSES)):
        hold_dropout("lengths", "causal_br", (seq_q, seq_k), heads=(8, 1), dims=(dim, dim), **ALL, **FLOAT)


@pytest.mark.parametrize("length", (2048, 4096))
def test_long(length):
    for dim in (64, 128):
        hold_dropout("long", "causal", (length, length), heads=(1, 1), batch=1, dims=(dim, dim), **ALL, **FLOAT)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(scale):
    for mask in ("", "random", "bias_inf"):
        hold("scales", "causal", mask=mask, scale=scale, **ALL)


@pytest.mark.parametrize("layout", ("bsh", "packed", "offset", "expand_heads"))
def test_layouts(layout):
    hold("layouts", "causal", layout=layout, **ALL)


@pytest.mark.parametrize("softcap", (0.05, 5.0, 50.0, 1e4))
def test_caps(softcap):
    """tanh is as good as float32's, near 0 and where it saturates."""
    for dim, factor in itertools.product(CLASSES, (1.0, 30.0)):
        x, call = make("caps", softcap=softcap, scale=1.0, dims=(dim, dim), **FLOAT)
        check(replace(x, q=x.q * factor), call)


@pytest.mark.parametrize("sink", (-1e4, -50.0, 50.0, 5000.0))
def test_sinks_of_any_size(sink):
    x, call = make(f"sink{sink}", sinks=True, **FLOAT)
    x.sinks = x.sinks + sink
    check(x, call)


@pytest.mark.parametrize("p", (1e-5, 0.1, 0.5, 1.0))
@pytest.mark.parametrize("dim", CLASSES)
def test_every_decision(dim, p):
    """Of the forward, of dV, and of dQ, which K of unit vectors shows: V and grad_out of ones leave dS = (Z - mean Z) / n."""
    batch, heads, length = 2, 3, dim
    state = fresh_state(f"decisions{p}")
    want, factor = (f(state, p, batch, heads, length, length) for f in (dropout_kept, dropout_factor))
    units = torch.eye(length).expand(batch, heads, -1, -1).clone()
    q, v = (torch.zeros(batch, heads, length, dim, requires_grad=True) for _ in range(2))
    out, _ = ops().forward(q, units, units, dropout_p=p, rng_state=state)
    assert torch.equal(out != 0, want)
    out, _ = ops().forward(q, units, v, dropout_p=p, rng_state=state)
    (dv,) = torch.autograd.grad(out, v, units)
    assert torch.equal(dv.mT != 0, want)
    out, _ = ops().forward(q, units, torch.ones_like(v)[..., :8], scale=1.0, dropout_p=p, rng_state=state)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out) / 8)
    error = (dq * length + factor.mean(-1, keepdim=True) - factor).abs().max()
    assert error < 1e-4 * max(1.0, factor.max().item())


@pytest.mark.parametrize("dim", CLASSES)
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_mask_gradient(axes, dim):
    for band, lengths in itertools.product(("full", "causal"), ((130, 201), (700, 1100))):
        hold_mask_gradient("broadcasts", f"bias_inf:{axes or '-'}", lengths=lengths, dims=(dim, dim), band=band, **FLOAT)


@pytest.mark.parametrize("axes", ("bhqk", "qk", "bk", "q", ""))
def test_mask_gradient_with_terms(axes):
    for dim, terms in itertools.product(CLASSES, (ALL, dict(softcap=2.0))):
        x, call = make("dmask", "causal", mask=f"bias:{axes or '-'}", dims=(dim, dim), **terms, **FLOAT)
        check(replace(x, mask_grad=True), call)
        x, call = replace(x, mask_grad=True, rng_state=fresh_state(f"dmask{axes}")), replace(call, dropout_p=0.3)
        check(x, call)


@pytest.mark.parametrize("strides", ("transposed", "heads_last", "cols", "corner", "expanded"))
def test_mask_gradient_of_strides(strides):
    for axes in ("hqk", "bk", "q"):
        hold_mask_gradient("strides", f"bias_inf:{axes}:{strides}", heads=(2, 1), lengths=(130, 200), lse_grad=True, **FLOAT)


@pytest.mark.parametrize("axes", ("hqk", "qk", "bk"))
def test_mask_gradient_through_sdpa(axes):
    for dim, band in itertools.product((64, 128, 192), ("full", "causal")):
        hold_mask_gradient("sdpa", f"bias:{axes}", heads=(8, 8), lengths=(500, 500), dims=(dim, dim), band=band, run=run_sdpa, **FLOAT)


def test_only_the_mask_needs_a_gradient():
    x, call = biased("only", "bias_inf:qk", lengths=(700, 900), **FLOAT)
    want = check(x, call).grads["dmask"]
    mask = x.mask.detach().requires_grad_()
    with kernels_run() as kernels:
        out, _ = ops().forward(x.q, x.k, x.v, attn_mask=mask)
        (got,) = torch.autograd.grad(out, mask, x.grad_out)
        torch.cuda.synchronize()
    assert torch.equal(got, want) and not any("flashsdpa_bwd_f32_sm90" in kernel for kernel in kernels), kernels


@pytest.mark.parametrize("terms, mask", ((dict(softcap=3.0), ""), (dict(slopes="h"), "bias:hqk")), ids=("softcap", "slopes"))
def test_the_same_bits_in_every_run_and_batch(terms, mask):
    """Of a batch of five, alone, and again; the gradient of a mask in every run."""
    x, call = make("bits", "causal", (700, 500), batch=5, mask=mask, **terms, **FLOAT)

    def run(b, mask_too=False):
        leaves = [t[b].detach().requires_grad_() for t in (x.q, x.k, x.v)] + [x.mask.detach().requires_grad_() for _ in range(mask_too)]
        options = dict(attn_mask=leaves[3] if mask_too else x.mask, alibi_slopes=x.slopes, batch_invariant=True, **call.op_arguments())
        out, lse = ops().forward(*leaves[:3], **options)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, x.grad_out[b])

    whole = run(slice(None))
    for b in range(5):
        assert all(torch.equal(t[b : b + 1], alone) for t, alone in zip(whole, run(slice(b, b + 1))))
    if mask:
        assert all(torch.equal(a, b) for a, b in zip(run(slice(None), True), run(slice(None), True)))


def test_attention_and_sdpa_serve_it():
    """Nothing of it is left to stock or refused; SDPA drops what the op drops for the state that torch's generator stands at."""
    q, k, v = (torch.randn(2, 4, 300, 64, requires_grad=True) for _ in range(3))
    bias, sinks = torch.randn(1, 4, 300, 300, requires_grad=True), torch.randn(4, requires_grad=True)
    with kernels_run() as kernels:
        out = torch_flashsdpa.attention(q, k, v, attn_mask=bias, softcap=20.0, alibi_slopes=torch.rand(4), sinks=sinks, dropout_p=0.1)
        grads = torch.autograd.grad(out.sum(), (q, k, v, bias, sinks))
        torch.cuda.synchronize()
    assert all(t.isfinite().all() for t in grads)
    names = ("flashsdpa_fwd_f32_sm90", "flashsdpa_bwd_f32_sm90", "flashsdpa_bwd_mask_f32_sm90", "flashsdpa_bwd_sinks_f32_sm90")
    assert all(any(name in kernel for kernel in kernels) for name in names), kernels
    torch.manual_seed(1)
    with sdpa_backend("flashsdpa", strict=True):
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
    torch.manual_seed(1)
    want, _ = ops().forward(q, k, v, dropout_p=0.2, is_causal=True, rng_state=ops().rng_state(device=q.device))
    assert torch.equal(out, want)


def test_captured():
    """In a CUDA graph, forward and backward, where a replay reads other numbers."""
    x, call = make("graph", "causal", mask="bias:qk", **ALL, **FLOAT)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.mask, x.sinks)]

    def step():
        out, _ = ops().forward(*leaves[:3], attn_mask=leaves[3], sinks=leaves[4], alibi_slopes=x.slopes, **call.op_arguments())
        return out.detach(), *torch.autograd.grad(out, leaves, x.grad_out)

    got, replay = capture(step)
    with torch.no_grad():
        for t in (x.slopes, leaves[0], leaves[4]):
            t.copy_(torch.randn_like(t))
    replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, step()))


def test_memory_of_the_gradient_of_a_mask():
    """Beside the gradients: the plan, three numbers a row, and parts, of which there are some only where the gradient is small."""
    q, k, v = (torch.randn(4, 8, 2048, 64) for _ in range(3))
    bias = torch.randn(1, 8, 2048, 2048, requires_grad=True)
    out, _ = ops().forward(q, k, v, attn_mask=bias)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, bias, torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < bias.nbytes + out.nbytes + 2**25


def test_bad_numbers():
    """NaN of an allowed score shows behind the cap, that of a removed one does not, nor in the mask's gradient."""
    q, k, v = (torch.randn(1, 2, n, 64) for n in (70, 130, 130))
    k[:, :, 100] = v[:, :, 100] = float("nan")
    keep = (torch.arange(130) != 100).expand(1, 1, 70, 130)
    bias = torch.zeros(1, 1, 70, 130).masked_fill(~keep, -INF)
    out, _ = ops().forward(q, k, v.nan_to_num(), **Call(softcap=3.0).op_arguments())
    assert out.isnan().all()
    leaf = bias.requires_grad_()
    out, lse = ops().forward(q, k, v.nan_to_num(), attn_mask=leaf, **Call(softcap=3.0).op_arguments())
    assert out.isfinite().all() and lse.isfinite().all()
    (got,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert got.isfinite().all() and (got[..., 100] == 0).all()


def test_tf32(tf32):  # noqa: F811
    """Within a few rounding steps of TF32, in norm."""
    for dim in CLASSES:
        x, call = make("tf32", "causal", (513, 513), dims=(dim, dim), mask="bias:qk", **ALL, **FLOAT)
        x = replace(x, mask_grad=True)
        got, want = run_op(x, call), reference(x, call)
        for name, ours, exact in (("out", got.out, want.out), *((n, got.grads[n], want.grads[n]) for n in got.grads)):
            error = ((ours.double() - exact).norm() / exact.norm()).item()
            assert error < 8 * 2**-11, f"{name} is off by {error:.2g}"
