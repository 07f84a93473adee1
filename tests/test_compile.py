"""Compiled code and the selection: a toggle is noticed, both graphs are kept, scopes work inside graphs.

Most properties are Dynamo's, so that the cheap backend "aot_eager" shows them; inductor runs where it matters.
"""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import torch_flashsdpa
from torch_flashsdpa import disable, enable, profiler, sdpa_backend


class Graphs:
    """A backend that counts the graphs it is given and hands them to another one."""

    def __init__(self, backend="aot_eager"):
        self.count = 0
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.count += 1
        return self._compile(graph, inputs)


def make(grad=False, length=16):
    return [torch.randn(2, 3, length, 8, requires_grad=grad) for _ in range(3)]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def attend(x):
    return F.scaled_dot_product_attention(x, x, x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


# --- toggling ---------------------------------------------------------------------------------------------------------


def _direct(graphs):
    inputs = make(grad=True)
    compiled = torch.compile(sdpa, backend=graphs, fullgraph=True)
    return lambda: torch.autograd.grad(compiled(*inputs).sum(), inputs)


def _module(graphs):
    compiled, x = torch.compile(Block(), backend=graphs, fullgraph=True), torch.randn(2, 5, 16)
    return lambda: compiled(x).sum().backward()


def _per_block(graphs):
    blocks, x = nn.ModuleList([Block(), Block()]), torch.randn(2, 5, 16)
    for block in blocks:
        block.compile(backend=graphs)
    return lambda: blocks[1](blocks[0](x)).sum().backward()


def _checkpoint_outside(graphs):
    inputs = make(grad=True)
    compiled = torch.compile(sdpa, backend=graphs, fullgraph=True)
    return lambda: checkpoint(compiled, *inputs, use_reentrant=False).sum().backward()


def _checkpoint_inside(graphs):
    inputs = make(grad=True)
    step = lambda *xs: checkpoint(sdpa, *xs, use_reentrant=False).sum()  # noqa: E731
    compiled = torch.compile(step, backend=graphs, fullgraph=True)
    return lambda: compiled(*inputs).backward()


# function, executions of our forward when it is ours, graphs for the two selections
TOGGLED = {
    "direct": (_direct, 1, 2),
    "MultiheadAttention": (_module, 1, 2),
    "per block": (_per_block, 2, 4),
    "compiled in checkpoint": (_checkpoint_outside, 2, 2),
    "checkpoint in compiled": (_checkpoint_inside, 2, 2),
}


@pytest.mark.parametrize("name", TOGGLED)
def test_toggling_is_noticed_and_both_graphs_are_kept(routed, name):
    prepare, calls, expected = TOGGLED[name]
    enable("stock")
    graphs = Graphs()
    step = prepare(graphs)
    for _ in range(4):
        enable("flashsdpa")
        assert routed(step) == calls
        disable()
        assert routed(step) == 0
    assert graphs.count == expected


def test_compiled_before_the_first_enable(run_python):
    """A function compiled while nothing of ours was in the process is served after enable(), and again after disable()."""
    out = run_python(
        "import torch, torch.nn.functional as F\n"
        "f = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend='aot_eager')\n"
        "x = torch.randn(1, 2, 8, 8); f(x)\n"
        "import torch_flashsdpa as t\n"
        "counts = []\n"
        "def count(): t.reset_routed_calls(); f(x); counts.append(t.routed_calls())\n"
        "t.enable('flashsdpa'); count(); t.disable(); count()\n"
        "with t.sdpa_backend('flashsdpa'): count()\n"
        "count(); print(counts)"
    )
    assert out == "[1, 0, 1, 0]"


def test_a_scope_in_another_thread(routed):
    """One compiled function, called at once under two selections: each thread gets its own."""
    x, graphs, counts = torch.randn(1, 2, 8, 8), Graphs(), {}
    compiled = torch.compile(attend, backend=graphs, fullgraph=True)

    def other():
        with sdpa_backend("stock"):
            counts["scope"] = [routed(compiled, x) for _ in range(2)]
        counts["default"] = routed(compiled, x)

    enable("flashsdpa")
    assert routed(compiled, x) == 1
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert counts == {"scope": [0, 0], "default": 1}
    assert routed(compiled, x) == 1
    assert graphs.count == 2


def test_torchs_own_switch_is_noticed(routed):
    """sdpa_kernel(MATH) around a compiled function leaves it to stock, whichever was compiled first."""
    x, graphs = torch.randn(1, 2, 8, 8), Graphs()
    compiled = torch.compile(attend, backend=graphs, fullgraph=True)
    enable("flashsdpa")
    for _ in range(2):
        with sdpa_kernel(SDPBackend.MATH):
            assert routed(compiled, x) == 0
        assert routed(compiled, x) == 1
    assert graphs.count == 2


def test_without_dynamos_private_names_compiled_code_is_dropped(routed, monkeypatch):
    """The fallback of selection.py: no guard can be installed, so each change recompiles."""
    monkeypatch.setattr("torch_flashsdpa._dynamo_compat._guard_parts", lambda: None)
    x, graphs = torch.randn(1, 2, 8, 8), Graphs()
    compiled = torch.compile(attend, backend=graphs, fullgraph=True)
    for round_ in range(1, 3):
        enable("flashsdpa")
        assert routed(compiled, x) == 1
        disable()
        assert routed(compiled, x) == 0
        assert graphs.count == 2 * round_


# --- scopes inside a compiled function --------------------------------------------------------------------------------


def _inside_and_outside(x):
    x = attend(x)
    with sdpa_backend("flashsdpa"):
        x = attend(x)
    return attend(x)


def _nested(x):
    with sdpa_backend("flashsdpa"):
        x = attend(x)
        with sdpa_backend("stock"):
            x = attend(attend(x))
        x = attend(x)
    return attend(x)


def _exception(x):
    try:
        with sdpa_backend("flashsdpa"):
            x = attend(x)
            raise ValueError
    except ValueError:
        pass
    return attend(x)


@sdpa_backend("flashsdpa")
def _decorated(x):
    return attend(x)


def _calls_decorated(x):
    return attend(_decorated(x))


def _over_sdpa_kernel(x):
    with sdpa_kernel(SDPBackend.MATH):
        x = attend(x)
        with sdpa_backend("flashsdpa"):
            return attend(x)


def _sdpa_kernel_inside(x):
    with sdpa_backend("flashsdpa"):
        x = attend(x)
        with sdpa_kernel(SDPBackend.MATH):
            return attend(x)


IN_GRAPH = {
    "inside and outside": (_inside_and_outside, 1),
    "nested": (_nested, 2),
    "exception": (_exception, 1),
    "decorated": (_calls_decorated, 1),
    "over sdpa_kernel": (_over_sdpa_kernel, 1),
    "sdpa_kernel inside": (_sdpa_kernel_inside, 1),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", IN_GRAPH)
def test_scope_inside_a_graph(routed, name, backend):
    function, calls = IN_GRAPH[name]
    x = torch.randn(1, 2, 8, 8)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert [routed(compiled, x) for _ in range(2)] == [calls, calls]
    torch.testing.assert_close(compiled(x), function(x))
    assert routed(attend, x) == 0
    assert not torch_flashsdpa.status()["scoped"]


def test_stock_scope_inside_a_graph_under_an_enabled_default(routed):
    def function(x):
        with sdpa_backend("stock"):
            x = attend(x)
        return attend(x)

    compiled, x = torch.compile(function, backend="aot_eager", fullgraph=True), torch.randn(1, 2, 8, 8)
    enable("flashsdpa")
    assert routed(compiled, x) == 1
    disable()
    assert routed(compiled, x) == 0


def test_scope_with_a_graph_break(routed):
    def function(x):
        x = attend(x)
        with sdpa_backend("flashsdpa"):
            x = attend(x)
            torch._dynamo.graph_break()
            x = attend(x)
        return attend(x)

    compiled, x = torch.compile(function, backend="aot_eager"), torch.randn(1, 2, 8, 8)
    assert [routed(compiled, x) for _ in range(2)] == [2, 2]
    assert not torch_flashsdpa.status()["scoped"]


def test_scope_around_multihead_attention(routed):
    block = Block()

    def function(x):
        with sdpa_backend("flashsdpa"):
            x = block(x)
        return block(x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert routed(lambda: compiled(torch.randn(2, 5, 16)).sum().backward()) == 1


def test_strict_error_while_tracing():
    compiled = torch.compile(
        lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True
    )
    enable("flashsdpa", strict=True)
    with pytest.raises(Exception, match="head_dim is 300"):
        compiled(torch.randn(1, 1, 4, 300))


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_dynamic_shapes_stay_symbolic(routed):
    """Batch, heads, lengths and head dim in one graph; a head dim that we do not take makes the second, stock one."""
    graphs = Graphs()
    compiled = torch.compile(sdpa, backend=graphs, fullgraph=True, dynamic=True)
    enable("flashsdpa")
    sizes = [(2, 3, 17, 9, 8), (3, 2, 16, 16, 8), (2, 5, 40, 64, 16), (4, 4, 5, 33, 24), (2, 2, 70, 7, 10)]
    for batch, heads, seq_q, seq_k, dim in sizes:
        q, k, v = (torch.randn(batch, heads, n, dim) for n in (seq_q, seq_k, seq_k))
        assert routed(compiled, q, k, v) == 1
        torch.testing.assert_close(compiled(q, k, v), sdpa(q, k, v))
    assert graphs.count == 1
    wide = [torch.randn(2, 2, 8, 300) for _ in range(3)]
    assert routed(compiled, *wide) == 0
    assert graphs.count == 2


def test_lengths_become_dynamic_by_themselves(routed):
    graphs = Graphs()
    compiled = torch.compile(sdpa, backend=graphs, fullgraph=True)
    enable("flashsdpa")
    for length in (16, 24, 40, 56):
        assert routed(compiled, *make(length=length)) == 1
    assert graphs.count == 2


def test_unbacked_length(routed):
    def function(x, n):
        length = n.item()
        torch._check(length >= 2)
        torch._check(length <= x.shape[2])
        x = x[:, :, :length]
        return F.scaled_dot_product_attention(x, x, x)

    enable("flashsdpa")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert routed(compiled, torch.randn(2, 2, 16, 8), torch.tensor(5)) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_forward_and_backward(dynamic):
    """The graph that most users run: values, gradients, kernels by name, with a mask and another layout."""
    mask = torch.rand(40, 40) < 0.7

    def function(q, k, v):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return out.transpose(1, 2).flatten(2) * 2.0

    leaves = [torch.randn(2, 40, 3, 8, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    enable("flashsdpa")
    grad_out = torch.randn(2, 40, 24)
    torch.autograd.grad(compiled(*leaves), leaves, grad_out)  # compiled here, before the profiler looks
    with profiler.kernels_run() as kernels:
        out = compiled(*leaves)
        grads = torch.autograd.grad(out, leaves, grad_out)
    assert kernels.starting_with("flashsdpa_fwd") == 1 and kernels.starting_with("flashsdpa_bwd") >= 1
    with sdpa_backend("stock"):
        exact = function(*leaves)
        exact_grads = torch.autograd.grad(exact, leaves, grad_out)
    torch.testing.assert_close((out, *grads), (exact, *exact_grads))


def test_layers_share_one_mask_plan():
    """In a compiled training step a mask is planned once: the plan reaches every layer, and the backward, by dataflow.
    (torch merges equal calls in training graphs only, so that a forward compiled under no_grad plans in each layer.)"""
    mask = torch.ones(160, 160, dtype=torch.bool).tril()

    def function(x):
        for _ in range(3):
            x = F.scaled_dot_product_attention(x, x, x, mask)
        return x

    compiled, x = torch.compile(function, fullgraph=True), torch.randn(1, 2, 160, 8, requires_grad=True)
    enable("flashsdpa")
    compiled(x).sum().backward()
    with profiler.kernels_run() as kernels:
        compiled(x).sum().backward()
    assert kernels.starting_with("flashsdpa_fwd") == 3
    assert kernels.starting_with("flashsdpa_mask_plan") == 1


def banded(x, widths):
    """A layer for each width, its mask made in the graph after the layer before has run."""
    positions = torch.arange(x.size(2), device=x.device)
    for width in widths:
        ready = x.sum().isfinite()
        x = F.scaled_dot_product_attention(x, x, x, ((positions[:, None] - positions).abs() < width) & ready)
    return x


def test_masks_in_a_buffer_that_inductor_reuses(routed):
    """The masks of three layers lie in one buffer, one after the other: same address, other contents. Each is made once, for
    its plan and its attention."""
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(1, 2, 160, 8)
    widths = [torch.tensor(n) for n in (3, 100, 30)]
    compiled = torch.compile(banded, fullgraph=True)
    enable("flashsdpa", strict=True)
    _, code = run_and_get_code(compiled, x, widths)
    lines = "".join(code).splitlines()
    assert sum("empty_strided" in line and "160, 160)" in line for line in lines) == 1 and any("# reuse" in line for line in lines)
    for new in ((3, 100, 30), (160, 1, 64), (30, 3, 100)):
        for width, n in zip(widths, new):
            width.fill_(n)
        assert routed(compiled, x, widths) == 3
        with sdpa_backend("stock"):
            want = banded(x, widths)
        torch.testing.assert_close(compiled(x, widths), want)


def test_a_mask_edited_inside_a_graph_and_between_calls():
    """Equal ops of a graph are merged: the plan of the mask as it was is not that of the mask as it is."""

    def function(x, mask):
        x = F.scaled_dot_product_attention(x, x, x, mask)
        mask.logical_not_()
        return F.scaled_dot_product_attention(x, x, x, mask)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, mask = torch.randn(1, 2, 160, 8), torch.rand(160, 160) < 0.3
    enable("flashsdpa", strict=True)
    for width in (160, 20, 90):
        mask.copy_(torch.rand(160, 160) < 0.5).tril_(width)
        with sdpa_backend("stock"):
            want = function(x, mask.clone())
        torch.testing.assert_close(compiled(x, mask), want)


# --- export -----------------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    def forward(self, x):
        return attend(x)


def _ops(program):
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("strict", [False, True])
def test_export_is_stocks(strict):
    x = (torch.randn(1, 2, 8, 8),)
    reference = torch.export.export(Attend(), x, strict=strict)
    enable("flashsdpa")
    program = torch.export.export(Attend(), x, strict=strict)
    assert _ops(program) == _ops(reference) == {"aten.scaled_dot_product_attention.default"}
    with sdpa_backend("stock"):
        decomposed = _ops(reference.run_decompositions())
    assert _ops(program.run_decompositions()) == decomposed
    assert not any("flashsdpa" in op for op in decomposed)


def test_exported_program_is_served_when_it_runs(routed):
    x = torch.randn(1, 2, 8, 8)
    module = torch.export.export(Attend(), (x,)).module()
    enable("flashsdpa")
    assert routed(module, x) == 1


def test_export_routes_when_asked(routed):
    x = torch.randn(1, 2, 8, 8)
    enable("flashsdpa")
    with torch_flashsdpa.route_in_export():
        program = torch.export.export(Attend(), (x,)).run_decompositions()
    assert "flashsdpa.forward.default" in _ops(program)
    disable()
    assert routed(program.module(), x) == 1
    torch.testing.assert_close(program.module()(x), attend(x))
