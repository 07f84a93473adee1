"""The float32 Hopper kernels with soft cap, slopes, sinks, dropout and the gradient of a mask, without a GPU: on the emulator, forward
and backward, both oracles; every decision of dropout; poisoned outputs and scratch, another order of threads at each call."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BANDS, BROADCASTS, Case, inputs, make_mask
from launchers import band_of
from oracle import INF, Call, Result, check, check_counting, generator, keep_of, reference
from reference_dropout import dropout_kept, honoured
from reference_plan import reference_plan
from test_emulated_backward import poisoned, runner
from test_emulated_float32 import CLASSES, attention, emulator, pytestmark, tf32  # noqa: F401
from test_emulated_score_terms_backward import TERMS, case_of


@pytest.fixture
def run(emulator, request):  # noqa: F811
    """run(x, call): Result of forward and backward."""
    orders = generator(request.node.name)

    def shuffle():
        seed, processors = (int(torch.randint(high, (), generator=orders)) for high in (2**31, 4))
        emulator.configure(seed, processors + 1)

    def both(x, call, inputs_too=True, batch_invariant=False):
        seq_q, seq_k = x.q.size(2), x.k.size(2)
        band = {name: call.op_arguments()[name] for name in ("is_causal", "bottom_right", "window_left", "window_right")}
        options = dict(
            band=band_of(**band, seq_q=seq_q, seq_k=seq_k), scale=call.scale, mask=x.mask,
            mask_plan=None if x.mask is None else reference_plan(x.mask), softcap=call.softcap, slopes=x.slopes,
            diagonal=seq_k - seq_q if call.bottom_right else 0, sinks=None if x.sinks is None else x.sinks.detach(),
            rng_state=x.rng_state, dropout_p=call.dropout_p, batch_invariant=batch_invariant)  # fmt: skip
        out = poisoned(x.q, torch.Size((*x.q.shape[:3], x.v.size(3))))
        lse = torch.full(x.q.shape[:3], float("nan"))
        shuffle()
        emulator.forward(x.q, x.k, x.v, out, lse, **options)
        if x.grad_out is None:
            return Result(out, lse, {})
        grads = [poisoned(t) if inputs_too else None for t in (x.q, x.k, x.v)]
        grad_mask = torch.full(x.mask.shape, float("nan")) if x.mask_grad else None
        grad_sinks = torch.full((x.q.size(1),), float("nan")) if x.sinks is not None else None
        shuffle()
        emulator.backward(x.grad_out, x.q, x.k, x.v, out, lse, *grads, x.grad_lse, grad_mask=grad_mask, grad_sinks=grad_sinks, **options)
        found = zip(("dq", "dk", "dv", "dmask", "dsinks"), (*grads, grad_mask, grad_sinks))
        return Result(out, lse, {name: grad for name, grad in found if grad is not None})

    return both


def hold(run, *args, **options):
    """Right, and no gradient of a mask where no score takes part."""
    case = case_of(*args, dtype=torch.float32, **{"heads": (2, 1), "lengths": (70, 130), **options})
    x = inputs(case)
    got = check(x, case.call, run)
    if x.mask_grad:
        keep = keep_of(x, case.call).expand(x.q.size(0), x.q.size(1), -1, -1)
        assert (got.grads["dmask"][~(keep.long().sum_to_size(x.mask.shape) > 0)] == 0).all()
    return x, case.call, got


@pytest.mark.parametrize("terms", TERMS)
def test_terms(run, terms):
    for dim, band, mask in ((64, "causal_br", ""), (128, "full", "document")):
        hold(run, "terms", terms, dims=(dim, dim), band=band, mask=mask, lse_grad=True)


@pytest.mark.parametrize("dims", ((33, 20), (96, 96), (192, 128), (1, 200), (256, 256)), ids=str)
def test_dims(run, dims):
    hold(run, "dims", "all", dims=dims, mask="bias_inf" if dims[0] % 64 else "", band="causal_br", lengths=(70, 100))


@pytest.mark.parametrize("band", BANDS)
def test_bands(run, band):
    hold(run, "bands", "all", lengths=(140, 150), mask="granules" if band in ("full", "causal") else "", band=band, dims=(40, 40))


@pytest.mark.parametrize("seq_q", (1, 63, 65, 129))
def test_lengths(run, seq_q):
    terms = itertools.cycle(("all", "dropout", "slopes", "cap_drop"))
    for seq_k, mask, dim in zip((1, 33, 65, 129), itertools.cycle(("", "random")), itertools.cycle((64, 20, 100, 130))):
        hold(run, "lengths", next(terms), lengths=(seq_q, seq_k), heads=(1, 1), mask=mask, dims=(dim, dim))


def test_heads_of_a_group(run):
    """Each has a slope, a sink and random bits of its own."""
    hold(run, "heads", "all", batch=2, heads=(4, 2), lengths=(70, 80), mask="granules", band="causal", layout=("bsh",) * 3)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(run, scale):
    for mask, terms in (("", "all"), ("bias_inf", "slopes")):
        hold(run, "scale", terms, scale=scale, mask=mask, lengths=(60, 70), band="causal")


@pytest.mark.parametrize("softcap", (0.05, 50.0, 1e4))
def test_caps(run, softcap):
    """From one that leaves little of the scores to one that should not be seen: tanh is as good as float32's."""
    for factor in (1.0, 30.0):
        case = case_of("caps", "softcap", heads=(1, 1), lengths=(60, 100), dtype=torch.float32)
        x = inputs(case)
        check(replace(x, q=x.q * factor), replace(case.call, softcap=softcap, scale=1.0), run)


@pytest.mark.parametrize("dim, p", ((64, 0.3), (128, 0.3), (256, 0.3), (64, 0.001), (64, 1e-6), (64, 1.0)))
def test_which_weights_are_dropped(run, dim, p):
    """Score by score, of both passes: equal scores, V and the gradient of out made of unit vectors, the last keys and queries."""
    call, columns = Call(dropout_p=p), min(dim, 70)
    x = inputs(Case("kept", 2, (2, 1), (90, 140), (dim, dim), torch.float32, call=call))
    x.q.zero_(), x.v.zero_(), x.grad_out.zero_()
    x.v[:, :, torch.arange(140 - columns, 140), torch.arange(columns)] = 1
    x.grad_out[:, 1, torch.arange(90 - columns, 90), torch.arange(columns)] = 1
    got, want = run(x, call), dropout_kept(x.rng_state, p, 2, 2, 90, 140)
    weight = honoured(p)[1] / 140
    for name, seen, keep in (("out", got.out[..., :columns], want[..., -columns:]),
                             ("dv", got.grads["dv"][:, 0, :, :columns].mT, want[:, 1, -columns:])):  # fmt: skip
        assert torch.equal(seen != 0, keep), name
        assert ((seen.double() - weight * keep).abs() < 1e-6 * max(weight, 1)).all(), name


@pytest.mark.parametrize("dim", CLASSES)
def test_counting(run, dim):
    """Through kernels with terms, of which none changes a score: slopes of 0."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, mask, call):
            ctx.x = replace(inputs(Case("none", 1, (1, 1), (1, 1), (1, 1))), q=q, k=k, v=v, mask=mask, slopes=torch.zeros(q.size(1)))
            ctx.call = call
            ctx.set_materialize_grads(False)
            got = run(replace(ctx.x, grad_out=None), call)
            return got.out, got.lse

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            if grad_out is None:
                grad_out = torch.zeros(1, 1, 1, 1).expand(*ctx.x.q.shape[:3], ctx.x.v.size(3))
            mask_grad = ctx.needs_input_grad[3]
            grads = run(replace(ctx.x, grad_out=grad_out, grad_lse=grad_lse, mask_grad=mask_grad), ctx.call).grads
            return grads["dq"], grads["dk"], grads["dv"], grads.get("dmask"), None

    def attend(q, k, v, attn_mask=None, mask_plan=None, **arguments):
        window = arguments["window_left"], arguments["window_right"]
        call = Call(arguments["is_causal"], arguments["bottom_right"], window, arguments["scale"])
        return Attention.apply(q, k, v, attn_mask, call)

    keep = make_mask("granules", f"counting{dim}", (1, 2, 65, 97), torch.float32)
    mask = torch.zeros(keep.shape).masked_fill_(~keep, -INF)
    check_counting(1, 2, 1, 65, 97, dim, torch.float32, mask=mask, call=Call(window=(70, 3)), forward=attend)


@pytest.mark.parametrize("dim", (64, 192))
def test_large_scores(run, dim):
    """Rows whose log-sum-exp has lost the logarithm of the sum, by their products, slopes or sinks."""
    for terms in ("slopes", "sinks", "all"):
        case = case_of("large", terms, heads=(2, 2), lengths=(40, 50), dims=(dim, dim), dtype=torch.float32)
        x = inputs(case)
        call = replace(case.call, softcap=3e4 if case.call.softcap else 0.0)
        check(replace(x, q=x.q * 1e4), call, run)
        if x.sinks is not None:
            check(replace(x, sinks=x.sinks + 5000), call, run)
        if terms == "sinks":  # as large as all the scores, which are equal
            score = 25 * 25 * dim * call.scale_for(dim)
            check(replace(x, q=torch.full_like(x.q, 25), k=torch.full_like(x.k, 25), sinks=x.sinks + score), call, run)


def test_rows_that_are_all_the_sinks(run):
    """No key by the band, by a mask, or for there is none; a sink of -inf is none."""
    x, call, _ = hold(run, "blind", "sinks", lengths=(140, 60), band="causal_br", lse_grad=True)
    check(replace(x, sinks=torch.tensor([-INF, 0.5])), call, run)
    for mask in (torch.zeros(1, 1, 1, 60, dtype=torch.bool), None):
        keys = slice(0, 60 if mask is not None else 0)
        got = run(replace(x, k=x.k[:, :, keys], v=x.v[:, :, keys], mask=mask), Call())
        assert (got.out == 0).all() and (got.lse - x.sinks[:, None]).abs().max() < 1e-5 and (got.grads["dq"] == 0).all()
        assert torch.allclose(got.grads["dsinks"], x.grad_lse.sum((0, 2)), atol=1e-4)


def test_bad_numbers(run):
    """NaN of an allowed score shows behind the cap, that of a removed one does not, nor in the gradients of K, V and the mask."""
    x = inputs(case_of("bad", "all", heads=(2, 2), lengths=(70, 130), dtype=torch.float32))
    call, keep = Call(softcap=2.0, dropout_p=0.1), (torch.arange(130) != 100).expand(1, 1, 70, 130)
    bias = torch.zeros(1, 1, 70, 130).masked_fill(~keep, -INF)
    bad = replace(x, k=x.k.index_fill(2, torch.tensor(100), float("nan")), v=x.v.index_fill(2, torch.tensor(101), float("nan")))
    assert run(replace(bad, v=x.v, grad_out=None), call).out.isnan().all()
    good, seen = (run(replace(t, v=x.v, mask=bias, mask_grad=True), call) for t in (x, bad))
    assert torch.equal(good.out, seen.out) and all(torch.equal(good.grads[n], seen.grads[n]) for n in ("dk", "dv", "dmask", "dsinks"))
    bias[..., 101] = -INF
    assert (run(replace(bad, k=x.k, mask=bias, mask_grad=True), call).grads["dmask"][..., 101] == 0).all()


def test_bits_do_not_depend_on_the_batch_or_the_order(run):
    for terms, mask in (("softcap", ""), ("slopes", "bias:hqk")):
        case = case_of("batch", terms, batch=2, lengths=(70, 150), heads=(2, 1), mask=mask, dtype=torch.float32, band="causal")
        x = inputs(case)
        whole, again = (run(x, case.call, batch_invariant=True) for _ in range(2))
        one = replace(x, **{name: getattr(x, name)[1:2] for name in ("q", "k", "v", "grad_out")})
        alone = run(one, case.call, batch_invariant=True)
        for a, b, part in zip(*((r.out, r.lse, *r.grads.values()) for r in (whole, again, alone))):
            assert torch.equal(a, b) and torch.equal(a[1:2], part)


def test_the_lean_kernels_give_the_same_bits(run):
    """As those with terms, of which none does anything."""
    for dim in CLASSES:
        x = inputs(Case("same", 1, (2, 1), (65, 100), (dim, dim), torch.float32, mask="bias", grad=""))
        lean, full = run(x, Call(is_causal=True)), run(replace(x, slopes=torch.zeros(2)), Call(is_causal=True))
        assert torch.equal(lean.out, full.out) and torch.equal(lean.lse, full.lse)


@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_mask_gradient(run, axes):
    dim, terms = CLASSES[len(axes) % 3], "all" if "k" in axes else "dropout"
    hold(run, "dmask", terms, mask=f"bias_inf:{axes or '-'}", mask_grad=True, batch=2, lengths=(65, 70), dims=(dim, dim), band="causal")


@pytest.mark.parametrize("kind", ("bias", "zeros", "all_inf", "lowest", "alibi"))
def test_mask_gradient_of_kinds(attention, kind):  # noqa: F811
    """Without terms, through autograd: strides of all sorts, tiles that the plan empties, and those that the band does."""
    strides = dict(bias="transposed", zeros="expanded", all_inf="", lowest="corner", alibi="cols")[kind]
    for axes, band, lengths in (("hqk", "window_64_63", (140, 130)), ("k", "full", (60, 70)), ("bq", "causal_br", (60, 70))):
        case = Case(f"kinds-{axes}", 2, (2, 1), lengths, (64, 64), torch.float32, mask=f"{kind}:{axes}:{strides}", mask_grad=True,
                    call=BANDS[band], lse_grad=True)  # fmt: skip
        check(inputs(case), case.call, runner(attention))


@pytest.mark.parametrize("dim", CLASSES)
def test_mask_gradient_of_many_visits(run, dim):
    lengths = (140, 100) if dim < 256 else (70, 60)
    for axes, heads, sizes in (("qk", (4, 2), lengths), ("k", (1, 1), lengths), ("q", (1, 1), lengths[::-1])):
        x, call, _ = hold(run, "visits", "slopes", mask=f"bias:{axes}", mask_grad=True, heads=heads, lengths=sizes, dims=(dim, dim))
    if dim == 64:
        shape = (1, 1, *lengths[::-1])
        check(replace(x, mask=torch.where(make_mask("granules", "holes", shape, torch.float32), torch.randn(shape), -INF)), call, run)


def test_only_mask_or_sinks_need_a_gradient(run):
    x, call, want = hold(run, "only", "all", mask="bias:qk", mask_grad=True)
    got = run(x, call, inputs_too=False).grads
    assert list(got) == ["dmask", "dsinks"] and torch.equal(got["dsinks"], want.grads["dsinks"])
    assert (got["dmask"] - want.grads["dmask"]).abs().max() < 1e-5  # parts are by the number of processors


def test_tf32(run, tf32):  # noqa: F811
    """Errors of TF32, not more."""
    for dim in (64, 256):
        case = case_of("tf32", "all", heads=(2, 1), lengths=(70, 100), dims=(dim, dim), mask="bias:qk", mask_grad=True, dtype=torch.float32)
        x = inputs(case)
        got, want = run(x, case.call), reference(x, case.call)
        for name, one, other in (("out", got.out, want.out), *((n, got.grads[n], want.grads[n]) for n in got.grads)):
            error = ((one.double() - other).abs().max() / other.abs().max()).item()
            assert 1e-6 < error < 5e-3, (name, error)
