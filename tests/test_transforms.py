"""Derivatives of any order and mode, and torch.func: values equal to stock's math path in float64, one call of ours for a
whole vmap, linear memory, and the same in compiled code."""

import functools

import pytest
import torch
import torch_flashsdpa
from oracle import INF, attention64, generator, ops
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._pytree import tree_leaves
from torch_flashsdpa import attention, sdpa_backend


def normal(name, *shapes, dtype=torch.float64):
    random = generator(f"transforms {name}")
    return [torch.randn(shape, generator=random, dtype=dtype) for shape in shapes]


def by_math(function, *arguments):
    with sdpa_backend("stock"), sdpa_kernel(SDPBackend.MATH):
        return function(*arguments)


def check_close(got, want, rtol=1e-10):
    got, want = tree_leaves(got), tree_leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).abs().max() <= rtol * max(1.0, b.abs().max())


@pytest.fixture
def ours(routed):
    """ours(f, *args) runs f served by us, once (or `calls` times), and compares it with stock's math path."""

    def run(function, *arguments, calls=1, rtol=1e-10):
        results = []
        with sdpa_backend("flashsdpa", strict=True):
            assert routed(lambda: results.append(function(*arguments))) == calls
        check_close(results[0], by_math(function, *arguments), rtol)
        return results[0]

    return run


# --- torch.func over scaled_dot_product_attention ---------------------------------------------------------------------

# name -> attention of (q, k, v, bias); the bias is a number for each score, which a case may ignore
ATTEND = {
    "plain": lambda q, k, v, bias: sdpa(q, k, v),
    "causal": lambda q, k, v, bias: sdpa(q, k, v, is_causal=True, scale=0.7),
    "bool mask": lambda q, k, v, bias: sdpa(q, k, v, attn_mask=bias > -0.4),
    "bias": lambda q, k, v, bias: sdpa(q, k, v, attn_mask=bias),
    "bias of one row": lambda q, k, v, bias: sdpa(q, k, v, attn_mask=bias[..., :1, :]),
    "grouped": lambda q, k, v, bias: sdpa(q, k[..., :1, :, :], v[..., :1, :, :], enable_gqa=True),
}


def _basis(function, *inputs):
    return [normal(f"basis {i}", t.shape)[0] for i, t in enumerate(inputs)]


def _scalar(function):
    return lambda *inputs: function(*inputs).square().sum()


# name -> transform of (attention, its inputs)
TRANSFORMS = {
    "grad": lambda f, x: grad(_scalar(f), argnums=(0, 1, 2, 3))(*x),
    "vjp": lambda f, x: vjp(f, *x)[1](normal("cotangent", f(*x).shape)[0]),
    "jvp": lambda f, x: jvp(f, tuple(x), tuple(_basis(f, *x))),
    "jacrev": lambda f, x: jacrev(f, argnums=(0, 1, 2, 3))(*x),
    "jacfwd": lambda f, x: jacfwd(f, argnums=(0, 1, 2, 3))(*x),
    "hessian": lambda f, x: hessian(_scalar(f), argnums=(0, 1, 2, 3))(*x),
    "reverse over reverse": lambda f, x: jacrev(grad(_scalar(f), argnums=(0, 3)), argnums=(1, 2, 3))(*x),
    "reverse over forward": lambda f, x: jacrev(jacfwd(_scalar(f), argnums=(1, 3)), argnums=(0, 2))(*x),
    "forward over forward": lambda f, x: jacfwd(jacfwd(_scalar(f), argnums=(0, 3)), argnums=(1, 3))(*x),
    "third, reverse": lambda f, x: grad(_scalar(grad(_scalar(grad(_scalar(f))))), argnums=(0, 1, 2))(*x),
    "third, mixed": lambda f, x: jvp(grad(_scalar(lambda *y: jvp(f, y, tuple(_basis(f, *y)))[1])), tuple(x), tuple(x))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", ATTEND)
def test_torch_func(ours, case, transform):
    inputs = normal(case, (2, 4, 3), (2, 5, 3), (2, 5, 2), (2, 4, 5))
    zeros = torch.zeros(2, 4, 5, dtype=torch.float64)
    inputs[3] = torch.where(inputs[3] < -1.2, -INF, inputs[3]) if transform == "grad" else inputs[3] + zeros
    if "third" in transform:
        inputs[3][..., 0] = 1.0  # stock's third derivatives are NaN in a row without a key
    calls = 2 if transform == "vjp" else 1  # one for the shape of its cotangent
    ours(lambda *x: TRANSFORMS[transform](ATTEND[case], x), *inputs, calls=calls, rtol=1e-8 if "third" in transform else 1e-10)


@pytest.mark.parametrize("case", ATTEND)
def test_gradients_per_sample(ours, case):
    """vmap(grad): one call for all samples, a gradient of the shared bias for each."""
    q, k, v, bias = normal(case, (6, 2, 4, 3), (6, 2, 5, 3), (6, 2, 5, 2), (2, 4, 5))
    each = vmap(grad(_scalar(ATTEND[case]), argnums=(0, 1, 2, 3)), in_dims=(0, 0, 0, None))
    got = ours(each, q, k, v, bias)
    for i in range(6):
        check_close([t[i] for t in got], by_math(grad(_scalar(ATTEND[case]), argnums=(0, 1, 2, 3)), q[i], k[i], v[i], bias))


IN_DIMS = {
    "all": (0, 0, 0, 0), "last": (-1, 3, 1, 2), "query": (1, None, None, None), "key": (None, 2, None, None),
    "value": (None, None, 0, None), "mask": (None, None, None, 0), "all but the mask": (0, 1, 2, None),
}


@pytest.mark.parametrize("rank", (3, 4), ids=("heads", "batch and heads"))
@pytest.mark.parametrize("mask", ("bool", "bias"))
@pytest.mark.parametrize("in_dims", IN_DIMS)
def test_vmap_of_any_axis_of_some_arguments(ours, in_dims, mask, rank):
    lead = (2, 2)[: rank - 2]
    shapes = [(*lead, 70, 8), (*lead, 66, 8), (*lead, 66, 4), (2, 70, 66)]
    dims = IN_DIMS[in_dims]
    mapped = [s if d is None else (*s[: d % (len(s) + 1)], 3, *s[d % (len(s) + 1):]) for s, d in zip(shapes, dims)]
    q, k, v, m = normal(f"{in_dims} {rank}", *mapped)
    m = m > 0 if mask == "bool" else m

    def function(q, k, v, m):
        return vmap(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), in_dims=dims, out_dims=1)(q, k, v, m)

    ours(function, q, k, v, m)


def test_vmaps_nest(ours):
    q, k, v, m = normal("nested", (3, 2, 2, 9, 4), (3, 2, 7, 4), (2, 2, 7, 4), (4, 9, 7))
    inner = vmap(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), in_dims=(1, None, 0, None))
    ours(lambda q, k, v: vmap(inner, in_dims=(0, 0, None, None))(q, k, v, m[:1]), q, k, v)
    third = vmap(vmap(inner, in_dims=(0, 0, None, None)), in_dims=(None, None, None, 0))
    ours(third, q, k, v, m[:, None])
    # The mapped tensor is used inside a vmap that does not map it, and a gradient in between.
    both = vmap(lambda q: vmap(lambda v: grad(lambda k: sdpa(q, k, v).square().sum())(k[0]))(v))
    ours(both, q[:, 0])


def test_vmap_counts_as_one_call_of_one_kernel(routed):
    q, k, v = normal("kernel", *[(5, 2, 3, 70, 8)] * 3, dtype=torch.float32)
    with sdpa_backend("flashsdpa", strict=True), torch_flashsdpa.record_dispatch() as seen:
        assert routed(vmap(sdpa), q, k, v) == 1
    (launch,) = [row for row in seen.rows if row["kind"] == "launch"]
    assert launch["shape_q"] == (10, 3, 70, 8)


@pytest.mark.parametrize("randomness", ("error", "same", "different"))
def test_dropout_under_vmap_is_stocks(randomness):
    q, k, v = normal("dropout", *[(3, 2, 9, 8)] * 3, dtype=torch.float32)

    def attempt():
        torch.manual_seed(5)
        try:
            return vmap(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), randomness=randomness)(q, k, v)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    with sdpa_backend("flashsdpa"):
        got = attempt()
    want = attempt()
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
    with pytest.raises(RuntimeError, match="under vmap: dropout_p is 0.5; give 0"):
        vmap(lambda q, k, v: attention(q, k, v, dropout_p=0.5), randomness="same")(q, k, v)


# --- the ops ----------------------------------------------------------------------------------------------------------

EXTRAS = dict(softcap=1.1, window_left=3, bottom_right=True)


def _each(function, in_dims, arguments):
    """The loop that vmap stands for."""
    size = next(a.shape[d] for a, d in zip(arguments, in_dims) if d is not None)
    results = [function(*(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims))) for i in range(size)]
    return [torch.stack(parts) for parts in zip(*results)]


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("sinks", (None, 0, "shared"), ids=("none", "mapped", "shared"))
@pytest.mark.parametrize("slopes", (None, 1, "shared", "by batch"), ids=("none", "mapped", "shared", "by_batch"))
def test_vmap_of_the_ops(slopes, sinks, batch):
    """forward, backward and jvp, mapped over some of the inputs; sinks move the mapped axis into the heads."""
    q, k, v, g, m = normal("ops", (batch, 4, 3, 6, 3), (batch, 2, 7, 3), (3, batch, 2, 7, 2), (batch, 4, 6, 2),
                           (1, 4, 6, 7), dtype=torch.float32)
    s = {None: None, 1: torch.rand(4, 3), "shared": torch.rand(4), "by batch": torch.rand(batch, 4)}[slopes]
    z = {None: None, 0: torch.randn(3, 4), "shared": torch.randn(4)}[sinks]
    dims = [2, None, 0, None, None, 1 if slopes == 1 else None, 0 if sinks == 0 else None]
    arguments = [q, k, v, g, m, s, z]

    def function(*given):
        tensors = iter(given)
        q, k, v, g, m, s, z = (None if a is None else next(tensors) for a in arguments)
        options = dict(attn_mask=m, alibi_slopes=s, sinks=z, **EXTRAS)
        out, lse = ops().forward(q, k, v, **options)
        wanted = [True, True, True, True, z is not None]
        grads = ops().backward(g, lse, q, k, v, out, lse, output_mask=wanted, **options)
        tangents = ops().jvp(g, None, q, k, v, out, lse, g, None, q, k, None, m, z, output_mask=[True, True, *wanted],
                             **options)
        return [out, lse, *grads[: 4 + (z is not None)], *tangents[: 6 + (z is not None)]]

    dims, given = zip(*[(d, a) for d, a in zip(dims, arguments) if a is not None])
    before = torch_flashsdpa.routed_calls()
    got = vmap(function, in_dims=dims)(*given)
    assert torch_flashsdpa.routed_calls() - before == 1
    check_close(got, _each(function, dims, given), rtol=2e-5)


@pytest.mark.parametrize("planes", ((1, 1), (2, 1), (1, 3)), ids=str)
def test_vmap_of_mask_plan(planes):
    mask = torch.rand(*planes, 130, 4, 70, generator=generator("plans")) > 0.3
    plans = vmap(ops().mask_plan, in_dims=3)(mask)
    assert torch.equal(plans, torch.stack([ops().mask_plan(m) for m in mask.unbind(3)]))
    q, k, v = normal("plans", (4, 2, 3, 130, 8), (4, 2, 3, 70, 8), (2, 3, 70, 8), dtype=torch.float32)
    serve = lambda q, k, v, m, p: ops().forward(q, k, v, attn_mask=m, mask_plan=p)  # noqa: E731
    alone = lambda q, k, v, m, p: ops().forward(q, k, v, mask_plan=p)  # noqa: E731
    for function in (serve, alone):
        got = vmap(function, in_dims=(0, 0, None, 3, 0))(q, k, v, mask, plans)
        check_close(got, _each(function, (0, 0, None, 3, 0), (q, k, v, mask, plans)), rtol=1e-5)
        shared = vmap(lambda q, k: function(q, k, v, mask[:, :, :, 0], plans[0]))(q, k)
        check_close(shared, _each(lambda q, k: function(q, k, v, mask[:, :, :, 0], plans[0]), (0, 0), (q, k)), rtol=1e-5)


OPTIONS = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "window": dict(window_left=2, window_right=1, bottom_right=True, scale=-0.6),
    "softcap": dict(softcap=0.8),
    "slopes and softcap": dict(softcap=0.8, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]), is_causal=True),
}


@pytest.mark.parametrize("mask", (None, "bool", "bias:q", "bias:hk"), ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck_and_gradgradcheck(name, mask):
    """Of out and lse, in all modes, to the inputs and the bias; float64, grouped heads, D != Dv, a removed row."""
    shape = {"bias:q": (1, 1, 4, 1), "bias:hk": (1, 4, 1, 5)}.get(mask, (2, 1, 4, 5))
    q, k, v, m = normal(name, (2, 4, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2), shape)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if mask == "bool":
        m = m > -0.2
        m[0, 0, 1] = False
    elif mask is not None:
        leaves.append(m.requires_grad_())

    def function(q, k, v, *bias):
        mask_now = bias[0] if bias else m if mask == "bool" else None
        out, lse = ops().forward(q, k, v, attn_mask=mask_now, **OPTIONS[name])
        return out, torch.where(lse == -INF, 0.0, lse)

    quick = dict(fast_mode=True)
    assert gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True, **quick)
    assert gradgradcheck(function, leaves, check_fwd_over_rev=True, check_batched_grad=True, **quick)


def test_sinks_have_every_derivative():
    """Sinks are float32, so against the formula: the Hessian in four ways."""
    q, k, v, sinks = normal("sinks", (1, 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 2), (2,))
    keep = torch.ones(4, 5, dtype=torch.bool)

    def by_op(q, k, v, sinks):
        out, lse = ops().forward(q, k, v, sinks=sinks.float())
        return out.sin().sum() + lse.cos().sum()

    def by_formula(q, k, v, sinks):
        out, lse, _ = attention64(q, k, v, None, keep, 3**-0.5, sinks=sinks)
        return out.sin().sum() + lse.cos().sum()

    every = (0, 1, 2, 3)
    for outer, inner in ((jacfwd, jacrev), (jacrev, jacrev), (jacfwd, jacfwd), (jacrev, jacfwd)):
        got, want = (outer(inner(f, every), every)(q, k, v, sinks) for f in (by_op, by_formula))
        check_close(got, want, rtol=1e-6)


# --- many blocks of queries, memory, dtypes ---------------------------------------------------------------------------


def _hessian_vector(attend, inputs, directions):
    leaves = [t.detach().requires_grad_() for t in inputs]
    first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
    return torch.autograd.grad(first, leaves, directions)


@pytest.mark.parametrize("case", ("plain", "causal", "bias", "bias of one row", "bool mask"))
def test_hessian_vector_products_over_many_blocks(ours, case):
    """64 heads on 1100 keys: more than one block of 16 queries, whose bands end at different keys."""
    shapes = (2, 32, 40, 2), (2, 32, 1100, 2), (2, 32, 1100, 3), (1, 32, 40, 1100)
    inputs, directions = normal(case, *shapes), normal(f"{case} directions", *shapes)
    attend = ATTEND[case]
    if case in ("plain", "causal", "bool mask"):
        last = inputs.pop()
        directions.pop()
        attend = lambda q, k, v: ATTEND[case](q, k, v, last)  # noqa: E731
    ours(functools.partial(_hessian_vector, attend), inputs, directions, rtol=1e-9)
    ours(lambda: jvp(attend, tuple(inputs), tuple(directions))[1], rtol=1e-9)


def test_windows_over_many_blocks():
    shapes = (1, 64, 100, 2), (1, 64, 1100, 2), (1, 64, 1100, 2)
    inputs, directions = normal("windows", *shapes), normal("windows directions", *shapes)
    distance = torch.arange(1100) - torch.arange(100)[:, None] - 1000
    keep = (distance >= -30) & (distance <= 7)

    def both(attend):
        tangents = jvp(attend, tuple(inputs), tuple(directions))[1]
        return tangents, _hessian_vector(lambda *x: attend(*x)[0], inputs, directions)

    got = both(lambda q, k, v: attention(q, k, v, window=(30, 7), bottom_right=True, return_lse=True))
    check_close(got, both(lambda q, k, v: attention64(q, k, v, None, keep, 2**-0.5)[:2]), rtol=1e-9)


def test_memory_of_second_derivatives_is_linear(run_python):
    """At 16384 x 16384 one matrix of scores is 1 GiB in float32; a double backward, a tangent and a third derivative's
    record (nothing but inputs) stay far below it."""
    grown = run_python(
        "import resource, torch, torch_flashsdpa\n"
        "q, k, v, t = (torch.randn(1, 1, 16384, 4, requires_grad=i < 3) for i in range(4))\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "small = [x.detach()[:, :, :256].requires_grad_() for x in (q, k, v)]\n"
        "def second(x, t):\n"
        "    first = torch.autograd.grad(torch_flashsdpa.attention(*x).sin().sum(), x, create_graph=True)\n"
        "    torch.autograd.grad(first, x, [t] * 3, create_graph=True)\n"
        "    torch.func.jvp(lambda y: torch_flashsdpa.attention(y, x[1], x[2]), (x[0],), (t,))\n"
        "second(small, t[:, :, :256])\n"
        "before = peak()\n"
        "second([q, k, v], t)\n"
        "print(peak() - before)\n"
    )
    assert float(grown) < 300, grown  # MiB


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_other_dtypes_are_as_accurate_as_stock(dtype):
    q, k, v, *directions = normal("dtypes", *[(1, 2, 40, 16)] * 6, dtype=torch.float32)

    def run(kind):
        return _hessian_vector(sdpa, [t.to(kind) for t in (q, k, v)], [t.to(kind) for t in directions])

    exact = by_math(run, torch.float64)
    with sdpa_backend("flashsdpa", strict=True):
        got = run(dtype)
    for a, b, c in zip(got, exact, by_math(run, dtype)):
        bound = 2 * (c - b).abs().max() + torch.finfo(dtype).eps * b.abs().max()
        assert a.dtype == dtype and (a - b).abs().max() <= bound


def test_nan_in_a_removed_key_stays_out_of_tangents():
    q, k, v, t = normal("nan", *[(1, 1, 6, 4)] * 4)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    keep[:, 4] = False
    spoilt = k.clone()
    spoilt[:, :, 4] = float("nan")
    plain, got = (jvp(lambda q: attention(q, key, v, attn_mask=keep), (q,), (t,))[1] for key in (k, spoilt))
    assert torch.equal(plain, got)
