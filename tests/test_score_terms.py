"""Soft cap, ALiBi slopes and attention sinks: against the float64 oracle, pair by pair, and at their edges."""

import pytest
import torch
import torch_flashsdpa
from cases import BANDS, FLOATS, Case, inputs, make_mask, score_term_cases
from oracle import INF, Call, Inputs, check, check_counting, generator, ops
from torch.library import opcheck


def normal(name, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator(name)).to(dtype)


@pytest.mark.parametrize("case", score_term_cases(), ids=str)
def test_terms(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("scale", (-0.7, 0.0, 3.0))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scales(dtype, scale):
    """The cap is of scaled scores; a negative scale turns them around before it."""
    check(inputs(Case(f"scale{scale}", seq=(66, 130), dtype=dtype, lse_grad=True, slopes="h", sinks=True)),
          Call(is_causal=True, scale=scale, softcap=2.0))


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(inputs(Case("threads", heads=(4, 1), seq=(260, 200), dim=(64, 64), lse_grad=True, slopes="h", sinks=True)),
              Call(softcap=5.0))
    finally:
        torch.set_num_threads(before)


# --- soft cap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", (4, 40))  # the decoding kernel, and the other
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_score_passes_the_cap(dtype, rows):
    """Scores of thousands: what is left of them is the cap, and its slope is 0."""
    q, k = (40 * normal(f"cap{n}", 1, 2, n, 32, dtype=torch.float64).to(dtype) for n in (rows, 100))
    x = Inputs(q, k, normal("v", 1, 2, 100, 32, dtype=dtype), grad_out=normal("g", 1, 2, rows, 32, dtype=dtype))
    got = check(x, Call(softcap=3.0))
    assert (got.lse <= 3.0 + torch.tensor(100.0).log() + 1e-5).all()


@pytest.mark.parametrize("rows", (4, 40))
def test_the_cap_comes_before_the_mask(rows):
    """A bias beyond the cap keeps its size."""
    q, v = torch.zeros(1, 1, rows, 8), torch.eye(64)[None, None]
    bias = 100 + normal("bias", 1, 1, rows, 64)
    out, _ = ops().forward(q, torch.zeros(1, 1, 64, 8), v, attn_mask=bias, softcap=1.0)
    assert (out - bias.softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_the_hyperbolic_tangent_is_right_to_the_last_digits(dtype):
    """Each score by itself, through lse: a row of one key has no other."""
    score = torch.cat([torch.logspace(-30, 2, 2001), torch.linspace(0.5, 0.75, 501)]).to(dtype)
    score = torch.cat([score, -score, torch.zeros(1, dtype=dtype)])
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    for cap in (1.0, 20.0):
        _, lse = ops().forward(score.view(1, 1, -1, 1) * cap, one, one, softcap=cap)
        want = cap * (score.double() if dtype == torch.float32 else score).tanh()
        worst = ((lse.flatten() - want).abs() / want.abs().clamp_min(1e-35)).max().item()
        assert worst < 5 * torch.finfo(dtype).eps, worst


def test_a_high_cap_changes_nothing():
    x = inputs(Case("high", seq=(66, 130), grad=""))
    assert torch.allclose(ops().forward(x.q, x.k, x.v, softcap=1e6)[0], ops().forward(x.q, x.k, x.v)[0], atol=1e-6)


@pytest.mark.parametrize("bad", (float("nan"), INF))
def test_a_removed_key_does_not_show_behind_the_cap(bad):
    x = inputs(Case("removed", seq=(66, 130)))
    x.k[:, :, 7] = bad
    keep = torch.ones(130, dtype=torch.bool)
    keep[7] = False
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out, _ = ops().forward(q, k, v, attn_mask=keep[None, None, None], softcap=2.0)
    dk, dv = torch.autograd.grad(out, (k, v), x.grad_out)
    assert out.isfinite().all() and dk.isfinite().all() and dv.isfinite().all()
    assert (dk[:, :, 7] == 0).all() and (dv[:, :, 7] == 0).all()


# --- slopes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bottom_right", (False, True), ids=("top_left", "bottom_right"))
@pytest.mark.parametrize("seq", ((1, 300), (5, 130), (130, 70)), ids=str)
def test_slopes_are_the_bias_they_stand_for(seq, bottom_right):
    """-slope * |i + offset - j|, the offset being that of causal and windows: FlashAttention's, with bottom_right."""
    x = inputs(Case(f"slopes{seq}", batch=2, heads=(4, 2), seq=seq, slopes="bh"))
    i, j = torch.arange(seq[0])[:, None], torch.arange(seq[1])
    offset = seq[1] - seq[0] if bottom_right else 0
    bias = -x.slopes[:, :, None, None] * (i + offset - j).abs()
    options = dict(is_causal=bottom_right, bottom_right=bottom_right, enable_gqa=True, return_lse=True)
    got = torch_flashsdpa.attention(x.q, x.k, x.v, alibi_slopes=x.slopes, **options)
    want = torch_flashsdpa.attention(x.q, x.k, x.v, attn_mask=bias, **options)
    for a, b in zip(got, want):
        assert torch.allclose(a, b, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", (2, 70))
def test_strides_of_slopes_and_sinks(rows):
    """Read in place: every second number, and one for all."""
    x = inputs(Case(f"strides{rows}", batch=2, heads=(4, 2), seq=(rows, 130), slopes="bh", sinks=True, lse_grad=True))
    x.slopes = torch.full((2, 8), float("nan"))[:, ::2].copy_(x.slopes)
    x.sinks = torch.full((8,), float("nan"))[::2].copy_(x.sinks)
    check(x, Call())
    x.slopes, x.sinks = torch.tensor([0.3]).expand(4), torch.tensor([-0.4]).expand(4)
    check(x, Call())


def test_slopes_far_from_the_first_key():
    """Positions that float32 holds, but not half precision."""
    x = inputs(Case("far", seq=(1, 9000), dim=(16, 16), dtype=torch.bfloat16, slopes="h"))
    x.slopes = x.slopes.abs() + 0.01
    check(x, Call(is_causal=True, bottom_right=True))


# --- sinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", BANDS)
def test_a_sink_of_zero_counts_as_a_key_more(band):
    for dtype, seq, heads in ((torch.float32, (65, 130), (4, 2)), (torch.bfloat16, (130, 65), (2, 2)),
                              (torch.float64, (3, 200), (2, 1))):
        check_counting(1, *heads, *seq, 128, dtype, None, BANDS[band], sinks=True)


@pytest.mark.parametrize("mask", ("random", "rows_false", "one_key", "all_false"))
@pytest.mark.parametrize("softcap", (0.0, 4.0))
def test_counting_with_masks(mask, softcap):
    tensor = make_mask(f"{mask}:bhqk", "sinks", (2, 2, 66, 130), torch.float32)
    check_counting(2, 2, 2, 66, 130, 128, torch.float32, tensor, Call(softcap=softcap), planned=True, sinks=True)


@pytest.mark.parametrize("seq", ((3, 0), (70, 0), (3, 200), (70, 200)), ids=str)
def test_rows_without_a_key_are_all_the_sinks(seq):
    """Output 0, lse the sink itself, and the whole gradient of lse for it."""
    x = inputs(Case(f"blind{seq}", batch=2, seq=seq, grad="", sinks=True))
    mask = torch.zeros(1, 1, 1, seq[1], dtype=torch.bool)
    q, sinks = x.q.requires_grad_(), x.sinks.requires_grad_()
    out, lse = ops().forward(q, x.k, x.v, attn_mask=mask, sinks=sinks)
    assert (out == 0).all() and torch.equal(lse, sinks.detach()[None, :, None].expand_as(lse))
    weight = normal("lse", *lse.shape)
    dq, dsinks = torch.autograd.grad(lse, (q, sinks), weight)
    assert (dq == 0).all() and torch.allclose(dsinks, weight.sum((0, 2)), atol=1e-5)


@pytest.mark.parametrize("rows", (3, 70))
def test_sinks_of_minus_infinity_are_none(rows):
    x = inputs(Case(f"none{rows}", seq=(rows, 130)))
    got, want = (ops().forward(x.q, x.k, x.v, sinks=s) for s in (torch.full((2,), -INF), None))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("rows", (3, 70))
@pytest.mark.parametrize("sink", (-1e4, -50.0, 50.0, 1e4))
def test_sinks_of_any_size(sink, rows):
    x = inputs(Case(f"sink{sink}{rows}", heads=(4, 2), seq=(rows, 130), lse_grad=True, sinks=True))
    x.sinks = x.sinks + sink
    check(x, Call())


def test_partial_results_merge_where_one_has_the_sinks():
    x = inputs(Case("merge", seq=(66, 130), grad="", sinks=True))
    whole = torch_flashsdpa.attention(x.q, x.k, x.v, sinks=x.sinks, return_lse=True)
    first = torch_flashsdpa.attention(x.q, x.k[:, :, :50], x.v[:, :, :50], sinks=x.sinks, return_lse=True)
    second = torch_flashsdpa.attention(x.q, x.k[:, :, 50:], x.v[:, :, 50:], return_lse=True)
    for got, want in zip(torch_flashsdpa.merge_partials(*first, *second), whole):
        assert torch.allclose(got, want, atol=1e-6)


def test_only_the_sinks_want_a_gradient():
    x = inputs(Case("only", seq=(66, 130), sinks=True))
    want = check(x, Call()).grads["dsinks"]
    sinks = x.sinks.detach().requires_grad_()
    ops().forward(x.q, x.k, x.v, sinks=sinks)[0].backward(x.grad_out)
    assert torch.equal(sinks.grad, want)


# --- as PyTorch ops ---------------------------------------------------------------------------------------------------

OPCHECK = dict(softcap=3.0, alibi_slopes=torch.tensor([[0.1, 0.2], [0.3, 0.4]]), sinks=torch.tensor([0.5, -0.5]))


@pytest.mark.parametrize("mask", (None, "bias:hqk"))
def test_opcheck(mask):
    x = inputs(Case("opcheck", batch=2, seq=(9, 11), dim=(8, 6), mask=mask or "", mask_grad=mask is not None))
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    sinks = OPCHECK["sinks"].clone().requires_grad_()
    opcheck(ops().forward.default, leaves, dict(OPCHECK, attn_mask=x.mask, sinks=sinks))
    out, lse = ops().forward(x.q, x.k, x.v, attn_mask=x.mask, **OPCHECK)
    for wanted in ([True, True, True, mask is not None, True], [False] * 4 + [True]):
        opcheck(ops().backward.default, (x.grad_out, torch.ones_like(lse), x.q, x.k, x.v, out, lse),
                dict(OPCHECK, attn_mask=x.mask, output_mask=wanted))


def test_compiled():
    """Fake tensors say what the kernels give, in the gradient of the sinks too."""
    x = inputs(Case("compiled", batch=2, heads=(4, 2), seq=(66, 70), slopes="bh", sinks=True))

    def run(function):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.sinks)]
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, x.grad_out)

    def attention(q, k, v, sinks):
        return torch_flashsdpa.attention(q, k, v, enable_gqa=True, softcap=2.0, alibi_slopes=x.slopes, sinks=sinks)

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(run(attention), run(compiled)))


def test_autocast_leaves_slopes_and_sinks_alone():
    x = inputs(Case("autocast", seq=(9, 9), slopes="h", sinks=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = ops().forward(x.q, x.k, x.v, alibi_slopes=x.slopes, sinks=x.sinks)
    halves = [t.bfloat16() for t in (x.q, x.k, x.v)]
    assert torch.equal(out, ops().forward(*halves, alibi_slopes=x.slopes, sinks=x.sinks)[0])


def test_slopes_that_require_a_gradient_are_refused():
    x = inputs(Case("refused", slopes="h"))
    with pytest.raises(RuntimeError, match=r"alibi_slopes requires a gradient .*; give alibi_slopes.detach"):
        ops().forward(x.q, x.k, x.v, alibi_slopes=x.slopes.requires_grad_())
    with torch.no_grad():
        ops().forward(x.q, x.k, x.v, alibi_slopes=x.slopes)
