"""Batch-invariant calls: a sequence has the same bits alone and at any place of any batch; asked for by attention(), by the op,
and for routed calls by the selection."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd

import torch_flashsdpa
from cases import Case, inputs

ATTENTION = torch_flashsdpa.attention
# What a batch of 1 is split for and a larger one is not: few heads and long keys in the forward for few rows, few heads in the
# backward, few chunks of queries in the forward.
CALLS = {
    "few rows": dict(heads=(2, 1), seq=(1, 4096), dim=(64, 64)),
    "few rows, mask": dict(heads=(4, 1), seq=(3, 2050), dim=(40, 24), mask="padding"),
    "many rows": dict(heads=(2, 2), seq=(300, 333), dim=(64, 64), is_causal=True),
    "grouped": dict(heads=(6, 2), seq=(130, 200), dim=(96, 72)),
    "window and mask": dict(heads=(1, 1), seq=(257, 257), dim=(32, 32), window=(40, 10), mask="padding"),
    "wide": dict(heads=(1, 1), seq=(200, 64), dim=(256, 256)),
    "sinks": dict(heads=(2, 1), seq=(140, 140), dim=(64, 64), sinks=True, softcap=20.0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@contextlib.contextmanager
def num_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=(1, 3, 8))
def threads(request):
    with num_threads(request.param):
        yield


@pytest.fixture
def eight_threads():
    with num_threads(8):
        yield


def sequence(name, dtype):
    """One sequence's q, k, v, grad_out and the arguments of attention(); every batch is made of it and of noise."""
    options = dict(CALLS[name])
    shape = {key: options.pop(key) for key in ("heads", "seq", "dim")}
    x = inputs(Case(f"batch {name}", batch=1, dtype=dtype, **shape))
    if options.pop("mask", None):
        mask = torch.ones(1, 1, 1, shape["seq"][1], dtype=torch.bool)
        mask[..., shape["seq"][1] * 2 // 3 :] = False
        options["attn_mask"] = mask
    if options.pop("sinks", None):
        options["sinks"] = torch.linspace(-1, 1, shape["heads"][0])
    return (x.q, x.k, x.v, x.grad_out), {**options, "enable_gqa": True, "return_lse": True}


def at_place(tensors, options, batch, place):
    """The call's bits at `place` of `batch` sequences: out, lse, dq, dk, dv."""
    def batched(t):
        noise = torch.randn(batch, *t.shape[1:], dtype=torch.float32).to(t.dtype)
        noise[place] = t[0]
        return noise

    *leaves, grad_out = map(batched, tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out, lse = ATTENTION(*leaves, **options)
    return [t[place].detach() for t in (out, lse, *torch.autograd.grad(out, leaves, grad_out))]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", CALLS)
def test_bits_at_any_place(name, dtype, threads):
    tensors, options = sequence(name, dtype)
    options["batch_invariant"] = True
    alone = at_place(tensors, options, 1, 0)
    for batch, place in ((2, 1), (3, 0), (7, 4), (16, 15)):
        assert same(alone, at_place(tensors, options, batch, place)), (batch, place)


def test_bits_in_a_batch_of_256():
    tensors, options = sequence("few rows, mask", torch.float32)
    options["batch_invariant"] = True
    alone = at_place(tensors, options, 1, 0)
    assert all(same(alone, at_place(tensors, options, 256, place)) for place in (0, 100, 255))


@pytest.mark.parametrize("name", ("few rows", "many rows", "grouped"))
def test_without_it_bits_depend_on_the_batch(name, eight_threads):
    """What the tests above would see if nothing were done: these calls are split for a batch of 1 alone."""
    tensors, options = sequence(name, torch.float32)
    assert not same(at_place(tensors, options, 1, 0), at_place(tensors, options, 16, 3))


def test_values_are_right_where_a_pair_has_several_splits_and_one_worker(threads):
    """Batch-invariant backward of many pairs: a worker adds up the splits of a pair by itself."""
    x = inputs(Case("splits of a pair", batch=9, dtype=torch.float64, heads=(2, 1), seq=(200, 130), dim=(24, 16)))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    got = ATTENTION(*leaves, enable_gqa=True, batch_invariant=True)
    want = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(got, leaves, x.grad_out), torch.autograd.grad(want, leaves, x.grad_out)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


# ---- routed calls


def routed_bits(batch, place):
    tensors, _ = sequence("few rows", torch.float32)
    q, k, v = (torch.randn(batch, *t.shape[1:]).index_copy(0, torch.tensor([place]), t) for t in tensors[:3])
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[place]


@pytest.mark.parametrize("backend", ("auto", "flashsdpa"))
@pytest.mark.parametrize("scoped", (False, True), ids=("default", "scope"))
def test_routed_calls(backend, scoped, eight_threads):
    places = ((1, 0), (2, 1), (16, 7))
    if scoped:
        with torch_flashsdpa.sdpa_backend(backend, batch_invariant=True):
            bits = [routed_bits(*at) for at in places]
            assert torch_flashsdpa.status()["batch_invariant"]
        assert not torch_flashsdpa.status()["batch_invariant"]
    else:
        torch_flashsdpa.enable(backend, batch_invariant=True)
        bits = [routed_bits(*at) for at in places]
        assert torch_flashsdpa.status()["default_batch_invariant"]
    assert torch_flashsdpa.routed_calls() == 3
    assert torch.equal(bits[0], bits[1]) and torch.equal(bits[0], bits[2])


def test_scopes_with_and_without_it_nest():
    def flag():
        return torch_flashsdpa.status()["batch_invariant"]

    for backend in ("flashsdpa", "auto"):
        with torch_flashsdpa.sdpa_backend(backend):
            assert not flag()
            with torch_flashsdpa.sdpa_backend(backend, batch_invariant=True):
                assert flag()
                with torch_flashsdpa.sdpa_backend(backend):
                    assert not flag()
                assert flag()
            assert not flag()


def test_auto_takes_every_supported_call():
    """Whether "auto" takes a call may depend on anything that was measured; here it must not, and stock promises nothing."""
    q = torch.randn(1, 1, 3, 3)
    torch_flashsdpa.enable("auto", batch_invariant=True)
    told = torch_flashsdpa.explain(q, q, q)
    assert told.chosen != "stock" and "auto (batch invariant)" in str(told)


def forward_node(graph):
    (node,) = [n for n in graph.graph.nodes if "flashsdpa.forward" in str(n.target)]
    return node


def compiled_for(function):
    """`function` compiled, and the list of the graphs that come of it."""
    graphs = []

    def keep(module, _):
        graphs.append(module)
        return module

    return torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=keep)), graphs


def test_a_compiled_function_notices_the_switch():
    attend, graphs = compiled_for(lambda q: F.scaled_dot_product_attention(q, q, q))
    q = torch.randn(2, 2, 5, 8)
    for flag in (False, True, False, True):
        torch_flashsdpa.enable("flashsdpa", batch_invariant=flag)
        attend(q)
    assert [forward_node(graph).kwargs.get("batch_invariant", False) for graph in graphs] == [False, True]


def test_a_scope_in_a_graph():
    def function(q):
        with torch_flashsdpa.sdpa_backend("flashsdpa", batch_invariant=True):
            return F.scaled_dot_product_attention(q, q, q)

    attend, graphs = compiled_for(function)
    attend(torch.randn(2, 2, 5, 8))
    assert forward_node(graphs[0]).kwargs["batch_invariant"] is True


def test_flags_are_checked():
    with pytest.raises(TypeError, match="batch_invariant is int 1"):
        torch_flashsdpa.enable(batch_invariant=1)
    with pytest.raises(TypeError, match="batch_invariant is str 'yes'"):
        with torch_flashsdpa.sdpa_backend("flashsdpa", batch_invariant="yes"):
            pass
