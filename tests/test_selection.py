"""Who serves F.scaled_dot_product_attention: the default of the process, scopes of a thread, torch's own switches."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import torch_flashsdpa
from torch_flashsdpa import _dynamo_compat, auto_table
from torch_flashsdpa._loader import binding
from torch_flashsdpa import disable, enable, is_enabled, sdpa_backend, status


def make(grad=False):
    return [torch.randn(2, 3, 20, 16, requires_grad=grad) for _ in range(3)]


def call(q, k, v, attn_mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


# --- the default of the process ---------------------------------------------------------------------------------------


def test_nothing_is_routed_before_enable(routed):
    assert routed(call, *make()) == 0
    assert not is_enabled()


def test_enable_and_disable(routed):
    enable("flashsdpa")
    assert is_enabled()
    assert routed(call, *make()) == 1
    disable()
    assert not is_enabled()
    assert routed(call, *make()) == 0


def test_disable_puts_torchs_kernel_back(run_python):
    """In a process that never loaded torch._dynamo the dispatcher is as it was."""
    out = run_python(
        "import torch, torch_flashsdpa as t\n"
        "from torch_flashsdpa._dynamo_compat import dispatch_kernels\n"
        "before = dispatch_kernels(); t.enable('flashsdpa'); during = dispatch_kernels(); t.disable()\n"
        "assert before and before == dispatch_kernels() and before != during\n"
        "with t.sdpa_backend('flashsdpa'): t.disable(); assert t.status()['router']\n"
        "t.disable(); print(before == dispatch_kernels())"
    )
    assert out == "True"


def test_other_threads_see_the_default(routed):
    enable("flashsdpa")
    counts = []
    thread = threading.Thread(target=lambda: counts.append(routed(call, *make())))
    thread.start()
    thread.join()
    assert counts == [1]


@pytest.mark.parametrize("function", [enable, lambda name: sdpa_backend(name).__enter__()])
def test_unknown_backend(function):
    with pytest.raises(ValueError, match=r"backend is 'fast'; choose one of 'stock', 'flashsdpa', 'auto'"):
        function("fast")


def test_auto_follows_its_table(routed):
    q, k, v = make()
    entry = next(e for e in binding().kernel_table() if e["name"] == torch_flashsdpa.explain(q, k, v, backend="flashsdpa").chosen)
    row = {"device": "cpu", "isa": entry["isa"], "dtype": "float32", "kind": "full", "dim": 16, "seq_q": 20, "seq_k": 20, "grad": False}
    try:
        enable("auto")
        for ratio, served in ((1.5, 1), (0.5, 0)):
            binding().set_auto_table([row | {"ratio": ratio}])
            assert routed(call, q, k, v) == served
        assert routed(call, *make(grad=True)) == 0  # no row for a call with gradients
        binding().set_auto_table([row | {"kind": "mask", "ratio": 1.5}])
        keep, bias = torch.ones(20, 20, dtype=torch.bool), torch.zeros(20, 20)
        assert [routed(call, q, k, v, mask) for mask in (keep, bias)] == [1, 1]  # additive masks go by the bool masks' row,
        binding().set_auto_table([row | {"kind": "mask", "ratio": 1.5}, row | {"kind": "bias", "ratio": 0.5}])
        assert [routed(call, q, k, v, mask) for mask in (keep, bias)] == [1, 0]  # unless they have their own
    finally:
        binding().set_auto_table(auto_table.rows())


def test_strict_lists_every_reason(routed):
    enable("flashsdpa", strict=True)
    assert routed(call, *make()) == 1
    q, k, v = (torch.randn(1, 1, 4, 300) for _ in range(3))
    with pytest.raises(RuntimeError, match=r"strict.*dropout_p is 1\.5.*head_dim is 300"):
        F.scaled_dot_product_attention(q, k, v, dropout_p=1.5)


# --- scopes -----------------------------------------------------------------------------------------------------------


def test_scopes_nest_and_end(routed):
    inputs = make()
    with sdpa_backend("flashsdpa"):
        assert routed(call, *inputs) == 1
        with sdpa_backend("stock"):
            assert routed(call, *inputs) == 0
            with sdpa_backend("flashsdpa"):
                assert routed(call, *inputs) == 1
            assert routed(call, *inputs) == 0
        assert routed(call, *inputs) == 1
    assert routed(call, *inputs) == 0
    enable("flashsdpa")  # a scope that has ended leaves no trace over a later default
    assert routed(call, *inputs) == 1


def test_scope_ends_on_an_exception(routed):
    with pytest.raises(KeyError), sdpa_backend("flashsdpa"):
        raise KeyError
    assert not status()["scoped"]
    assert routed(call, *make()) == 0


def test_scope_as_decorator(routed):
    decorated = sdpa_backend("flashsdpa")(call)
    assert [routed(decorated, *make()) for _ in range(2)] == [1, 1]
    assert routed(call, *make()) == 0


def test_scope_belongs_to_its_thread(routed):
    entered, leave, counts = threading.Event(), threading.Event(), []

    def other():
        with sdpa_backend("stock"):
            entered.set()
            leave.wait(30)
            counts.append(routed(call, *make()))

    enable("flashsdpa")
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    here = routed(call, *make())
    leave.set()
    thread.join()
    assert (here, counts) == (1, [0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_scope_holds_for_recomputation_in_backward(routed, use_reentrant):
    q, k, v = make(grad=True)

    def step():
        checkpoint(call, q, k, v, use_reentrant=use_reentrant).sum().backward()

    with sdpa_backend("flashsdpa"):
        assert routed(step) == 2  # forward, and again in backward


def test_scopes_keep_the_count_of_references():
    """The thread-local store of some torch releases takes a reference that it was not given."""
    token = binding().scope_token(1, False, False)
    before = sys.getrefcount(token)
    for _ in range(5):
        with sdpa_backend("flashsdpa"), sdpa_backend("flashsdpa"):
            pass
    assert sys.getrefcount(token) == before


def test_strict_scope_inside_a_lenient_default():
    enable("flashsdpa")
    q, k, v = (torch.randn(1, 1, 4, 300) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v)
    with sdpa_backend("flashsdpa", strict=True), pytest.raises(RuntimeError, match="head_dim is 300"):
        F.scaled_dot_product_attention(q, k, v)


# --- torch's own switches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backends, served",
    [
        ([SDPBackend.MATH], 0),
        ([SDPBackend.FLASH_ATTENTION], 0),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], 0),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], 0),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], 1),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], 1),
    ],
)
def test_torchs_choice_of_backends(routed, backends, served):
    inputs = make()
    enable("flashsdpa")
    with sdpa_kernel(backends):
        assert routed(call, *inputs) == served
        assert (status()["stock_only"] is None) == bool(served)
        with sdpa_backend("flashsdpa"):
            assert routed(call, *inputs) == 1  # the inner choice wins
            # Torch's flags are all we see: a choice further in counts where it differs from the one further out.
            with sdpa_kernel([SDPBackend.MATH, SDPBackend.OVERRIDEABLE]):
                assert routed(call, *inputs) == 0
    assert routed(call, *inputs) == 1


def test_stocks_error_comes_through():
    enable("flashsdpa")
    q, k, v = make()
    with sdpa_kernel([]), pytest.raises(RuntimeError, match="No viable backend|No available kernel"):
        F.scaled_dot_product_attention(q, k, v)


# --- torch's registry of flash implementations ------------------------------------------------------------------------


def test_registry(routed):
    attention = pytest.importorskip("torch.nn.attention")
    assert "flashsdpa" in attention.list_flash_attention_impls()
    assert not is_enabled()
    enable("flashsdpa", strict=True)
    attention.activate_flash_attention_impl("flashsdpa")
    try:
        assert attention.current_flash_attention_impl() == "flashsdpa"
        assert status()["default"] == "auto" and not status()["default_strict"]
    finally:
        attention.restore_flash_attention_impl()
    assert status()["default"] == "flashsdpa" and status()["default_strict"]
    disable()
    attention.activate_flash_attention_impl("flashsdpa")
    attention.restore_flash_attention_impl()
    assert not is_enabled()


def test_status_names_the_registrations():
    enable("flashsdpa")
    now = status()
    assert now["enabled"] and now["router"] and now["problem"] is None
    assert now["dispatch"] == _dynamo_compat.dispatch_kernels() != {}
