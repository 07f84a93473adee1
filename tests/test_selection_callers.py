"""Every way in which a program reaches scaled_dot_product_attention: served by ours, or left to stock on purpose."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_before_enable

import torch_flashsdpa
from torch_flashsdpa import enable, record_dispatch, sdpa_backend


def make(grad=False, dtype=torch.float32):
    return [torch.randn(2, 4, 12, 8, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def stock(function, *args):
    with sdpa_backend("stock"):
        return function(*args)


# --- served -----------------------------------------------------------------------------------------------------------

CALLERS = {
    "name imported earlier": lambda q, k, v: imported_before_enable(q, k, v),
    "torch.ops.aten": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "torch.jit.script": torch.jit.script(sdpa),
    "torch.jit.trace": torch.jit.trace(sdpa, make(), check_trace=False),
    "3-D": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "2-D": lambda q, k, v: F.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0]),
    "5-D": lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None]),
    "enable_gqa": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "below autograd, as C++ callers are": lambda q, k, v: _below_autograd(sdpa, q, k, v),
}


def _below_autograd(function, *args):
    with torch._C._AutoDispatchBelowAutograd():
        return function(*args)


@pytest.mark.parametrize("caller", CALLERS)
def test_callers_are_served(routed, caller):
    inputs, function = make(), CALLERS[caller]
    enable("flashsdpa")
    assert routed(function, *inputs) == 1
    torch.testing.assert_close(function(*inputs), stock(function, *inputs))


def test_inference_mode(routed):
    enable("flashsdpa")
    with torch.inference_mode():
        assert routed(sdpa, *make()) == 1


def test_gradients_flow(routed):
    inputs, grad_out = make(grad=True), torch.randn(2, 4, 12, 8)

    def step():
        return torch.autograd.grad(sdpa(*inputs), inputs, grad_out)

    enable("flashsdpa")
    assert routed(step) == 1
    torch.testing.assert_close(step(), stock(step))


def test_autocast_casts_before_us():
    enable("flashsdpa")
    q, k, v = make()
    with record_dispatch() as seen, torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16
    assert [row["dtype"] for row in seen.rows if row["kind"] == "launch"] == ["bfloat16"]


MODULES = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(16, 2, batch_first=True),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_training(routed, name):
    module, x = MODULES[name](), torch.randn(2, 7, 16)
    arguments = {"MultiheadAttention": (x, x, x, None, False), "TransformerDecoderLayer": (x, x)}.get(name, (x,))
    # Without its weights: nn.MultiheadAttention calls SDPA only where it need not return them.
    run = (lambda: module(x, x, x, need_weights=False)[0]) if name == "MultiheadAttention" else (lambda: module(*arguments))
    enable("flashsdpa")
    assert routed(run) == (2 if name == "TransformerDecoderLayer" else 1)
    torch.testing.assert_close(run(), stock(run))


def test_encoder_fast_path_is_switched_off_as_documented(routed):
    """torch's eval fast path never reaches SDPA on the CPU; the switch that the documentation names brings it to us."""
    layer, x = MODULES["TransformerEncoderLayer"]().eval(), torch.randn(2, 7, 16)
    enable("flashsdpa")
    with torch.no_grad():
        assert routed(layer, x) == 0
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert routed(layer, x) == 1
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


class Passive(torch.Tensor):
    """A __torch_function__ subclass that unwraps itself."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [a.as_subclass(torch.Tensor) if isinstance(a, Passive) else a for a in args]
        return function(*plain, **(kwargs or {}))


def test_torch_function_subclass(routed):
    enable("flashsdpa")
    assert routed(sdpa, *(t.as_subclass(Passive) for t in make())) == 1


# --- left to stock ----------------------------------------------------------------------------------------------------


def test_attention_bias_stays_causal(routed):
    q, k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    run = lambda: F.scaled_dot_product_attention(q, k, v, causal_lower_right(6, 9))  # noqa: E731
    enable("flashsdpa")
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(6, 9).tril(3) == 0, -torch.inf)
    torch.testing.assert_close(run(), scores.softmax(-1) @ v)


def test_wrapper_subclass_is_stock(routed):
    from torch.testing._internal.two_tensor import TwoTensor

    inputs = [TwoTensor(t, t.clone()) for t in make()]
    enable("flashsdpa")
    with record_dispatch() as seen:
        assert sdpa(*inputs).a.shape == (2, 4, 12, 8)
    assert {row["kernel"] for row in seen.rows if row["kind"] == "decision"} <= {"stock"}


def test_wrapper_subclass_in_strict_mode():
    from torch.testing._internal.two_tensor import TwoTensor

    inputs = [TwoTensor(t, t.clone()) for t in make()]
    with sdpa_backend("flashsdpa", strict=True), pytest.raises(RuntimeError, match="query is a TwoTensor"):
        sdpa(*inputs)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_stock(routed, layout):
    if layout == torch.jagged:
        q = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (3, 5)], layout=layout).transpose(1, 2)
    else:
        q = torch.nested.nested_tensor([torch.randn(4, n, 8) for n in (3, 5)])
    enable("flashsdpa")
    assert routed(sdpa, q, q, q) == 0
    for got, wanted in zip(sdpa(q, q, q).unbind(), stock(sdpa, q, q, q).unbind()):
        torch.testing.assert_close(got, wanted)


# --- tools that watch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_flop_counter_agrees_with_torchs_formula(heads_kv):
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = torch.randn(2, 4, 12, 8), torch.randn(2, heads_kv, 10, 8), torch.randn(2, heads_kv, 10, 6)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with sdpa_backend("flashsdpa"), FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(*leaves, enable_gqa=True).sum().backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    shapes = (2, 4, 12, 8), (2, 4, 10, 8), (2, 4, 10, 6)
    assert counts == {
        "flashsdpa.forward": sdpa_flop_count(*shapes),
        "flashsdpa.backward": sdpa_backward_flop_count((2, 4, 12, 6), *shapes),
    }


def test_selective_checkpoint_sees_our_op(routed):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    saved = []

    def policy(context, op, *args, **kwargs):
        saved.append(str(op))
        mine = op is torch.ops.flashsdpa.forward.default
        return CheckpointPolicy.MUST_SAVE if mine else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = make(grad=True)

    def step():
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        checkpoint(sdpa, *inputs, use_reentrant=False, context_fn=contexts).sum().backward()

    torch_flashsdpa.enable("flashsdpa")
    assert routed(step) == 1  # saved, not run again
    assert "flashsdpa.forward.default" in saved
