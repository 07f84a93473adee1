"""Compiled autograd: backwards of graphs that hold our nodes are captured with our ops in them, and give the gradients of the
engine; what a node saved is read again in every run, and what it was called with tells compiled backwards apart."""

import pytest
import torch
import torch_flashsdpa
from oracle import generator, ops
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_flashsdpa import attention, enable

compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")


def normal(name, *shapes, grad=True):
    random = generator(f"compiled autograd {name}")
    return [torch.randn(shape, generator=random).requires_grad_(grad) for shape in shapes]


def qkv(name, length=20):
    return normal(name, (2, 4, length, 8), (2, 2, length + 3, 8), (2, 2, length + 3, 6))


class Compiler:
    """Compiles what compiled autograd captures, in one graph, with AOTAutograd; remembers how often and which ops."""

    def __init__(self, backend="aot_eager", fullgraph=True):
        self.graphs, self.ops = 0, set()
        self._options = dict(backend=self._keep(backend), fullgraph=fullgraph, dynamic=None)

    def _keep(self, backend):
        if backend != "aot_eager":
            return backend
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, inputs):
            self.graphs += 1
            self.ops |= {str(node.target) for node in graph.graph.nodes if "flashsdpa" in str(node.target)}
            return graph.forward

        return aot_autograd(fw_compiler=keep)

    def __call__(self, module):
        return torch.compile(module, **self._options)

    def gradients(self, out, leaves):
        """The gradients that out.backward() adds to `leaves`, the backward compiled."""
        for leaf in leaves:
            leaf.grad = None
        with compiled_autograd._enable(self):
            out.backward()
        return [leaf.grad for leaf in leaves]


def check(make, leaves, compiler=None, backward="flashsdpa.backward.default"):
    """make() gives a scalar: its gradients by a compiled backward are those of the engine, and came from our op."""
    compiler = compiler or Compiler()
    want = torch.autograd.grad(make(), leaves)
    got = compiler.gradients(make(), leaves)
    assert backward is None or backward in compiler.ops
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    return compiler


def both(result):
    """out and lse, each with a gradient of its own."""
    out, lse = result
    return (out * out).sum() + lse.sin().sum()


def case(name):
    q, k, v = qkv(name)
    (bias,) = normal(f"{name} bias", (4, 1, 23))
    (sinks,) = normal(f"{name} sinks", (4,))
    gqa = dict(enable_gqa=True)
    return {
        "plain": (lambda: sdpa(q, k, v, **gqa).square().sum(), [q, k, v]),
        "causal": (lambda: sdpa(q, k, v, is_causal=True, scale=-0.3, **gqa).square().sum(), [q, k, v]),
        "bool mask": (lambda: sdpa(q, k, v, attn_mask=bias > 0, **gqa).square().sum(), [q, k, v]),
        "bias": (lambda: sdpa(q, k, v, attn_mask=bias, **gqa).square().sum(), [q, k, v, bias]),
        "keys alone": (lambda: sdpa(q.detach(), k, v.detach(), **gqa).square().sum(), [k]),
        "everything": (lambda: both(attention(q, k, v, bias, window=(5, 2), bottom_right=True, softcap=3.0, sinks=sinks,
                                              return_lse=True, **gqa)), [q, k, v, bias, sinks]),
        "lse alone": (lambda: attention(q, k, v, return_lse=True, **gqa)[1].sin().sum(), [q, k]),
    }[name]


@pytest.fixture(autouse=True)
def served():
    enable("flashsdpa", strict=True)


@pytest.mark.parametrize("name", ("plain", "causal", "bool mask", "bias", "keys alone", "everything", "lse alone"))
def test_gradients(name):
    make, leaves = case(name)
    assert check(make, leaves).graphs == 1


def test_inductor():
    make, leaves = case("plain")
    want = torch.autograd.grad(make(), leaves)
    torch.testing.assert_close(Compiler("inductor").gradients(make(), leaves), list(want))


def test_dropped_weights_are_the_forwards():
    q, k, v = qkv("dropout")
    torch.manual_seed(5)
    want = torch.autograd.grad(sdpa(q, k, v, dropout_p=0.4, enable_gqa=True).square().sum(), (q, k, v))
    torch.manual_seed(5)
    out = sdpa(q, k, v, dropout_p=0.4, enable_gqa=True).square().sum()
    torch.rand(3)
    for a, b in zip(Compiler().gradients(out, (q, k, v)), want):
        assert torch.equal(a, b)


def test_a_compiled_backward_serves_other_data_and_lengths():
    """The second length makes the sizes symbolic, and a third needs no graph more."""
    compiler = Compiler()
    for step, length in enumerate((20, 20, 33, 47, 64)):
        q, k, v = qkv(f"step {step}", length)
        check(lambda: sdpa(q, k, v, enable_gqa=True).square().sum(), [q, k, v], compiler)
    assert compiler.graphs == 2


DIFFERING = (dict(), dict(is_causal=True), dict(scale=0.9), dict(scale=0.1), dict(window=(4, 4)), dict(window=(9, 0)),
             dict(softcap=2.0))


def test_options_tell_compiled_backwards_apart():
    """Calls that differ in what is no tensor, one after the other, and over again: none gets another's backward."""
    compiler = Compiler("eager")
    q, k, v = qkv("options")
    for _ in range(2):
        for options in DIFFERING:
            check(lambda: attention(q, k, v, enable_gqa=True, **options).square().sum(), [q, k, v], compiler, backward=None)


def test_several_calls_in_one_backward():
    q, k, v = (t.detach().requires_grad_() for t in normal("chain", *[(1, 2, 12, 8)] * 3))

    def make():
        x = sdpa(q, k, v)
        x = sdpa(x, x, v, is_causal=True)
        return sdpa(q, x, k).square().sum()

    assert check(make, [q, k, v]).graphs == 1


def test_second_and_third_derivatives():
    """A gradient that was recorded is differentiated by a compiled backward: jvp in the graph, then the derivative of jvp,
    which runs as it stands."""
    q, k, v = (t.detach().double().requires_grad_() for t in normal("again", *[(1, 1, 3, 2)] * 3))

    def second():
        first = torch.autograd.grad(sdpa(q, k, v).sin().sum(), (q, k, v), create_graph=True)
        return sum(g.sin().sum() for g in first)

    def third():
        return sum(g.sin().sum() for g in torch.autograd.grad(second(), (q, k, v), create_graph=True))

    check(second, [q, k, v], backward="flashsdpa.jvp.default")
    check(third, [q, k, v], Compiler("eager", fullgraph=False), backward=None)


def test_saved_tensor_hooks_are_asked_in_the_graph():
    q, k, v = normal("hooks", *[(1, 2, 12, 8)] * 3)
    unpacked = []

    def make():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: unpacked.append(1) or t / 2):
            return sdpa(q, k, v).square().sum()

    want = torch.autograd.grad(make(), (q, k, v))
    unpacked.clear()
    got = Compiler(fullgraph=False).gradients(make(), (q, k, v))
    assert unpacked
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_a_second_backward_is_refused_and_a_retained_one_is_not():
    make, leaves = case("plain")
    compiler = Compiler()
    out = make()
    compiler.gradients(out, leaves)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        compiler.gradients(out, leaves)
    out = make()
    with compiled_autograd._enable(compiler):
        out.backward(retain_graph=True)
        first = [leaf.grad.clone() for leaf in leaves]
        out.backward()
    for leaf, grad in zip(leaves, first):
        torch.testing.assert_close(leaf.grad, 2 * grad)


@pytest.mark.parametrize("compiled_forward", (False, True), ids=("eager", "compiled"))
def test_torchs_setting(compiled_forward, routed):
    """torch._dynamo.config.compiled_autograd, as users switch it on: forward and backward in one compiled function."""
    make, leaves = case("bool mask")
    want = torch.autograd.grad(make(), leaves)
    for leaf in leaves:
        leaf.grad = None
    with torch._dynamo.config.patch(compiled_autograd=True):
        out = make() if not compiled_forward else None

        @torch.compile(backend="aot_eager")
        def step():
            (make() if compiled_forward else out).backward()

        assert routed(step) == compiled_forward
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(want))


def test_selection_does_not_reach_the_backward():
    """What served the forward serves its backward, whatever is selected by then."""
    make, leaves = case("plain")
    want = torch.autograd.grad(make(), leaves)
    out = make()
    torch_flashsdpa.disable()
    compiler = Compiler()
    got = compiler.gradients(out, leaves)
    assert compiler.ops == {"flashsdpa.backward.default"} and ops()
    for a, b in zip(got, want):
        assert torch.equal(a, b)
