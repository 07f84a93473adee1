"""Derivatives and vmap under torch.compile, and what else surrounds autograd: autocast, grad modes, hooks on saved tensors,
checkpointing. And what the derivatives refuse."""

import threading

import pytest
import torch
import torch_flashsdpa
from oracle import ops
from test_transforms import ATTEND, _scalar, by_math, check_close, normal
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.library import opcheck
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_flashsdpa import attention, enable, sdpa_backend

# --- compiled ---------------------------------------------------------------------------------------------------------

COMPILED = {
    "grad": lambda f: grad(_scalar(f), argnums=(0, 1, 2, 3)),
    "vmap": lambda f: vmap(f, in_dims=(0, 1, 0, None)),
    "per sample": lambda f: vmap(grad(_scalar(f), argnums=(0, 1, 2, 3)), in_dims=(0, 1, 0, None)),
    "jvp": lambda f: lambda *x: jvp(f, x, tuple(t * t for t in x)),
    "jacrev": lambda f: jacrev(f, argnums=(0, 3)),
    "jacfwd": lambda f: jacfwd(f, argnums=(1, 3)),
    "hessian": lambda f: hessian(_scalar(f), argnums=(0, 1)),
}


def _inputs(name, mapped):
    lead = (3,) if mapped else ()
    q, k, v, bias = normal(name, (*lead, 2, 5, 4), (*lead, 2, 6, 4), (*lead, 2, 6, 4), (2, 5, 6))
    return (q, k.transpose(0, 1), v, bias) if mapped else (q, k, v, bias)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("transform", COMPILED)
def test_transforms_inside_a_compiled_function(routed, transform, backend):
    if transform in ("jacfwd", "hessian") and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 compiles no jacfwd by several arguments, whatever the function")
    function = COMPILED[transform](ATTEND["bias"])
    inputs = _inputs(f"compiled {transform}", transform in ("vmap", "per sample"))
    enable("flashsdpa", strict=True)
    compiled = torch.compile(lambda *x: function(*x), backend=backend, fullgraph=True)
    assert routed(compiled, *inputs) == 1
    check_close(compiled(*inputs), by_math(function, *inputs))


def test_dynamic_shapes_compile_once(routed):
    """vmap's folding, and jvp as one op, keep symbolic sizes symbolic."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def function(q, k, v):
        return vmap(lambda *x: jvp(sdpa, x, x)[1])(q, k, v)

    enable("flashsdpa")
    compiled = torch.compile(function, backend=count, fullgraph=True, dynamic=True)
    aot = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (5, 7, 9):
        inputs = normal("dynamic", *[(size, 2, size + 3, 4)] * 3)
        check_close(aot(*inputs), by_math(function, *inputs))
        compiled(*inputs)
    assert len(graphs) == 1 and routed(aot, *inputs) == 1


def test_a_changed_selection_is_noticed_inside_transforms(routed):
    """The router looks inside wrapped tensors for fake ones, and puts its guard."""
    compiled = torch.compile(lambda *x: vmap(grad(_scalar(sdpa)))(*x), backend="aot_eager", fullgraph=True)
    inputs = normal("toggled", *[(3, 2, 5, 4)] * 3)
    counts = []
    for name in ("flashsdpa", "stock", "flashsdpa"):
        enable(name)
        counts.append(routed(compiled, *inputs))
    assert counts == [1, 0, 1]
    enable("flashsdpa")
    with torch_flashsdpa.record_dispatch() as seen:
        torch.compile(lambda *x: vmap(sdpa)(*x), backend="aot_eager", fullgraph=True)(*inputs)
        vmap(sdpa)(*inputs)
    assert [row["phase"] for row in seen.rows if row["kind"] == "decision"] == ["traced", "eager"]


def test_subclasses_inside_transforms_are_left_to_stock(routed):
    from torch.testing._internal.two_tensor import TwoTensor

    inputs = [TwoTensor(t, t.clone()) for t in normal("two", *[(2, 5, 4)] * 3, dtype=torch.float32)]
    with sdpa_backend("flashsdpa", strict=True), pytest.raises(RuntimeError, match="query is a TwoTensor"):
        grad(_scalar(sdpa))(*inputs)


def test_tangents_of_a_compiled_function():
    """A compiled graph has no forward-mode rule of its own: torch's error, or the tangent, but never a lost one."""
    q, k, v, t = normal("dual", *[(1, 2, 5, 4)] * 4)
    compiled = torch.compile(sdpa, backend="aot_eager")
    enable("flashsdpa")
    want = jvp(lambda q: sdpa(q, k, v), (q,), (t,))[1]
    with forward_ad.dual_level():
        try:
            out = compiled(forward_ad.make_dual(q, t), k, v)
        except Exception:
            return
        check_close(forward_ad.unpack_dual(out).tangent, want)


def test_expanded_bias_has_the_gradient_of_its_rows(routed):
    """A bias expanded over an axis is narrowed only where no transform, outer ones too, may ask for its gradient."""
    q, k, v, row = normal("expanded", (2, 4, 3), (2, 5, 3), (2, 5, 3), (1, 1, 5))
    for attend in (sdpa, attention):

        def inner(bias):
            return grad(lambda q: attend(q, k, v, attn_mask=bias).square().sum())(q).square().sum()

        with sdpa_backend("flashsdpa", strict=True):
            got = grad(inner)(row.expand(2, 4, 5))
        attend = sdpa
        check_close(got, by_math(grad(inner), row.expand(2, 4, 5)))


# --- the op -----------------------------------------------------------------------------------------------------------


def _jvp_arguments(requires_grad=False):
    q, k, v, g, m, a, b, c, d = (t.requires_grad_(requires_grad) for t in normal(
        "jvp op", (2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 6), (2, 4, 9, 6), (4, 9, 7), (2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 6),
        (1, 4, 9, 7), dtype=torch.float32))
    m = m[None]
    out, lse = (t.detach() for t in ops().forward(q, k, v, attn_mask=m, is_causal=True))
    arguments = (g, None, q, k, v, out, lse, g, lse, a, b, c, d, None)
    return arguments, dict(attn_mask=m, is_causal=True, output_mask=[True] * 6 + [False])


@pytest.mark.parametrize("requires_grad", (False, True))
def test_opcheck_jvp(requires_grad):
    args, kwargs = _jvp_arguments(requires_grad)
    opcheck(ops().jvp.default, args, kwargs)


def test_flops_of_jvp_are_counted():
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    args, kwargs = _jvp_arguments()
    with FlopCounterMode(display=False) as counter:
        ops().jvp(*args, **kwargs)
        ops().jvp(None, None, *args[2:7], *[None] * 2, *args[9:], **{**kwargs, "output_mask": [True, True] + [False] * 5})
    whole = sdpa_flop_count((2, 4, 9, 8), (2, 4, 7, 8), (2, 4, 7, 6))
    assert sum(counter.get_flop_counts()["Global"].values()) == whole * 7 + whole * 5 // 2


def test_what_has_no_derivative_says_so():
    q, k, v, t = normal("refused", *[(1, 2, 70, 4)] * 4, dtype=torch.float32)
    slopes = torch.rand(2)
    with pytest.raises(RuntimeError, match="alibi_slopes requires a gradient or carries a forward-mode tangent"):
        jvp(lambda s: attention(q, k, v, alibi_slopes=s), (slopes,), (slopes,))
    with pytest.raises(RuntimeError, match="alibi_slopes requires a gradient or carries"):
        grad(lambda s: grad(lambda q: attention(q, k, v, alibi_slopes=s).sum())(q).sum())(slopes)
    plan = torch_flashsdpa.plan_mask(torch.ones(1, 1, 70, 70, dtype=torch.bool).tril())
    leaf = q.clone().requires_grad_()
    out = attention(leaf, k, v, mask_plan=plan)
    (first,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="mask_plan is given without attn_mask; tangents and second derivatives"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match="mask_plan is given without attn_mask; tangents"):
        jvp(lambda q: attention(q, k, v, mask_plan=plan), (q,), (t,))
    out, lse = ops().forward(q, k, v)
    with pytest.raises(RuntimeError, match="differentiated as functions of query, key"):
        ops().backward(t, None, q, k, v, out.requires_grad_(), lse, output_mask=[True] * 3 + [False] * 2)
    with pytest.raises(RuntimeError, match=r"tangent_key is float64 \(1, 2, 70, 4\) on cpu; give float32"):
        ops().jvp(None, None, q, k, v, out, lse, None, None, None, k.double(), None, None, None, output_mask=[True] * 7)
    with pytest.raises(RuntimeError, match="tangent_sinks is given, what it is a tangent of is not"):
        ops().jvp(None, None, q, k, v, out, lse, *[None] * 6, slopes, output_mask=[True] * 7)


def test_no_tangent_is_lost_in_a_backward_without_a_graph():
    """dual_level around a plain .backward(): gradients carry their tangents although no graph of them is made."""
    q, k, v, t = normal("dual backward", *[(1, 2, 5, 4)] * 4)
    want = jvp(grad(lambda q: (q @ k.mT / 2).softmax(-1).matmul(v).sin().sum()), (q,), (t,))[1]
    leaf = q.clone().requires_grad_()
    with forward_ad.dual_level():
        out = attention(forward_ad.make_dual(leaf, t), k, v)
        (first,) = torch.autograd.grad(out.sin().sum(), leaf)
        check_close(forward_ad.unpack_dual(first).tangent, want)


# --- around autograd --------------------------------------------------------------------------------------------------


def _autocast(q, k, v):
    """Everything that stock's autocast does to SDPA, as a list of results."""
    results = []
    mask = torch.zeros(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        results += [sdpa(q, k, v), sdpa(q, k.bfloat16(), v), sdpa(q, k, v, attn_mask=mask)]
        results.append(sdpa(q.double(), k.double(), v.double()))
        with torch.autocast("cpu", enabled=False):
            results.append(sdpa(q, k, v))
            with torch.autocast("cpu", torch.float16):
                results.append(sdpa(q, k, v))
    return results


def test_autocast_is_stocks(routed):
    q, k, v = normal("autocast", *[(1, 2, 5, 8)] * 3, dtype=torch.float32)
    want = _autocast(q, k, v)
    enable("flashsdpa", strict=True)
    assert routed(_autocast, q, k, v) == 6
    for a, b in zip(_autocast(q, k, v), want):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 4 * torch.finfo(a.dtype).eps
    assert [t.dtype for t in want] == [torch.bfloat16] * 3 + [torch.float64, torch.float32, torch.float16]


def test_autocast_casts_a_leaf_once_and_gradients_are_the_leafs():
    (x,) = normal("cache", (1, 2, 5, 8), dtype=torch.float32)
    x.requires_grad_()
    enable("flashsdpa", strict=True)
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as profile:
        first, second = sdpa(x, x, x), attention(x, x, x)
    assert sum(event.name == "aten::_to_copy" for event in profile.events()) == 1
    assert torch.equal(first, second) and first.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert gradient.dtype == torch.float32


def test_double_backward_inside_autocast_keeps_its_precision():
    q, k, v, t = normal("autocast hvp", *[(1, 2, 9, 8)] * 4, dtype=torch.float32)

    def run():
        leaf = q.clone().requires_grad_()
        with torch.autocast("cpu", enabled=False):
            out = attention(leaf, k, v)
        (first,) = torch.autograd.grad(out.sum(), leaf, t.new_ones(()), create_graph=True)
        return torch.autograd.grad(first, leaf, t)[0]

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(), plain)


@pytest.mark.parametrize("wanted", range(1, 16))
def test_gradients_of_any_subset(wanted):
    tensors = normal("subset", *[(1, 2, 9, 8)] * 3, (1, 2, 9, 9))
    chosen = [i for i in range(4) if wanted >> i & 1]

    def first_and_second(attend):
        leaves = [t.clone().requires_grad_(i in chosen) for i, t in enumerate(tensors)]
        asked = [leaves[i] for i in chosen]
        out = attend(*leaves)
        first = torch.autograd.grad(out.sin().sum(), asked, create_graph=True)
        return [*first, *torch.autograd.grad(first, asked, [tensors[i] for i in chosen])]

    got = first_and_second(lambda q, k, v, m: attention(q, k, v, attn_mask=m))
    check_close(got, by_math(first_and_second, ATTEND["bias"]))


def test_modes_without_gradients():
    q, k, v = normal("modes", *[(1, 2, 9, 8)] * 3)
    leaf = q.clone().requires_grad_()
    enable("flashsdpa", strict=True)
    want = sdpa(leaf, k, v)
    assert want.grad_fn.name() == "FlashsdpaForwardBackward"
    with torch.no_grad():
        assert not sdpa(leaf, k, v).requires_grad
        # no_grad inside a transform belongs to its level alone, as everywhere in torch.func
        inner = grad(lambda q: sdpa(q, k, v).sum() + vmap(lambda q: sdpa(q, k[0], v[0]))(q).sum())(leaf)
    with torch.inference_mode():
        quiet = sdpa(leaf, k, v)
        assert quiet.is_inference() and torch.equal(quiet, want)
        mapped = vmap(lambda q: sdpa(q, k[0], v[0]))(q)
    check_close(mapped, want.detach())
    check_close(inner, 2 * torch.autograd.grad(want.sum(), leaf)[0])


def test_hooks_on_saved_tensors(routed):
    inputs = [t.requires_grad_() for t in normal("hooks", *[(1, 2, 70, 8)] * 3)]
    enable("flashsdpa", strict=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        out = sdpa(*inputs)
    with torch.autograd.graph.save_on_cpu():
        again = sdpa(*inputs)
    assert sorted(packed) == sorted([(1, 2, 70, 8)] * 4 + [(1, 2, 70)])  # q, k, v, out, lse
    want = torch.autograd.grad(sdpa(*inputs).sum(), inputs)
    for result in (out, again):
        check_close(torch.autograd.grad(result.sum(), inputs), want)


@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("threaded", (False, True), ids=("here", "another_thread"))
def test_checkpoints_with_a_scoped_selection(routed, reentrant, threaded):
    inputs = [t.requires_grad_() for t in normal("checkpoint", *[(1, 2, 9, 8)] * 3)]
    want = torch.autograd.grad(by_math(sdpa, *inputs).sum(), inputs)

    def step():
        with sdpa_backend("flashsdpa", strict=True):
            checkpoint(sdpa, *inputs, use_reentrant=reentrant).sum().backward()

    def run():
        if not threaded:
            return step()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    assert routed(run) == 2  # forward, and again in the backward
    check_close([t.grad for t in inputs], want)


@pytest.mark.parametrize("save", ("forward", "backward", "list"))
def test_selective_checkpoints_name_our_ops(routed, save):
    """A policy that saves flashsdpa::forward keeps it from being run again; one that names another op does not."""
    inputs = [t.requires_grad_() for t in normal("selective", *[(1, 2, 9, 8)] * 3)]
    want = torch.autograd.grad(by_math(sdpa, *inputs).sum(), inputs)
    op = ops().backward.default if save == "backward" else ops().forward.default
    policy = lambda context, called, *a, **k: (  # noqa: E731
        CheckpointPolicy.MUST_SAVE if called is op else CheckpointPolicy.PREFER_RECOMPUTE)
    contexts = lambda: create_selective_checkpoint_contexts([op] if save == "list" else policy)  # noqa: E731
    enable("flashsdpa", strict=True)
    assert routed(lambda: checkpoint(sdpa, *inputs, use_reentrant=False, context_fn=contexts).sum().backward()) == (
        2 if save == "backward" else 1)
    check_close([t.grad for t in inputs], want)


def test_selective_checkpoint_in_a_compiled_function(routed):
    inputs = [t.requires_grad_() for t in normal("selective", *[(1, 2, 9, 8)] * 3)]
    want = torch.autograd.grad(by_math(sdpa, *inputs).sum(), inputs)
    contexts = lambda: create_selective_checkpoint_contexts([ops().forward.default])  # noqa: E731
    enable("flashsdpa", strict=True)
    compiled = torch.compile(lambda *x: checkpoint(sdpa, *x, use_reentrant=False, context_fn=contexts).sum(),
                             backend="aot_eager", fullgraph=True)
    assert routed(lambda: compiled(*inputs).backward()) == 1
    check_close([t.grad for t in inputs], want)


def test_checkpointed_function_has_second_derivatives(routed):
    inputs = [t.requires_grad_() for t in normal("checkpoint hvp", *[(1, 2, 9, 8)] * 3)]

    def hvp(attend):
        first = torch.autograd.grad(attend(*inputs).sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(first, inputs, [t.detach() for t in inputs])

    got = hvp(lambda *x: checkpoint(attention, *x, use_reentrant=False))
    check_close(got, by_math(hvp, sdpa))


def test_gradients_batched_over_cotangents():
    """torch.autograd.grad(is_grads_batched=True) runs the backward under vmap, with saved tensors that are not mapped."""
    q, k, v, cotangents = normal("batched", *[(1, 2, 9, 8)] * 3, (4, 1, 2, 9, 8))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(attention(*leaves), leaves, cotangents, is_grads_batched=True)
    out = by_math(sdpa, *leaves)
    want = [torch.autograd.grad(out, leaves, g, retain_graph=True) for g in cotangents]
    check_close(got, [torch.stack(t) for t in zip(*want)])
