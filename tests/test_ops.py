"""The ops as PyTorch ops: schemas, opcheck, tags, FLOP formulas, autocast, the random state."""

import pytest
import torch
from cases import Case, inputs
from oracle import Call, generator, ops, run_op
from torch.library import opcheck

SCHEMAS = {
    "forward": "flashsdpa::forward(Tensor query, Tensor key, Tensor value, *, Tensor? attn_mask=None, Tensor? mask_plan=None, "
    "Tensor? rng_state=None, float dropout_p=0., bool is_causal=False, bool bottom_right=False, float? scale=None, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "bool deterministic=False, bool batch_invariant=False) -> (Tensor out, Tensor lse)",
    "backward": "flashsdpa::backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, *, Tensor? attn_mask=None, Tensor? mask_plan=None, Tensor? rng_state=None, float dropout_p=0., "
    "bool is_causal=False, bool bottom_right=False, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, "
    "float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, bool deterministic=False, bool batch_invariant=False, "
    "bool[5] output_mask) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_mask, Tensor grad_sinks)",
    "jvp": "flashsdpa::jvp(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor? tangent_grad_out, Tensor? tangent_grad_lse, Tensor? tangent_query, Tensor? tangent_key, Tensor? tangent_value, "
    "Tensor? tangent_attn_mask, Tensor? tangent_sinks, *, Tensor? attn_mask=None, Tensor? mask_plan=None, "
    "Tensor? rng_state=None, float dropout_p=0., bool is_causal=False, bool bottom_right=False, float? scale=None, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "bool deterministic=False, bool batch_invariant=False, bool[7] output_mask) -> (Tensor tangent_out, Tensor tangent_lse, "
    "Tensor tangent_grad_query, Tensor tangent_grad_key, Tensor tangent_grad_value, Tensor tangent_grad_attn_mask, "
    "Tensor tangent_grad_sinks)",
    "mask_plan": "flashsdpa::mask_plan(Tensor attn_mask) -> Tensor",
    "rng_state": "flashsdpa::rng_state(*, Device? device=None) -> Tensor",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_final(name):
    """Exported programs name every argument: a changed schema breaks them."""
    assert str(getattr(ops(), name).default._schema) == SCHEMAS[name]


OPCHECK = {
    "plain": Case("plain", batch=2, seq=(9, 11), dim=(8, 6)),
    "causal bfloat16": Case("causal", dtype=torch.bfloat16, seq=(70, 70), dim=(16, 16), call=Call(is_causal=True)),
    "grouped": Case("gqa", heads=(4, 2), seq=(5, 7), dim=(8, 8), layout=("bsh", "bsh", "bsh")),
    "bool mask": Case("mask", seq=(66, 66), dim=(8, 8), mask="random:qk", planned=True),
    "bias": Case("bias", batch=2, seq=(9, 70), dim=(8, 8), mask="bias:hqk", mask_grad=True, planned=True),
    "band": Case("band", seq=(9, 12), dim=(8, 8), call=Call(window=(3, 2), bottom_right=True, scale=0.3), dtype=torch.float64),
    "no keys": Case("empty", seq=(5, 0), dim=(8, 8)),
    "no queries": Case("empty", seq=(0, 5), dim=(8, 8)),
    "odd layout": Case("odd", batch=2, seq=(5, 7), dim=(8, 8), layout=("packed", "columns", "expand_heads")),
}


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck_forward(name):
    x, call = inputs(OPCHECK[name]), OPCHECK[name].call
    plan = ops().mask_plan(x.mask) if x.planned else None
    for grad in (False, True):
        tensors = [t.detach().requires_grad_(grad) for t in (x.q, x.k, x.v)]
        mask = x.mask.detach().requires_grad_(grad and x.mask_grad) if x.mask is not None else None
        opcheck(ops().forward.default, tensors, dict(attn_mask=mask, mask_plan=plan, **call.op_arguments()))


@pytest.mark.parametrize("name", OPCHECK)
def test_opcheck_backward(name):
    x, call = inputs(OPCHECK[name]), OPCHECK[name].call
    out, lse = ops().forward(x.q, x.k, x.v, attn_mask=x.mask, **call.op_arguments())
    grad_lse = torch.ones_like(lse)
    for wanted in ([True, True, True, x.mask_grad, False], [False, True, False, False, False]):
        opcheck(ops().backward.default, (x.grad_out, grad_lse, x.q, x.k, x.v, out, lse),
                dict(attn_mask=x.mask, output_mask=wanted, **call.op_arguments()))
    opcheck(ops().backward.default, (None, grad_lse, x.q, x.k, x.v, out, lse),
            dict(attn_mask=x.mask, output_mask=[True] * 3 + [False] * 2, **call.op_arguments()))


@pytest.mark.parametrize("shape", ((1, 1, 5, 5), (2, 1, 1, 200), (1, 3, 130, 1), (2, 2, 0, 5)), ids=str)
def test_opcheck_mask_plan(shape):
    opcheck(ops().mask_plan.default, (torch.ones(shape, dtype=torch.bool),))
    opcheck(ops().mask_plan.default, (torch.zeros(shape),))


def test_opcheck_rng_state():
    opcheck(ops().rng_state.default, (), dict(device=torch.device("cpu")), test_utils=("test_schema", "test_faketensor"))


def test_rng_state_follows_torchs_generator():
    torch.manual_seed(11)
    first, second = ops().rng_state(), ops().rng_state(device=torch.device("cpu"))
    torch.manual_seed(11)
    assert torch.equal(ops().rng_state(), first) and not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (2,)
    assert torch.Tag.nondeterministic_seeded in ops().rng_state.default.tags


def test_pure_ops_are_not_tagged_random():
    """forward stays pure under recomputation and CSE: the random state is an input."""
    for name in ("forward", "backward", "jvp", "mask_plan"):
        tags = getattr(ops(), name).default.tags
        assert torch.Tag.nondeterministic_seeded not in tags and torch.Tag.pt2_compliant_tag in tags


def test_compilers_keep_strides_only_where_they_show():
    """The layout of out and of gradients follows the inputs; a plan's does not, so that a mask need not be copied for it."""
    for name, tag in (("forward", "needs_exact_strides"), ("backward", "needs_exact_strides"), ("mask_plan", "flexible_layout")):
        assert getattr(torch.Tag, tag) in getattr(ops(), name).default.tags


@pytest.mark.parametrize("heads", ((4, 4), (4, 2), (4, 1)), ids=str)
def test_flop_formulas_are_torchs(heads):
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    x = inputs(Case("flops", batch=2, heads=heads, seq=(9, 13), dim=(16, 24)))
    with FlopCounterMode(display=False) as counter:
        run_op(x, Call(is_causal=True))
    q, k, v = (2, heads[0], 9, 16), (2, heads[0], 13, 16), (2, heads[0], 13, 24)
    counts = {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts["forward"] == sdpa_flop_count(q, k, v)
    assert counts["backward"] == sdpa_backward_flop_count((2, heads[0], 9, 24), q, k, v)


def test_fake_ops_launch_nothing():
    from torch._subclasses.fake_tensor import FakeTensorMode

    import torch_flashsdpa

    before = torch_flashsdpa.routed_calls()
    with FakeTensorMode():
        q = torch.randn(1 << 20, 64, 1 << 20, 128)  # more than any memory
        out, lse = ops().forward(q, q, q)
        assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert torch_flashsdpa.routed_calls() == before


def test_under_no_grad_and_inference_mode():
    q = torch.randn(1, 2, 70, 8, generator=generator("modes"), requires_grad=True)
    out, lse = ops().forward(q, q, q)
    assert out.requires_grad and lse.requires_grad
    with torch.no_grad():
        quiet = ops().forward(q, q, q)
    with torch.inference_mode():
        inference = ops().forward(q, q, q)
    assert not quiet[0].requires_grad and inference[0].is_inference()
    assert torch.equal(out, quiet[0]) and torch.equal(out, inference[0])


def test_saved_tensors_are_checked_for_changes():
    """An input changed in place between forward and backward is an error, as for any PyTorch op."""
    q = torch.randn(1, 1, 5, 8, requires_grad=True)
    k = torch.randn(1, 1, 5, 8)
    out, _ = ops().forward(q, k, k)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_needs_retain_graph():
    q = torch.randn(1, 1, 5, 8, requires_grad=True)
    out, _ = ops().forward(q, q, q)
    first = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), q)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), q)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast_of_the_op(dtype):
    x = inputs(Case("autocast", seq=(9, 9), mask="bias"))
    with torch.autocast("cpu", dtype=dtype):
        out, lse = ops().forward(x.q, x.k.to(dtype), x.v, attn_mask=x.mask)
    want = ops().forward(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), attn_mask=x.mask.to(dtype))
    assert out.dtype == dtype and lse.dtype == torch.float32 and torch.equal(out, want[0])
