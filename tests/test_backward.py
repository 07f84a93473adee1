"""Gradients against the float64 oracle, case list by case list."""

import itertools

import pytest
import torch
from cases import Case, band_cases, dim_cases, grad_layout_cases, head_cases, inputs, scale_cases, zero_cases
from oracle import Call, Inputs, check, generator, ops, reference, run_sdpa


@pytest.mark.parametrize("case", dim_cases(), ids=str)
def test_dims(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", band_cases(), ids=str)
def test_bands(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", head_cases(), ids=str)
def test_heads(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", scale_cases(), ids=str)
def test_scales(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", grad_layout_cases(), ids=str)
def test_grad_layouts(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", zero_cases(), ids=str)
def test_zero_sizes(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", head_cases()[::2] + dim_cases()[::9], ids=str)
def test_through_sdpa(case):
    if case.call.window != (-1, -1):
        case = Case(**{**vars(case), "call": Call(is_causal=True)})
    check(inputs(case), case.call, run=run_sdpa)


@pytest.mark.parametrize("wanted", [w for w in itertools.product((False, True), repeat=4) if any(w)],
                         ids=lambda w: "".join(n for n, on in zip(("q", "k", "v", "m"), w) if on))
def test_only_the_wanted_gradients(wanted):
    """Any subset of q, k, v and the mask may require a gradient; the others get none, and the values are the same."""
    x = inputs(Case(f"wanted{wanted}", heads=(4, 2), mask="bias:hqk", mask_grad=True))
    want = reference(x, Call())
    leaves = [t.detach().requires_grad_(on) for t, on in zip((x.q, x.k, x.v, x.mask), wanted)]
    out, _ = ops().forward(*leaves[:3], attn_mask=leaves[3])
    out.backward(x.grad_out)
    for leaf, on, name in zip(leaves, wanted, x.names()):
        assert (leaf.grad is not None) == on, name
        if on:
            assert (leaf.grad - want.grads[name]).abs().max() < 1e-4, name


def test_output_mask_of_the_op():
    """Outputs not asked for are empty, whatever the others are."""
    x = inputs(Case("output_mask", mask="bias", mask_grad=True))
    out, lse = ops().forward(x.q, x.k, x.v, attn_mask=x.mask)
    all_grads = ops().backward(x.grad_out, None, x.q, x.k, x.v, out, lse, attn_mask=x.mask, output_mask=[True] * 4 + [False])
    for mask in itertools.product((False, True), repeat=4):
        grads = ops().backward(x.grad_out, None, x.q, x.k, x.v, out, lse, attn_mask=x.mask, output_mask=[*mask, False])
        for grad, full, on in zip(grads, all_grads, mask):
            assert torch.equal(grad, full) if on else grad.shape == (0,)
        assert grads[4].shape == (0,)


def test_probabilities_of_few_queries_sum_to_one():
    """The decoding kernel sums scores in another order than the backward, so its log-sum-exp is not quite the backward's. With
    ones for grad_out, dv summed over the keys is the sum of each query's probabilities."""
    g = generator("few")
    q, k, v = (torch.randn(20, 4, n, 72, generator=g).requires_grad_() for n in (2, 129, 129))
    out, _ = ops().forward(q, k, v, scale=0.3)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert (dv.double().sum(2) - 2).abs().max() < 5e-7


def test_gradient_of_lse_alone():
    """grad_out undefined: only the log-sum-exp is differentiated."""
    x = inputs(Case("lse_only", heads=(4, 2), lse_grad=True, mask="random"))
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    _, lse = ops().forward(q, k, v, attn_mask=x.mask)
    grads = torch.autograd.grad(lse, (q, k, v), x.grad_lse, allow_unused=True)
    x.grad_out = torch.zeros_like(x.grad_out)
    want = reference(x, Call())
    for name, grad in zip(("dq", "dk"), grads):
        assert (grad - want.grads[name]).abs().max() < 1e-5, name
    assert grads[2] is None or (grads[2] == 0).all()


@pytest.mark.parametrize("case", [c for c in band_cases()[1::4]], ids=str)
def test_repeats_are_bitwise_equal(case):
    x = inputs(case)

    def grads():
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out, lse = ops().forward(*leaves, **case.call.op_arguments())
        return torch.autograd.grad([out, lse], leaves, [x.grad_out, x.grad_lse])

    first = grads()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, grads()))


def test_gradients_accumulate_into_one_packed_tensor():
    """q, k, v are chunks of one projection: all three gradients flow back into it."""
    g = generator("packed")
    packed = torch.randn(2, 65, 3 * 2 * 16, generator=g, requires_grad=True)
    weight = torch.randn(2, 2, 65, 16, generator=g)

    def split(t):
        return [c.view(2, 65, 2, 16).transpose(1, 2) for c in t.chunk(3, dim=-1)]

    (ours,) = torch.autograd.grad(ops().forward(*split(packed))[0], packed, weight)
    want = reference(Inputs(*split(packed.detach()), grad_out=weight), Call()).grads
    joined = torch.cat([want[n].transpose(1, 2).flatten(2) for n in ("dq", "dk", "dv")], dim=-1)
    assert (ours - joined).abs().max() < 1e-5


def test_one_tensor_as_query_key_and_value():
    x = torch.randn(1, 2, 66, 24, generator=generator("self"), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(1, 2, 66, 24, generator=generator("w"), dtype=torch.float64)
    (ours,) = torch.autograd.grad(ops().forward(x, x, x, is_causal=True)[0], x, weight)
    want = reference(Inputs(x, x, x, grad_out=weight), Call(is_causal=True)).grads
    assert (ours - (want["dq"] + want["dk"] + want["dv"])).abs().max() < 1e-12 * 10


def test_many_batches():
    g = generator("many")
    q, k, v = (torch.randn(65537, 1, 2, 4, generator=g) for _ in range(3))
    check(Inputs(q, k, v, grad_out=torch.randn(65537, 1, 2, 4, generator=g)))
