"""Another thread changes the selection of the process while this one compiles: the call goes on as it began, the next one sees it.

The other thread comes in at known points of the compilation, and is waited for.
"""

import threading

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from torch_flashsdpa import _dynamo_compat, _hook, enable, sdpa_backend


def attend(x):
    return sdpa(x, x, x)


def select_elsewhere(name):
    thread = threading.Thread(target=enable, args=(name,))
    thread.start()
    thread.join()


class Graphs:
    """The backend aot_eager, before which another thread selects stock, once."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        if self.count == 1:
            select_elsewhere("stock")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def x():
    return torch.randn(1, 2, 8, 8)


def test_between_tracing_and_the_guard(routed, x):
    """The guard is made when all is compiled; it is of the selection that was traced."""
    graphs = Graphs()
    compiled = torch.compile(attend, backend=graphs, fullgraph=True)
    enable("flashsdpa")
    assert routed(compiled, x) == 1  # as it began
    assert [routed(compiled, x), routed(compiled, x)] == [0, 0]
    enable("flashsdpa")
    assert routed(compiled, x) == 1
    assert graphs.count == 2


def test_at_every_reading_of_the_selection(routed, x, monkeypatch):
    """Also between the guard and torch's first trial of it, which raises where it fails."""
    current = _hook.Selector.current.fget
    read = []

    def read_and_change(self):
        read.append(current(self))
        select_elsewhere("stock" if len(read) % 2 else "flashsdpa")
        return read[-1]

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    enable("flashsdpa")
    with monkeypatch.context() as patch:
        patch.setattr(_hook.Selector, "current", property(read_and_change))
        assert routed(compiled, x) == 1
    assert len(read) > 2 and len(set(read)) == 1
    for name, calls in (("flashsdpa", 1), ("stock", 0)) * 2:
        enable(name)
        assert routed(compiled, x) == calls


def test_toggling_is_noticed_without_torchs_name_for_a_compilation(routed, x, monkeypatch):
    """Where a torch lacks it, the selection is read as it is."""
    monkeypatch.delattr(torch._guards, "CompileContext")
    assert _dynamo_compat.compile_context() is None
    monkeypatch.undo()
    monkeypatch.setattr(_dynamo_compat, "compile_context", lambda: None)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for name, calls in (("flashsdpa", 1), ("stock", 0)) * 2:
        enable(name)
        assert routed(compiled, x) == calls


@pytest.mark.parametrize("scoped", (False, True), ids=("default", "scope"))
def test_between_two_calls_of_one_graph(routed, x, scoped):
    """A custom op's fake implementation is where tracing passes between them."""
    names = ["stock"]

    @torch.library.custom_op("flashsdpa_tests::between", mutates_args=())
    def between(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @between.register_fake
    def _(x):
        if names:
            select_elsewhere(names.pop())
        return torch.empty_like(x)

    def twice(x):
        return attend(between(attend(x)))

    def twice_and_scoped(x):
        with sdpa_backend("flashsdpa"):
            x = attend(x)
        return attend(between(attend(x)))

    compiled = torch.compile(twice_and_scoped if scoped else twice, backend="aot_eager", fullgraph=True)
    enable("flashsdpa")
    assert routed(compiled, x) == 2 + scoped
    assert not names and routed(compiled, x) == scoped
    enable("flashsdpa")
    assert routed(compiled, x) == 2 + scoped
