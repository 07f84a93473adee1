"""The Hopper backward with soft cap, slopes, sinks and dropout, and in any batch, without a GPU: its kernels on the emulator, behind
the formula in float64 as the forward. Both oracles; poisoned outputs and scratch, another order of threads at each call."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BANDS, Case, inputs, make_mask
from emulator import Emulator, build
from launchers import band_of
from oracle import INF, Call, Result, attention64, check, check_counting, dropped, generator, keep_of, slope_bias
from reference_plan import reference_plan
from test_emulated_backward import HALVES, poisoned, pytestmark  # noqa: F401

CLASSES = (64, 128, 256)
DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (256, 256), (1, 200))
TERMS = {
    "softcap": dict(softcap=1.5),
    "slopes": dict(slopes="h"),
    "slopes_bh": dict(slopes="bh"),
    "sinks": dict(sinks=True),
    "dropout": dict(dropout_p=0.3),
    "cap_drop": dict(softcap=1.0, dropout_p=0.5),
    "all": dict(softcap=2.0, slopes="bh", sinks=True, dropout_p=0.1),
}


def case_of(name, terms, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", mask="", batch=1,
            scale=None, **options):
    """The case with the terms of that name."""
    terms = dict(TERMS[terms])
    call = replace(BANDS[band], scale=scale, **{key: terms.pop(key) for key in ("softcap", "dropout_p") if key in terms})
    return Case(f"{name}-{terms}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, mask=mask, call=call, **terms, **options)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(build(tmp_path_factory.mktemp("backward"), ["src/cuda/sm90/bwd_*.cu", "tests/gpu/backward_shim.cu"]))


@pytest.fixture
def backward(emulator, request):
    """backward(x, call, lse, out, **options): {name: gradient}."""
    orders = generator(request.node.name)

    def run(x, call, out, lse, grad_out, grad_lse, inputs_too=True, odd=False, **options):
        seed, processors = (int(torch.randint(high, (), generator=orders)) for high in (2**31, 4))
        fixed = options.get("deterministic") or options.get("batch_invariant")
        emulator.configure(seed, 3 if fixed else processors + 1)  # the order is fixed for a number of processors
        grads = [poisoned(t, odd=odd) if inputs_too else None for t in (x.q, x.k, x.v)]
        grad_mask = torch.full(x.mask.shape, float("nan"), dtype=x.mask.dtype) if x.mask_grad else None
        grad_sinks = torch.full((x.q.size(1),), float("nan")) if x.sinks is not None else None
        if grad_out is None:
            grad_out = torch.zeros(1, 1, 1, 1, dtype=x.q.dtype).expand_as(out)
        seq_q, seq_k = x.q.size(2), x.k.size(2)
        band = {name: call.op_arguments()[name] for name in ("is_causal", "bottom_right", "window_left", "window_right")}
        run.scratch = emulator.backward(
            grad_out, x.q, x.k, x.v, out, lse, *grads, grad_lse, band_of(**band, seq_q=seq_q, seq_k=seq_k), call.scale,
            mask=x.mask, mask_plan=None if x.mask is None else reference_plan(x.mask), grad_mask=grad_mask, grad_sinks=grad_sinks,
            softcap=call.softcap, slopes=x.slopes, diagonal=seq_k - seq_q if call.bottom_right else 0,
            sinks=None if x.sinks is None else x.sinks.detach(), rng_state=x.rng_state, dropout_p=call.dropout_p, **options)  # fmt: skip
        found = zip(("dq", "dk", "dv", "dmask", "dsinks"), (*grads, grad_mask, grad_sinks))
        return {name: grad for name, grad in found if grad is not None}

    return run


def forward64(x, call):
    """(out, lse) of the formula, as a forward rounds them."""
    mask = x.mask if x.mask is None or x.mask.dtype == torch.bool else x.mask.double()
    out, lse, _ = attention64(x.q.double(), x.k.double(), x.v.double(), mask, keep_of(x, call), call.scale_for(x.q.size(3)), call.softcap,
                              slope_bias(x, call), None if x.sinks is None else x.sinks.double(), dropped(x, call))
    return out.to(x.q.dtype), lse.float()


def runner(backward, **options):
    def run(x, call):
        out, lse = forward64(x, call)
        return Result(out, lse, backward(x, call, out, lse, x.grad_out, x.grad_lse, **options))

    return run


def hold(backward, *args, odd=False, **options):
    case = case_of(*args, **options)
    return check(inputs(case), case.call, runner(backward, odd=odd))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("terms", TERMS)
def test_terms(backward, terms, dtype):
    for dim in CLASSES:
        for band, mask in (("causal_br", ""), ("full", "document")):
            hold(backward, "terms", terms, dims=(dim, dim), dtype=dtype, band=band, mask=mask, batch=2, lengths=(130, 200), lse_grad=True)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(backward, dims):
    for mask, band in itertools.product(("", "bias_inf"), ("full", "causal")):
        hold(backward, "dims", "all", dims=dims, mask=mask, band=band)


@pytest.mark.parametrize("band", BANDS)
def test_bands(backward, band):
    for mask, dim in itertools.product(("", "granules", "bias32"), CLASSES):
        hold(backward, "bands", "all", lengths=(300, 200), mask=mask, band=band, dims=(dim, dim))


@pytest.mark.parametrize("seq_q", (1, 63, 65, 129, 300))
def test_lengths(backward, seq_q):
    dims, terms = itertools.cycle(CLASSES), itertools.cycle(("all", "dropout", "slopes", "cap_drop"))
    for seq_k, mask in itertools.product((1, 63, 64, 65, 129, 400), ("", "random")):
        dim = next(dims)
        hold(backward, "lengths", next(terms), heads=(2, 1), lengths=(seq_q, seq_k), mask=mask, dims=(dim, dim))


@pytest.mark.parametrize("dim", CLASSES)
def test_many_tiles(backward, dim):
    """Stages go round, over several heads of a group, each with a slope and random bits of its own."""
    for mask, band in itertools.product(("", "granules"), ("full", "causal")):
        hold(backward, "tiles", "all", batch=2, heads=(4, 1), lengths=(600, 300), dims=(dim, dim), mask=mask, band=band)


@pytest.mark.parametrize("axes", ("bhqk", "qk", "bk", "q"))
def test_mask_gradient(backward, axes):
    for dim, terms in itertools.product(CLASSES, ("softcap", "slopes_bh", "dropout", "all")):
        hold(backward, "dmask", terms, mask=f"bias_inf:{axes}", mask_grad=True, batch=2, lengths=(130, 201), dims=(dim, dim), band="causal")


@pytest.mark.parametrize("dim", (64, 70, 192))
def test_tensors_that_tma_cannot_reach(backward, dim):
    for mask in ("", "bias"):
        hold(backward, "plain", "all", mask=mask, mask_grad=bool(mask), lengths=(130, 200), dims=(dim, dim),
             layout=("offset", "bhs", "offset"), odd=True)  # fmt: skip


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(backward, scale):
    for mask, dim, terms in itertools.product(("", "bias_inf"), (64, 192), ("all", "slopes")):
        hold(backward, "scale", terms, scale=scale, dtype=torch.float16, mask=mask, lengths=(100, 200), dims=(dim, dim), band="causal")


@pytest.mark.parametrize("p", (1e-6, 0.3, 0.999, 1.0))
def test_which_weights_are_dropped(backward, p):
    """Score by score: with equal scores, V and the gradient of out made of unit vectors, dV is the kept weights and the gradient of an
    additive mask is them less their mean."""
    for dim in CLASSES:
        x = inputs(Case("kept", 2, (2, 1), (150, 140), (dim, dim), torch.float16, call=Call(dropout_p=p)))
        x.q.zero_()
        for first in range(0, 150, dim):
            x.grad_out.zero_()
            count = min(dim, 150 - first)
            x.grad_out[:, 1, torch.arange(first, first + count), torch.arange(count)] = 1
            call = Call(dropout_p=p)
            got = backward(x, call, *forward64(x, call), x.grad_out, None)["dv"][:, 0, :, :count]
            want = dropped(x, call)[:, 1, first : first + count].transpose(1, 2) / 140
            assert ((got.double() - want).abs() <= 2**-10 * want).all()


@pytest.mark.parametrize("dim", CLASSES)
def test_counting(backward, dim):
    """Through kernels with terms, of which none changes a score: a slope of 0; dropout that keeps nearly all would change some."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, mask, call):
            x = replace(inputs(Case("none", 1, (1, 1), (1, 1), (1, 1))), q=q, k=k, v=v, mask=mask, slopes=torch.zeros(q.size(1)))
            out, lse = forward64(x, call)
            ctx.x, ctx.call = x, call
            ctx.save_for_backward(out, lse)
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            grads = backward(ctx.x, ctx.call, *ctx.saved_tensors, grad_out, grad_lse)
            return *(grads[name] for name in ("dq", "dk", "dv")), None, None

    def run(q, k, v, attn_mask=None, mask_plan=None, **arguments):
        window = arguments["window_left"], arguments["window_right"]
        call = Call(arguments["is_causal"], arguments["bottom_right"], window, arguments["scale"])
        return Attention.apply(q, k, v, attn_mask, call)

    for seq_q, seq_k in ((65, 129), (193, 260)):
        for kind, call in itertools.product(("", "random", "granules"), (Call(), Call(is_causal=True), Call(window=(70, 3)))):
            mask = make_mask(kind, f"counting{dim}", (1, 2, seq_q, seq_k), torch.bfloat16) if kind else None
            check_counting(1, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=mask, call=call, mask_grad=False, forward=run)


@pytest.mark.parametrize("dim", CLASSES)
def test_deterministic(backward, dim):
    """The gradient of the sinks has the same bits in any case."""
    for mask, band, heads in (("", "full", (2, 2)), ("", "window_64_63", (4, 2)), ("granules", "causal", (2, 1))):
        case = case_of("fixed", "all", heads=heads, lengths=(260, 400), dims=(dim, dim), mask=mask, band=band)
        x, first = inputs(case), None
        run = runner(backward, deterministic=True)
        for _ in range(3):
            got = run(x, case.call) if first else check(x, case.call, run)
            first = first or got.grads
            assert all(torch.equal(got.grads[name], first[name]) for name in first)


@pytest.mark.parametrize("dim", (64, 128, 192, 256))
def test_any_batch(backward, dim):
    """A sequence has the same bits alone and in any place of a batch; without terms too."""
    for terms, mask, band in (("", "", "full"), ("", "bias:hqk", "causal"), ("slopes", "", "causal_br"), ("softcap", "bias:hqk", "full")):
        case = case_of("batch", terms or "sinks", batch=3, lengths=(260, 300), dims=(dim, dim), mask=mask, band=band)
        x = inputs(case)
        if not terms:
            x.sinks = None
        out, lse = forward64(x, case.call)
        whole = backward(x, case.call, out, lse, x.grad_out, None, batch_invariant=True)
        for b in (0, 2):
            one = replace(x, **{name: getattr(x, name)[b : b + 1] for name in ("q", "k", "v", "grad_out")})
            alone = backward(one, case.call, out[b : b + 1], lse[b : b + 1], one.grad_out, None, batch_invariant=True)
            for name in ("dq", "dk", "dv"):
                assert torch.equal(alone[name][0], whole[name][b]), name


@pytest.mark.parametrize("dim", (64, 192))
def test_large_scores(backward, dim):
    """Rows whose log-sum-exp has lost the logarithm of the sum, by their products, slopes or sinks."""
    for terms, mask in itertools.product(("slopes", "sinks", "all"), ("", "bias_inf")):
        case = case_of("large", terms, lengths=(70, 100), dims=(dim, dim), mask=mask)
        x = inputs(case)
        call = replace(case.call, softcap=3e4 if case.call.softcap else 0.0)
        check(replace(x, q=(x.q * 1e4).bfloat16()), call, runner(backward))
        if x.slopes is not None:
            check(replace(x, slopes=x.slopes.abs() * 1e4 + 1e3), replace(call, bottom_right=False, window=(-1, -1)), runner(backward))
        if x.sinks is not None:
            check(replace(x, sinks=x.sinks + 5000), call, runner(backward))


@pytest.mark.parametrize("dim", (64, 192))
def test_saturated_cap(backward, dim):
    """What passes the cap is next to nothing, and exactly as much."""
    for factor in (30.0, 1e4):
        case = case_of("saturated", "softcap", lengths=(100, 150), dims=(dim, dim))
        x = inputs(case)
        check(replace(x, q=(x.q * factor).bfloat16()), case.call, runner(backward))


def test_sinks_alone(backward):
    """Rows that no key sees have the sink, and keys of length 0; a sink of -inf is none."""
    case = case_of("alone", "sinks", heads=(2, 1), lengths=(300, 100), band="causal_br", lse_grad=True)
    x = inputs(case)
    x.sinks[0] = -INF
    check(x, case.call, runner(backward))
    for dim in (64, 192):
        x = inputs(case_of("nothing", "sinks", heads=(2, 1), lengths=(130, 5), dims=(dim, dim), lse_grad=True))
        x = replace(x, k=x.k[:, :, :0], v=x.v[:, :, :0])
        got = backward(x, Call(), *forward64(x, Call()), x.grad_out, x.grad_lse)
        assert (got["dq"] == 0).all()
        want = x.grad_lse.double().sum((0, 2))
        assert ((got["dsinks"].double() - want).abs() <= 1e-5 * x.grad_lse.abs().sum((0, 2))).all()


def test_only_the_sinks_need_a_gradient(backward):
    case = case_of("only", "all", lengths=(130, 200))
    x = inputs(case)
    run = runner(backward, deterministic=True)
    want = run(x, case.call).grads["dsinks"]
    got = runner(backward, deterministic=True, inputs_too=False)(x, case.call).grads
    assert list(got) == ["dsinks"] and torch.equal(got["dsinks"], want)


def test_bad_numbers_of_removed_keys(backward):
    """NaN in K of a removed key reaches no gradient of K and V, though the cap of a NaN is one."""
    for dim, band in itertools.product(CLASSES, ("full", "causal")):
        x = inputs(case_of("bad", "all", heads=(2, 2), lengths=(130, 330), dims=(dim, dim)))
        call = replace(BANDS[band], softcap=2.0, dropout_p=0.1)
        keep = torch.ones(1, 1, 130, 330, dtype=torch.bool)
        keep[..., 100] = False
        bad = x.k.clone()
        bad[:, :, 100] = float("nan")
        for mask in (keep, torch.ones_like(keep, dtype=torch.bfloat16).masked_fill_(~keep, -INF)):
            good = replace(x, mask=mask)
            out, lse = forward64(good, call)
            want, got = (backward(replace(good, k=k), call, out, lse, x.grad_out, None) for k in (x.k, bad))
            for name in ("dk", "dv"):
                assert (got[name].float() - want[name].float()).abs().max() <= 2**-6 * want[name].float().abs().max(), name
