"""Dropout: the weights that are dropped are rebuilt bit by bit (reference_dropout.py), so that both oracles hold for it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, FLOATS, Case, dropout_cases, inputs, make_mask
from oracle import Call, Inputs, check, compare, generator, ops
from reference_dropout import dropout_factor, dropout_kept, honoured, philox4x32
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import torch_flashsdpa
from torch_flashsdpa import enable, explain, sdpa_backend
from torch_flashsdpa._loader import binding


def normal(name, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator(name)).to(dtype)


def fresh_state(name):
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator(name))


def sdpa(*args, p=0.3, **kwargs):
    return F.scaled_dot_product_attention(*args, dropout_p=p, **kwargs)


def seen_by_out(state, p, batch, heads, seq_q, seq_k, dtype=torch.float32, **options):
    """(batch, heads, seq_q, seq_k) bool: the weights that the forward keeps: equal scores, unit vectors for values."""
    q, k = torch.zeros(batch, heads, seq_q, 8, dtype=dtype), torch.zeros(batch, heads, seq_k, 8, dtype=dtype)
    parts = []
    for start in range(0, seq_k, 256):
        units = torch.eye(seq_k, dtype=dtype)[None, None, :, start : start + 256].expand(batch, heads, -1, -1)
        out, _ = ops().forward(q, k, units, dropout_p=p, rng_state=state, **options)
        parts.append(out)
    out = torch.cat(parts, -1).double()
    assert torch.unique((out * seq_k).round(decimals=2)).numel() <= 2, "kept weights have one value"
    return out != 0


# --- which weights are dropped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter, key, words", [
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
])  # fmt: skip
def test_philox_known_answers(counter, key, words):
    """Those that Random123 publishes for philox4x32-7."""
    assert tuple(int(word) for word in philox4x32(counter, key)) == words


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("seq", ((1, 300), (5, 130), (8, 64), (70, 200), (257, 129)), ids=str)
def test_every_decision(seq, dtype):
    """Of the kernel for few rows and of the other, one weight by one, in any batch and head."""
    state = fresh_state(f"decisions{seq}{dtype}")
    for p in (0.001, 0.1, 0.5, 0.9, 0.9999):
        assert torch.equal(seen_by_out(state, p, 2, 3, *seq, dtype), dropout_kept(state, p, 2, 3, *seq)), p


def test_every_decision_of_the_backward():
    """V of ones and grad_out of ones leave dS = (Z - mean of Z) / n, which K of unit vectors shows in dQ; dV shows Z itself."""
    batch, heads, seq_q, seq_k, p = 2, 2, 130, 200, 0.4
    state = fresh_state("backward")
    factor = dropout_factor(state, p, batch, heads, seq_q, seq_k)
    q = torch.zeros(batch, heads, seq_q, seq_k, requires_grad=True)
    k = torch.eye(seq_k).expand(batch, heads, -1, -1)
    v = torch.ones(batch, heads, seq_k, seq_q, requires_grad=True)
    out, _ = ops().forward(q, k, v, scale=1.0, dropout_p=p, rng_state=state)
    dq, dv = torch.autograd.grad(out, (q, v), torch.eye(seq_q).expand(batch, heads, -1, -1))
    assert (dv.transpose(-1, -2) * seq_k - factor).abs().max() < 1e-4
    (dq,) = torch.autograd.grad(ops().forward(q, k, v[..., :1], scale=1.0, dropout_p=p, rng_state=state)[0], q,
                                torch.ones(batch, heads, seq_q, 1))
    assert (dq * seq_k + factor.mean(-1, keepdim=True) - factor).abs().max() < 1e-4


def test_rows_of_both_kernels_agree():
    """Four queries go to the kernel for few rows, forty to the other."""
    state = fresh_state("both")
    few, many = (seen_by_out(state, 0.5, 2, 4, n, 300) for n in (4, 40))
    assert torch.equal(few, many[:, :, :4]) and 0.4 < few.double().mean() < 0.6


def test_positions_are_those_of_the_call_and_not_of_what_is_visited():
    """A band or a mask skips tiles and keys; the others keep their decisions."""
    state, seq = fresh_state("visited"), (200, 330)
    q, k = torch.zeros(1, 2, seq[0], 8), torch.zeros(1, 2, seq[1], 8)
    kept = dropout_kept(state, 0.5, 1, 2, *seq)
    mask = make_mask("granules", "visited", (1, 2, *seq), torch.float32)
    for call, extra, keep in ((Call(window=(70, 3)), {}, Call(window=(70, 3)).visible(*seq)), (Call(), {"attn_mask": mask}, mask),
                              (Call(), {"attn_mask": mask, "mask_plan": ops().mask_plan(mask)}, mask)):
        for start in range(0, seq[1], 256):
            units = torch.eye(seq[1])[None, None, :, start : start + 256].expand(1, 2, -1, -1)
            out, _ = ops().forward(q, k, units, dropout_p=0.5, rng_state=state, **extra, **call.op_arguments())
            assert torch.equal(out != 0, (kept & keep)[..., start : start + 256])


@pytest.mark.parametrize("p", (0.001, 0.1, 0.5, 0.9))
def test_keep_rate(p):
    """5.5 standard deviations of the binomial for all, for heads, for queries and for keys; pairs of neighbours are independent."""
    state, (batch, heads, seq_q, seq_k) = fresh_state(f"rate{p}"), (3, 4, 384, 640)
    kept = seen_by_out(state, p, batch, heads, seq_q, seq_k).double()
    rate = honoured(p)[0] / 65536
    assert abs(rate - (1 - p)) <= 2**-17

    def hold(count, of, expected):
        deviation = (expected * (1 - expected) / of) ** 0.5
        assert ((count / of - expected).abs() < 5.5 * deviation).all(), (p, expected, (count / of - expected).abs().max())

    hold(kept.sum(), kept.numel(), rate)
    hold(kept.sum((2, 3)), seq_q * seq_k, rate)
    for axes in ((0, 1, 3), (0, 1, 2)):
        hold(kept.sum(axes), batch * heads * (seq_k if 3 in axes else seq_q), rate)
    for shift in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 8, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 8), (0, 0, 16, 16), (0, 0, 64, 0)):
        both = kept * kept.roll(shift, (0, 1, 2, 3))
        hold(both.sum(), kept.numel(), rate * rate)


@pytest.mark.parametrize("p", (1 / 65536, 3 / 65536, 1 / 512, 1 - 3 / 65536))
def test_small_probabilities(p):
    """What a byte alone cannot say: 5.5 standard deviations of the binomial."""
    batch, heads, seq_q, seq_k = 3, 4, 384, 640
    kept = seen_by_out(fresh_state(f"small{p}"), p, batch, heads, seq_q, seq_k)
    rate, count = honoured(p)[0] / 65536, kept.numel()
    assert abs(rate - (1 - p)) < 1e-12 and abs(int(kept.sum()) - rate * count) < 5.5 * (rate * (1 - rate) * count) ** 0.5


def test_scores_of_a_call_are_independent():
    """Each pair of the sixteen that one call decides: both are kept as often as of two that know nothing of each other."""
    p = 0.3
    kept = dropout_kept(fresh_state("pairs"), p, 3, 4, 384, 640).double()
    bits = kept.unflatten(3, (40, 2, 4, 2)).unflatten(2, (24, 2, 4, 2))  # of keys and queries: 16, bit 3, bits 1 and 2, bit 0
    own = bits.permute(3, 5, 7, 9, 0, 1, 2, 4, 6, 8).reshape(16, -1)
    centred = own - honoured(p)[0] / 65536
    correlation = centred @ centred.T / centred.square().sum(1).mean()
    assert (correlation - torch.eye(16)).abs().max() < 5.5 / own.size(1) ** 0.5


def test_every_bit_of_the_state_counts():
    """Seed and offset, their high halves too, give other decisions, and independent ones."""
    state = fresh_state("bits")
    first = seen_by_out(state, 0.5, 1, 1, 256, 256)
    for position in (0, 1):
        for bit in (0, 31, 32, 47, 63):
            other = state.clone()
            other[position] ^= torch.tensor(1 << bit) if bit < 63 else torch.tensor(-(2**63))
            same = (first == seen_by_out(other, 0.5, 1, 1, 256, 256)).double().mean().item()
            assert abs(same - 0.5) < 5.5 * 0.5 / 256, (position, bit, same)


ISA_CODE = """
import sys, torch
sys.path.insert(0, {tests!r})
from reference_dropout import dropout_kept
from test_dropout import seen_by_out, fresh_state
from oracle import Call, check
from cases import Case, inputs
state = torch.tensor({state})
for seq in ((3, 130), (130, 200)):
    assert torch.equal(seen_by_out(state, 0.3, 2, 2, *seq), dropout_kept(state, 0.3, 2, 2, *seq))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        check(inputs(Case("isa", heads=(4, 2), seq=seq, dtype=dtype, call=Call(dropout_p=0.3), lse_grad=True)), Call(dropout_p=0.3))
from torch_flashsdpa import explain
print(explain(*[torch.zeros(1, 1, 70, 8, dtype=torch.bfloat16)] * 3, dropout_p=0.3, backend="flashsdpa").chosen)
"""


@pytest.mark.parametrize("isa", ("portable", "avx2", "avx512", "amx"))
def test_instruction_sets_agree(isa, run_python):
    if not binding().cpu_features()[isa]:
        pytest.skip(f"{isa} is not available on this machine")
    code = ISA_CODE.format(tests=str(Path(__file__).parent), state=fresh_state("isa").tolist())
    assert run_python(code, env={"TORCH_FLASHSDPA_CPU_ISA": isa}).endswith(f"flashsdpa_fwd_cpu_{isa}")


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seq in ((260, 200), (2, 2000)):
            call = Call(dropout_p=0.3)
            check(inputs(Case(f"threads{seq}", heads=(4, 1), seq=seq, dim=(64, 64), call=call, lse_grad=True, sinks=True)), call)
    finally:
        torch.set_num_threads(before)


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", dropout_cases(), ids=str)
def test_against_the_oracle(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_heads_and_many_tiles(dtype):
    call = Call(dropout_p=0.2, is_causal=True)
    check(inputs(Case("wide", heads=(2, 1), seq=(330, 390), dim=(192, 128), dtype=dtype, call=call)), call)


@pytest.mark.parametrize("rows", (3, 70))
@pytest.mark.parametrize("p", (0.0, 1e-11, 7e-6))
def test_what_rounds_to_none_is_none(p, rows):
    x = inputs(Case(f"none{p}{rows}", heads=(4, 2), seq=(rows, 130), call=Call(dropout_p=0.5), lse_grad=True, sinks=True))
    got, want = check(x, Call(dropout_p=p)), check(x, Call())
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    assert all(torch.equal(got.grads[name], want.grads[name]) for name in want.grads)


@pytest.mark.parametrize("rows", (3, 70))
@pytest.mark.parametrize("p", (1.0, 1 - 1e-9))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dropout_of_everything(dtype, p, rows):
    """Output and gradients 0; the log-sum-exp, and what its gradient gives, as without dropout."""
    x = inputs(Case(f"all{rows}", heads=(4, 2), seq=(rows, 130), dtype=dtype, call=Call(dropout_p=p), sinks=True))
    got = check(x, Call(dropout_p=p))
    assert (got.out == 0).all() and all((grad == 0).all() for grad in got.grads.values())
    x.grad_lse = normal("lse", 1, 4, rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    got = check(x, Call(dropout_p=p))
    want = check(Inputs(x.q, x.k, x.v, grad_out=torch.zeros_like(x.grad_out), grad_lse=x.grad_lse, sinks=x.sinks), Call())
    assert torch.equal(got.lse, want.lse) and torch.equal(got.grads["dk"], want.grads["dk"])


@pytest.mark.parametrize("rows", (3, 70))
def test_the_mean_is_that_without_dropout(rows):
    """Also where p is not a multiple of 2^-16: kept weights grow by what is honoured."""
    p = 2.5 / 65536 + 0.75
    x = inputs(Case(f"mean{rows}", seq=(rows, 64), dim=(8, 8), grad=""))
    total, want = 0.0, ops().forward(x.q, x.k, x.v)[0].double()
    runs = 4000
    states = torch.randint(-(2**63), 2**63 - 1, (runs, 2), generator=generator("mean"))
    for state in states:
        total = total + ops().forward(x.q, x.k, x.v, dropout_p=p, rng_state=state)[0].double()
    weights = (x.q.double() @ x.k.double().transpose(-1, -2) * 8**-0.5).softmax(-1)
    deviation = ((weights**2) @ (x.v.double() ** 2) * p / (1 - p) / runs).sqrt()
    assert ((total / runs - want).abs() < 6 * deviation).all()


@pytest.mark.parametrize("rows", (3, 66))
def test_gradcheck(rows):
    x = inputs(Case(f"gradcheck{rows}", heads=(2, 1), seq=(rows, 9), dim=(4, 3), dtype=torch.float64, mask="bias:hqk"))
    state = fresh_state("gradcheck")

    def forward(q, k, v, mask):
        return ops().forward(q, k, v, attn_mask=mask, dropout_p=0.4, rng_state=state)

    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.mask)]
    assert torch.autograd.gradcheck(forward, leaves, fast_mode=rows > 8)


def test_a_dropped_key_does_not_hide_nan_of_a_score():
    """Dropout is behind the softmax: NaN of any score is in the sum of its row."""
    x = inputs(Case("nan", seq=(70, 70), call=Call(dropout_p=0.5), grad=""))
    x.k[0, 0, 3] = float("nan")
    out, lse = ops().forward(x.q, x.k, x.v, dropout_p=0.5, rng_state=x.rng_state)
    assert out[0, 0].isnan().all() and lse[0, 0].isnan().all() and out[0, 1].isfinite().all()


@pytest.mark.parametrize("size", (dict(batch=0), dict(seq=(0, 65)), dict(seq=(65, 0)), dict(dim=(0, 32)), dict(dim=(32, 0))), ids=str)
def test_zero_sizes(size):
    check(inputs(Case(f"zero{size}", **size, call=Call(dropout_p=0.5))), Call(dropout_p=0.5))


def test_layouts_of_the_state():
    x = inputs(Case("layouts", seq=(66, 70), grad="", call=Call(dropout_p=0.5)))
    want = ops().forward(x.q, x.k, x.v, dropout_p=0.5, rng_state=x.rng_state)[0]
    spread = torch.stack([x.rng_state, -x.rng_state], 1)[:, 0]
    assert spread.stride(0) == 2
    assert torch.equal(ops().forward(x.q, x.k, x.v, dropout_p=0.5, rng_state=spread)[0], want)


# --- routing ----------------------------------------------------------------------------------------------------------


def make(*shape, grad=False):
    return [torch.randn(*(shape or (2, 2, 70, 16)), requires_grad=grad) for _ in range(3)]


@pytest.mark.parametrize("options", ({}, {"is_causal": True}, {"attn_mask": torch.rand(70, 70) < 0.7}), ids=("full", "causal", "mask"))
def test_sdpa_draws_the_state_of_its_op(options, routed):
    q, k, v = make()
    torch.manual_seed(5)
    state = ops().rng_state()
    enable("flashsdpa", strict=True)
    torch.manual_seed(5)
    outs = []
    assert routed(lambda: outs.append(sdpa(q, k, v, **options))) == 1
    keep = Call(is_causal=options.get("is_causal", False)).visible(70, 70)[None, None]
    keep = keep & options["attn_mask"] if "attn_mask" in options else keep
    scores = torch.where(keep, q.double() @ k.double().transpose(-1, -2) / 4, -torch.inf)
    want = (scores.softmax(-1).nan_to_num(0.0) * dropout_factor(state, 0.3, 2, 2, 70, 70)) @ v.double()
    compare("out", outs[0], want, 1e-5)


def test_seeds_forks_and_two_calls(routed):
    q, k, v = make()
    enable("flashsdpa")
    torch.manual_seed(1)
    first, second = sdpa(q, k, v), sdpa(q, k, v)
    after = torch.rand(1)
    assert not torch.equal(first, second), "the generator goes on"
    torch.manual_seed(1)
    assert torch.equal(sdpa(q, k, v), first)
    with torch.random.fork_rng():
        sdpa(q, k, v)
        torch.manual_seed(1)
        assert torch.equal(sdpa(q, k, v), first)
    assert torch.equal(sdpa(q, k, v), second)
    assert torch.equal(torch.rand(1), after)
    state = torch.get_rng_state()
    sdpa(q, k, v, p=0.0)
    assert torch.equal(torch.get_rng_state(), state), "without dropout nothing is drawn"


def test_the_explicit_function_draws_alike(routed):
    q, k, v = make()
    torch.manual_seed(2)
    want = torch_flashsdpa.attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(2)
    with sdpa_backend("flashsdpa", strict=True):
        assert torch.equal(sdpa(q, k, v), want)
    assert torch.equal(torch_flashsdpa.attention(q, k, v, dropout_p=1e-11), torch_flashsdpa.attention(q, k, v))


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_recomputed_under_a_checkpoint(use_reentrant, routed):
    inputs = make(grad=True)
    enable("flashsdpa", strict=True)
    torch.manual_seed(3)
    out = sdpa(*inputs).sin()
    want = out.detach(), *torch.autograd.grad(out.sum(), inputs)

    got = []

    def recomputed():
        torch.manual_seed(3)
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = checkpoint(lambda *x: sdpa(*x).sin(), *leaves, use_reentrant=use_reentrant)
        torch.rand(3)  # the generator has gone on by the time of the backward
        out.sum().backward()
        got.extend((out.detach(), *(t.grad for t in leaves)))

    assert routed(recomputed) == 2
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled(backend, routed):
    """One node for the state and one for the attention; two calls differ, forward and backward agree."""
    nodes = []

    def count(graph, example_inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes if "flashsdpa" in str(node.target))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    q, k, v = make(grad=True)
    enable("flashsdpa", strict=True)
    compiled = torch.compile(sdpa, backend=aot_autograd(fw_compiler=count) if backend == "aot_eager" else backend, fullgraph=True)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    if nodes:
        assert nodes[:2] == ["flashsdpa.rng_state.default", "flashsdpa.forward.default"]
    torch.manual_seed(4)
    out = compiled(q, k, v)
    got = out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    torch.manual_seed(4)
    out = sdpa(q, k, v)
    want = out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    if backend == "aot_eager":  # inductor draws from a generator of its own where it replaces torch's
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert (got[0] == 0).sum() == (want[0] == 0).sum()


def test_compiled_backward_drops_what_its_forward_dropped():
    """Whatever state inductor draws: V of unit vectors shows the kept weights in out, and dV must be their transpose."""
    q = torch.zeros(1, 2, 70, 8)
    v = torch.eye(70).expand(1, 2, -1, -1).clone().requires_grad_()
    enable("flashsdpa", strict=True)
    compiled = torch.compile(lambda v: sdpa(q, q, v), fullgraph=True)
    for _ in range(2):
        out = compiled(v)
        (dv,) = torch.autograd.grad(out, v, torch.eye(70).expand(1, 2, -1, -1))
        assert torch.equal(dv != 0, (out != 0).transpose(-1, -2)) and (out == 0).any()


def test_compiled_checkpoint():
    """torch recomputes the op that draws under the state that it saved."""
    q = torch.zeros(1, 2, 70, 8)
    v = torch.eye(70).expand(1, 2, -1, -1).clone().requires_grad_()
    enable("flashsdpa", strict=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(v):
        return checkpoint(lambda v: sdpa(q, q, v), v, use_reentrant=False)

    out = step(v)
    (dv,) = torch.autograd.grad(out, v, torch.eye(70).expand(1, 2, -1, -1))
    assert torch.equal(dv != 0, (out != 0).transpose(-1, -2)) and (out == 0).any()


def test_layers_in_training(routed):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    x = torch.randn(2, 70, 16)
    enable("flashsdpa", strict=True)

    outs = []

    def run():
        torch.manual_seed(6)
        outs.append(layer(x))

    assert routed(run) == 1
    run()
    assert torch.equal(*outs)


def test_meta_and_opcheck():
    x = inputs(Case("opcheck", batch=2, seq=(9, 11), dim=(8, 6), call=Call(dropout_p=0.4)))
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    options = dict(dropout_p=0.4, rng_state=x.rng_state)
    opcheck(ops().forward.default, leaves, options)
    out, lse = ops().forward(x.q, x.k, x.v, **options)
    opcheck(ops().backward.default, (x.grad_out, torch.ones_like(lse), x.q, x.k, x.v, out, lse),
            dict(options, output_mask=[True] * 3 + [False] * 2))
    meta, _ = ops().forward(*(t.to("meta") for t in (x.q, x.k, x.v)), dropout_p=0.4, rng_state=x.rng_state.to("meta"))
    assert meta.shape == out.shape and meta.stride() == out.stride()
    assert explain(*(t.to("meta") for t in (x.q, x.k, x.v)), dropout_p=0.4, backend="flashsdpa").chosen.startswith("flashsdpa_")


def test_the_table_of_auto_has_rows_of_dropout(routed):
    isa = explain(*make(), dropout_p=0.3, backend="flashsdpa").config["isa"]
    row = dict(isa=isa, dtype="float32", kind="full", grad=False, dim=16, seq_q=70, seq_k=70, ratio=2.0)
    from torch_flashsdpa import auto_table

    try:
        enable("auto")
        binding().set_auto_table([row])
        assert routed(sdpa, *make()) == 0
        assert f"auto: no recorded run for {isa} float32 dropout forward" in explain(*make(), dropout_p=0.3).reasons
        binding().set_auto_table([row | {"ratio": 0.5}, row | {"kind": "dropout"}])
        assert routed(sdpa, *make()) == 1 and routed(sdpa, *make(), is_causal=True) == 1 and routed(sdpa, *make(), p=0.0) == 0
    finally:
        binding().set_auto_table(auto_table.rows())


@pytest.mark.parametrize("band", ("full", "window_20_5"))
def test_the_same_bits_in_every_run(band):
    x = inputs(Case(f"again{band}", heads=(4, 2), seq=(200, 130), call=Call(dropout_p=0.3)))
    first, again = (check(x, Call(dropout_p=0.3, window=BANDS[band].window)) for _ in range(2))
    assert torch.equal(first.out, again.out) and all(torch.equal(first.grads[n], again.grads[n]) for n in first.grads)
