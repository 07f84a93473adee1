"""The Hopper forward with soft cap, slopes, sinks and dropout, without a GPU: the float64 oracle for each and for all together,
and dropout decision by decision."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BANDS, Case, inputs
from launchers import MANY_QUERIES
from oracle import INF, Call, Result, check, generator
from reference_dropout import dropout_kept, honoured
from test_emulated_forward import HALVES, emulator, forward, pytestmark  # noqa: F401

TERMS = {"softcap": dict(softcap=2.0), "slopes": dict(slopes="h"), "sinks": dict(sinks=True), "dropout": dict(dropout_p=0.3)}
ALL = dict(softcap=2.0, slopes="bh", sinks=True, dropout_p=0.3)
DIMS = ((64, 64), (40, 20), (96, 96), (128, 128), (192, 128), (256, 256))


def terms_of(x, call):
    diagonal = x.k.size(2) - x.q.size(2) if call.bottom_right else 0
    return dict(softcap=call.softcap, dropout_p=call.dropout_p, slopes=x.slopes, sinks=x.sinks, rng_state=x.rng_state,
                diagonal=diagonal)  # fmt: skip


def hold(forward, name, band="full", lengths=(130, 200), dims=(64, 64), heads=(4, 2), dtype=torch.bfloat16, batch=1, mask="",
         scale=None, layout="bhs", softcap=0.0, dropout_p=0.0, slopes="", sinks=False, **options):
    """The oracle's verdict on one call with these terms."""
    call = replace(BANDS[band], scale=scale)
    band_and_scale = call.op_arguments()
    call = replace(call, softcap=softcap, dropout_p=dropout_p)
    case = Case(f"{name}-{band}-{lengths}-{dims}", batch, heads, lengths, dims, dtype, mask=mask, call=call, layout=(layout,) * 3,
                grad="", slopes=slopes, sinks=sinks)  # fmt: skip

    def run(x, call):
        return Result(*forward(x.q, x.k, x.v, x.mask, terms=terms_of(x, call), **band_and_scale, **options), {})

    check(inputs(case), call, run)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_each(forward, term, dtype):
    for band in ("full", "causal", "window_20_5"):
        hold(forward, term, band, dtype=dtype, lengths=(130, 333), **TERMS[term])


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(forward, dims):
    for dtype, band in zip(HALVES, ("causal", "full")):
        hold(forward, "dims", band, dims=dims, dtype=dtype, **ALL)


@pytest.mark.parametrize("band", BANDS)
def test_bands(forward, band):
    hold(forward, "bands", band, lengths=(150, 300), **ALL)
    hold(forward, "bands", band, lengths=(300, 150), **ALL)


@pytest.mark.parametrize("mask", ("random", "bias_inf", "padding", "granules", "rows_false", "all_false", "random:k", "bias:hq"))
def test_masks(forward, mask):
    for band, dims in (("full", (64, 64)), ("causal", (128, 128))):
        for terms in (ALL, dict(dropout_p=0.3)):
            hold(forward, mask, band, mask=mask, dims=dims, lengths=(200, 260), batch=2, **terms)


@pytest.mark.parametrize("seq_q", (1, 5, 64, 65, 193))
def test_lengths(forward, seq_q):
    """Few queries too: with terms they have no kernel of their own."""
    for seq_k, way in itertools.product((1, 2, 63, 65, 129, 400), (MANY_QUERIES, None)):
        hold(forward, "lengths", "causal_br", lengths=(seq_q, seq_k), heads=(8, 1), way=way, **ALL)


@pytest.mark.parametrize("heads", ((1, 1), (6, 3), (7, 1)))
def test_heads(forward, heads):
    hold(forward, "heads", heads=heads, batch=3, **ALL)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(forward, scale):
    for mask in ("", "random", "bias_inf"):
        for terms in (ALL, dict(sinks=True), dict(dropout_p=0.3)):
            hold(forward, "scales", "causal", dtype=torch.float16, mask=mask, scale=scale, **terms)


@pytest.mark.parametrize("dynamic", (True, False), ids=("counter", "in turn"))
def test_many_tiles(forward, dynamic):
    for layout in ("bsh", "packed", "offset"):
        odd = layout == "offset"
        hold(forward, "tiles", "causal", lengths=(300, 260), batch=2, layout=layout, dynamic=dynamic, odd=odd, **ALL)


@pytest.mark.parametrize("softcap", (0.05, 50.0, 1e4))
def test_caps(forward, softcap):
    """From one that leaves little of the scores to one that should not be seen."""
    hold(forward, "caps", softcap=softcap, scale=1.0, dtype=torch.float16)


def test_keys_that_no_row_sees(forward):
    """A sink alone takes all the weight: output 0, lse the sink."""
    x = inputs(Case("alone", 1, (2, 2), (130, 100), (64, 64), torch.bfloat16, grad="", sinks=True))
    masks = [torch.zeros(1, 1, 130, 100, dtype=torch.bool), torch.full((1, 1, 130, 100), -INF)]
    for keys, mask in ((100, masks[0]), (100, masks[1]), (0, None)):
        out, lse = forward(x.q, x.k[:, :, :keys], x.v[:, :, :keys], mask, terms=dict(sinks=x.sinks), **Call().op_arguments())
        assert (out == 0).all() and (lse - x.sinks[:, None]).abs().max() < 1e-5
    none = torch.full((2,), -INF)
    out, lse = forward(x.q, x.k, x.v, masks[0], terms=dict(sinks=none), **Call().op_arguments())
    assert (out == 0).all() and (lse == -INF).all()
    plain = forward(x.q, x.k, x.v, terms=dict(softcap=1e6), **Call().op_arguments())
    beside = forward(x.q, x.k, x.v, terms=dict(softcap=1e6, sinks=none), **Call().op_arguments())
    assert torch.equal(plain[0], beside[0]) and torch.equal(plain[1], beside[1])


@pytest.mark.parametrize("sink", (-300.0, 300.0))
def test_sinks_far_from_the_scores(forward, sink):
    x = inputs(Case("far", 1, (2, 2), (70, 100), (64, 64), torch.bfloat16, grad=""))
    x.sinks = torch.full((2,), sink)
    check(x, Call(), lambda x, call: Result(*forward(x.q, x.k, x.v, terms=terms_of(x, call), **call.op_arguments()), {}))


def test_bad_numbers(forward):
    """NaN of an allowed score shows behind the cap, that of a removed one does not."""
    x = inputs(Case("bad", 1, (2, 2), (70, 130), (64, 64), torch.bfloat16, grad=""))
    x.k[:, :, 100] = float("nan")
    keep = (torch.arange(130) != 100).expand(1, 1, 70, 130)
    bias = torch.zeros(1, 1, 70, 130).masked_fill(~keep, -INF)
    for mask, finite in ((keep, True), (bias, True), (None, False)):
        out, lse = forward(x.q, x.k, x.v, mask, terms=dict(softcap=3.0), **Call().op_arguments())
        assert out.isfinite().all() == lse.isfinite().all() == finite and out.isnan().all() == (not finite)


@pytest.mark.parametrize("p", (0.001, 0.1, 0.5, 1.0))
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_every_decision(forward, dim, p):
    """Equal weights, and values that say which of 16 keys each column is of: how many of them stay is read off the output."""
    state = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator(f"decisions{p}"))
    seq_q, seq_k, heads, columns = 130, 200, 2, min(dim, 128)
    kept, rescale = honoured(p)
    want = dropout_kept(state, p, 2, heads, seq_q, seq_k)
    for first in range(0, seq_k, columns):  # a column for each key
        v = torch.zeros(2, heads, seq_k, dim, dtype=torch.bfloat16)
        there = min(columns, seq_k - first)
        v[:, :, first : first + there, :there] = 128 * torch.eye(there, dtype=torch.bfloat16)
        q, k = (torch.zeros(2, heads, rows, dim, dtype=torch.bfloat16) for rows in (seq_q, seq_k))
        out, lse = forward(q, k, v, terms=dict(rng_state=state, dropout_p=p), **Call().op_arguments())
        assert torch.equal(out[..., :there] != 0, want[..., first : first + there])
        if kept:
            assert (out[..., :there].float().amax() / (128 * rescale / seq_k) - 1).abs() < 2**-8
        assert (lse - torch.tensor(float(seq_k)).log()).abs().max() < 1e-5


def test_decisions_past_blocks_that_a_mask_skips(forward):
    state = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator("skipped"))
    keys = torch.arange(700)
    keep = ((keys < 20) | (keys >= 650)).expand(1, 1, 130, 700)
    q, k = (torch.zeros(1, 2, rows, 128, dtype=torch.bfloat16) for rows in (130, 700))
    v = torch.zeros(1, 2, 700, 128, dtype=torch.bfloat16)
    v[:, :, :20, :20], v[:, :, 650:, 20:70] = torch.eye(20, dtype=v.dtype), torch.eye(50, dtype=v.dtype)
    for mask in (keep, torch.zeros(1, 1, 130, 700).masked_fill(~keep, -INF)):
        out, _ = forward(q, k, v, mask, terms=dict(rng_state=state, dropout_p=0.5), **Call().op_arguments())
        want = dropout_kept(state, 0.5, 1, 2, 130, 700)
        assert torch.equal(out[..., :70] != 0, torch.cat([want[..., :20], want[..., 650:]], -1))


def test_a_sequence_in_any_batch(emulator, forward):  # noqa: F811
    """Bit for bit, whatever kernel and splits the whole batch would get: alone, four processors share its keys."""
    emulator.configure(7, 4)  # the launcher asks once for the processors; where no test has come before, here
    nothing = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    emulator.forward(nothing, nothing, nothing, nothing.clone(), torch.zeros(1, 1, 1))
    for lengths in ((1, 3000), (5, 2000), (130, 260)):
        x = inputs(Case(f"any-{lengths}", 3, (4, 1), lengths, (64, 64), torch.bfloat16, grad=""))
        invariant = dict(way=None, terms=dict(batch_invariant=True), **Call().op_arguments())
        together = forward(x.q, x.k, x.v, **invariant)
        for b in range(3):
            alone = forward(x.q[b : b + 1], x.k[b : b + 1], x.v[b : b + 1], **invariant)
            assert all(torch.equal(t[b : b + 1], a) for t, a in zip(together, alone))


def test_bitwise_equal_in_any_order(forward):
    call = Call(softcap=5.0, dropout_p=0.2)
    x = inputs(Case("orders", 1, (4, 2), (260, 300), (128, 128), torch.bfloat16, call=call, grad="", slopes="h", sinks=True))
    terms = terms_of(x, call)
    results = [forward(x.q, x.k, x.v, terms=terms, **Call(is_causal=True).op_arguments()) for _ in range(8)]
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results[1:])
