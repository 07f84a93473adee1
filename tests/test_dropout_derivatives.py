"""Dropout under the derivatives that no kernel computes, and where its decisions would depend on vmap or on shards."""

import pytest
import torch
import torch.nn.functional as F
from reference_dropout import dropout_factor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import torch_flashsdpa
from torch_flashsdpa import sdpa_backend

SHAPES = (2, 4, 19, 6), (2, 2, 37, 6), (2, 2, 37, 5)  # grouped heads; more than one block of 16 in either length
P = 0.4


def leaves(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def fresh_state():
    return torch.randint(-(2**62), 2**62, (2,))


def ours(state, **options):
    return lambda q, k, v: torch.ops.flashsdpa.forward(q, k, v, dropout_p=P, rng_state=state, **options)[0]


def reference(state, is_causal=False):
    """The same in plain operations, with the decisions rebuilt."""

    def attend(q, k, v):
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(-1) * dropout_factor(state, P, *scores.shape).to(scores)) @ v

    return attend


@pytest.mark.parametrize("is_causal", (False, True))
def test_double_backward(is_causal):
    state, inputs = fresh_state(), leaves(*SHAPES)

    def products(attend):
        torch.manual_seed(1)
        gradients = torch.autograd.grad(attend(*inputs).sin().sum(), inputs, create_graph=True)
        along = [torch.randn_like(g) for g in gradients]
        return [*gradients, *torch.autograd.grad(gradients, inputs, along)]

    for got, want in zip(products(ours(state, is_causal=is_causal)), products(reference(state, is_causal))):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_gradcheck_in_both_modes():
    state, inputs = fresh_state(), leaves((1, 2, 3, 2), (1, 2, 18, 2), (1, 2, 18, 2))
    assert torch.autograd.gradcheck(ours(state), inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours(state), inputs)


def test_tangents():
    state, inputs = fresh_state(), [t.detach() for t in leaves(*SHAPES)]
    along = tuple(torch.randn_like(t) for t in inputs)
    for got, want in zip(jvp(ours(state), tuple(inputs), along), jvp(reference(state), tuple(inputs), along)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("p, factor", ((1e-11, 1.0), (1.0, 0.0)))
def test_tangents_without_a_decision(p, factor):
    (q, k, v), state = leaves(*SHAPES), fresh_state()
    along = torch.randn_like(q)
    with forward_ad.dual_level():
        out = [torch.ops.flashsdpa.forward(forward_ad.make_dual(q, along), k, v, dropout_p=x, rng_state=state)[0]
               for x in (p, 0.0)]
        got, plain = (forward_ad.unpack_dual(t).tangent for t in out)
    torch.testing.assert_close(got, plain * factor)


@pytest.mark.parametrize("jacobian", (jacrev, jacfwd))
def test_jacobians_have_the_decisions_of_the_forward(jacobian):
    """Their entries are vectors mapped over one forward: each sees the weights that it dropped, not those of another batch."""
    state, inputs = fresh_state(), [t.detach() for t in leaves((2, 2, 4, 3), (2, 2, 18, 3), (2, 2, 18, 3))]
    for index in range(3):
        got = jacobian(ours(state), index)(*inputs)
        torch.testing.assert_close(got, jacobian(reference(state), index)(*inputs), rtol=1e-9, atol=1e-11)


def test_hessian_of_jacobians():
    state, inputs = fresh_state(), [t.detach() for t in leaves((1, 1, 2, 2), (1, 1, 17, 2), (1, 1, 17, 2))]
    for outer, inner in ((jacrev, jacrev), (jacfwd, jacrev)):
        got, want = (outer(inner(lambda q, f=f: f(q, *inputs[1:]).sin().sum()))(inputs[0]) for f in (ours(state), reference(state)))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_routed_double_backward():
    """A gradient penalty through a model with dropout: the decisions stay those of the forward."""
    inputs = leaves(*SHAPES)
    torch.manual_seed(3)
    state = torch.ops.flashsdpa.rng_state()
    torch.manual_seed(3)
    with sdpa_backend("flashsdpa", strict=True):
        out = F.scaled_dot_product_attention(*inputs, dropout_p=P, enable_gqa=True)
    both = []
    for result in (out, reference(state)(*inputs)):
        gradients = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        both.append(torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs))
    for got, want in zip(*both):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


def test_routed_calls_in_transforms_are_stocks():
    q = torch.randn(3, 2, 9, 8)
    with sdpa_backend("flashsdpa"), torch_flashsdpa.record_dispatch() as seen:
        vmap(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=P), randomness="different")(q)
        grad(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=P).sum())(q)
    assert torch_flashsdpa.routed_calls() == 0
    assert all("inside a transform of torch.func" in str(row["reasons"]) for row in seen.rows if row["kind"] == "decision")
    module = torch.nn.MultiheadAttention(8, 2, dropout=P, batch_first=True).train()
    weights = dict(module.named_parameters())
    with sdpa_backend("flashsdpa"):
        each = vmap(grad(lambda w, x: functional_call(module, w, (x, x, x), {"need_weights": False})[0].sum()),
                    in_dims=(None, 0), randomness="different")
        assert each(weights, torch.randn(4, 1, 5, 8))["out_proj.weight"].shape == (4, 8, 8)


def test_a_mapped_forward_is_refused():
    q = torch.randn(3, 1, 2, 9, 8)
    with pytest.raises(RuntimeError, match="flashsdpa::forward under vmap: dropout_p is 0.4; give 0"):
        vmap(ours(fresh_state()))(q, q, q)
