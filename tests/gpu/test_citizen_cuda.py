"""PyTorch's own modes, transforms, tools and modules with ours in force on the GPU: as with stock, and ours is seen."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import Case, inputs
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import FLOAT32_EPS, Call, Result, check, generator, rounding_step
from torch import nn
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torch_flashsdpa import enable, profiler, routed_calls, sdpa_backend

pytestmark = needs_hopper
sdpa = F.scaled_dot_product_attention
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def served():
    enable("flashsdpa", strict=True)


def normal(name, *shapes, dtype=HALF):
    g = generator(name)
    return [torch.randn(shape, generator=g, device="cpu").to("cuda", dtype) for shape in shapes]


def step(function, leaves, grad_out):
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def same_bits(results):
    first, *others = results
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other))


@pytest.fixture
def fixed_bits():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# --- autograd's threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", (True, False), ids=("reentrant", "saved tensors"))
@pytest.mark.parametrize("threaded", (False, True), ids=("here", "another thread"))
def test_a_scope_holds_on_autograds_thread(routed, reentrant, threaded):
    """The checkpoint is recomputed by the device's thread of autograd, under the scope of the thread that asked."""
    enable("stock")
    x = inputs(Case("checkpoint", 2, (4, 4), (200, 300), (64, 64), HALF), "cuda")

    def run(_, call):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        with sdpa_backend("flashsdpa", strict=True):
            out = checkpoint(lambda *t: sdpa(*t, is_causal=True), *leaves, use_reentrant=reentrant)
            out.backward(x.grad_out)
        return Result(out.detach(), None, dict(zip(x.names(), [t.grad for t in leaves])))

    def on_a_thread(*arguments):
        results = []
        thread = threading.Thread(target=lambda: results.append(run(*arguments)))
        thread.start()
        thread.join()
        return results[0]

    runner = on_a_thread if threaded else run
    assert routed(runner, x, Call(is_causal=True)) == 2
    check(x, Call(is_causal=True), run=runner)


@pytest.mark.parametrize("saved", ("forward", "backward"))
def test_a_selective_checkpoint_names_our_op(routed, saved, fixed_bits):
    op = getattr(torch.ops.flashsdpa, saved).default
    leaves = [t.requires_grad_() for t in normal("selective", *[(1, 2, 200, 64)] * 3)]
    (grad_out,) = normal("selective grad", (1, 2, 200, 64))

    def policy(context, called, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if called is op else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(*t):
        return checkpoint(sdpa, *t, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))

    results = [step(sdpa, leaves, grad_out)]
    calls = routed(lambda: results.append(step(checkpointed, leaves, grad_out)))
    assert calls == (1 if saved == "forward" else 2) and same_bits(results)


def test_saved_tensors_go_to_the_host_and_back(fixed_bits):
    leaves = [t.requires_grad_() for t in normal("offload", *[(1, 2, 200, 64)] * 3)]
    (grad_out,) = normal("offload grad", (1, 2, 200, 64))
    plain = step(sdpa, leaves, grad_out)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = sdpa(*leaves)
    assert same_bits([plain, [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]])


# --- autocast, inference mode -----------------------------------------------------------------------------------------


def _autocast(q, k, v, mask):
    """Everything that stock's autocast does to SDPA, as a list of results and gradients."""
    leaf = q.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        results = [sdpa(leaf, k, v), sdpa(q, k.bfloat16(), v), sdpa(q, k, v, attn_mask=mask), sdpa(q, k, v, attn_mask=mask > 0)]
        with torch.autocast("cuda", enabled=False):
            results.append(sdpa(q, k, v))
        with torch.autocast("cuda", torch.float16):
            results.append(sdpa(q, k, v))
    return [*results, *torch.autograd.grad(results[0].float().sum(), leaf)]


def test_autocast_is_stocks(routed):
    q, k, v = normal("autocast", *[(1, 2, 100, 64)] * 3, dtype=torch.float32)
    (mask,) = normal("autocast mask", (100, 100), dtype=torch.float32)
    with sdpa_backend("stock"):
        want = _autocast(q, k, v, mask)
    assert routed(_autocast, q, k, v, mask) == 6
    assert [t.dtype for t in want] == [torch.bfloat16] * 4 + [torch.float32, torch.float16, torch.float32]
    for got, expected in zip(_autocast(q, k, v, mask), want):
        tolerance = 2**-6 if expected.dtype != torch.float32 or expected is want[-1] else 1e-5
        assert got.dtype == expected.dtype
        assert (got - expected).abs().max() <= tolerance * max(1.0, expected.abs().max())


def test_inference_mode(routed):
    q, k, v = normal("inference", *[(1, 2, 100, 64)] * 3)
    mask = torch.ones(100, 100, dtype=torch.bool).tril()
    want = sdpa(q, k, v, attn_mask=mask)
    with torch.inference_mode():
        outs = []
        assert routed(lambda: outs.append(sdpa(q.clone(), k, v, attn_mask=mask.clone()))) == 1
    assert outs[0].is_inference() and not outs[0].requires_grad and torch.equal(outs[0], want)


# --- derivatives of any order, torch.func -----------------------------------------------------------------------------
# Held against stock's math path in float64. The error may be twice what that path has in the same dtype, a rounding step, and
# what weights made again from a float32 log-sum-exp inherit: its rounding step, of a number up to 16, times sums that cancel.


def held(routed, function, tensors, calls=1):
    """function(*tensors), served by `calls` of ours, obeys the rule."""

    def by_math(dtype):
        with sdpa_backend("stock"), sdpa_kernel(SDPBackend.MATH):
            return tree_leaves(function(*[t.to(dtype) for t in tensors]))

    results = []
    assert routed(lambda: results.extend(tree_leaves(function(*tensors)))) == calls
    for got, want, yardstick in zip(results, by_math(torch.float64), by_math(tensors[0].dtype), strict=True):
        assert got.dtype == tensors[0].dtype and got.shape == want.shape
        top = want.abs().max().item()
        bound = 2 * (yardstick.double() - want).abs().max().item() + rounding_step(got.dtype, top) + 32 * FLOAT32_EPS * top
        assert (got.double() - want).abs().max().item() <= bound, f"largest value {top}"


CALLS = {
    "plain": lambda q, k, v, bias: sdpa(q, k, v),
    "causal": lambda q, k, v, bias: sdpa(q, k, v, is_causal=True, scale=0.1),
    "bool mask": lambda q, k, v, bias: sdpa(q, k, v, attn_mask=bias > -0.4),
    "bias": lambda q, k, v, bias: sdpa(q, k, v, attn_mask=bias),
    "grouped": lambda q, k, v, bias: sdpa(q, k[..., :1, :, :], v[..., :1, :, :], enable_gqa=True),
}
# The float32 kernels give no gradient of a mask.
DERIVED = [(name, dtype) for name in CALLS for dtype in (torch.float32, HALF) if (name, dtype) != ("bias", torch.float32)]
derived = pytest.mark.parametrize("name, dtype", DERIVED, ids=str)


def numbers(name, dtype, lead=(2,)):
    """(q, k, v, bias), shaped (*lead, 2, length, 64); no row is without a key."""
    tensors = normal(name, *[(*lead, 2, n, 64) for n in (70, 130, 130)], (2, 70, 130), dtype=dtype)
    tensors[3][..., 0] = 1.0
    return tensors


def scalar(function):
    return lambda *t: function(*t).float().square().mean()


@derived
def test_torch_func_grad_and_vmap(routed, name, dtype):
    """Gradients for each sample, of shared bias too: one call of ours for all samples."""
    wanted = (0, 1, 2, 3) if name == "bias" else (0, 1, 2)
    each = vmap(grad(lambda *t: 100 * scalar(CALLS[name])(*t), argnums=wanted), in_dims=(0, 0, 0, None))
    held(routed, each, numbers(name, dtype, lead=(3, 2)))


@derived
def test_jacobian_products(routed, name, dtype):
    """Forward mode, by dual tensors and by torch.func; all in one pass, and with the primal output kept."""
    tensors = numbers(name, dtype)
    directions = normal(f"{name} directions", *[t.shape for t in tensors], dtype=dtype)

    def tangents(*t):
        along = [d.to(t[0].dtype) for d in directions]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(a, b) for a, b in zip(t, along)]
            out = forward_ad.unpack_dual(CALLS[name](*duals))
            return out.primal, out.tangent

    held(routed, tangents, tensors)
    held(routed, lambda *t: jvp(CALLS[name], t, tuple(d.to(t[0].dtype) for d in directions)), tensors)


@derived
def test_double_backward(routed, name, dtype):
    tensors = numbers(name, dtype)
    directions = normal(f"{name} again", *[t.shape for t in tensors], dtype=dtype)
    count = 4 if name == "bias" else 3

    def hessian_vector(*t):
        leaves = [a.detach().requires_grad_(i < count) for i, a in enumerate(t)]
        first = torch.autograd.grad(100 * scalar(CALLS[name])(*leaves), leaves[:count], create_graph=True)
        return torch.autograd.grad(first, leaves[:count], [d.to(t[0].dtype) for d in directions[:count]])

    held(routed, hessian_vector, tensors)


def test_jacrev(routed):
    q, k, v = normal("jacobian", *[(1, 6, 8)] * 3, dtype=torch.float32)
    held(routed, lambda *t: jacrev(sdpa, argnums=(0, 1, 2))(*t), [q, k, v])


# --- tools that watch -------------------------------------------------------------------------------------------------


def test_flop_counter():
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (t.requires_grad_() for t in normal("flops", (2, 4, 100, 64), (2, 2, 130, 64), (2, 2, 130, 32)))
    with FlopCounterMode(display=False) as counter:
        sdpa(q, k, v, enable_gqa=True).sum().backward()
    shapes = (2, 4, 100, 64), (2, 4, 130, 64), (2, 4, 130, 32)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {"flashsdpa.forward": sdpa_flop_count(*shapes),
                      "flashsdpa.backward": sdpa_backward_flop_count((2, 4, 100, 32), *shapes)}  # fmt: skip


def test_profiler_shows_shapes_and_kernels_under_the_callers_op():
    q, k, v = (t.requires_grad_() for t in normal("profile", (2, 4, 200, 64), (2, 2, 300, 64), (2, 2, 300, 64)))
    mask = torch.ones(200, 300, dtype=torch.bool).tril(100)

    def run():
        sdpa(q, k, v, attn_mask=mask, enable_gqa=True).sum().backward()

    run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(record_shapes=True, activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    kernels = profiler.kernels_in(profile)
    for name in ("flashsdpa_fwd_sm90", "flashsdpa_bwd_pre_sm90", "flashsdpa_bwd_sm90", "flashsdpa_bwd_post_sm90"):
        assert kernels.starting_with(name) == 1, kernels
    assert kernels.starting_with("flashsdpa_mask_plan") == 2, kernels
    events = {event.name: event for event in profile.events()}
    forward, backward = events["flashsdpa::forward"], events["flashsdpa::backward"]
    assert forward.input_shapes[:3] == [[2, 4, 200, 64], [2, 2, 300, 64], [2, 2, 300, 64]]
    assert backward.input_shapes[2:6] == [[2, 4, 200, 64], [2, 2, 300, 64], [2, 2, 300, 64], [2, 4, 200, 64]]
    # A kernel is under the span of its launch, which has its name, and that under the op.
    for op, prefix in (("flashsdpa::forward", "flashsdpa_fwd"), ("flashsdpa::backward", "flashsdpa_bwd")):
        launches = [event for event in profile.events() if any(prefix in kernel.name for kernel in event.kernels)]
        assert launches
        for event in launches:
            while event is not None and event.name != op:
                event = event.cpu_parent
            assert event is not None, (prefix, launches)
    above = []
    while forward is not None:
        above.append(forward.name)
        forward = forward.cpu_parent
    assert "aten::scaled_dot_product_attention" in above


# --- tensors of other kinds -------------------------------------------------------------------------------------------


def test_dtensors_on_one_device(tmp_path):
    """Shards of heads, the mesh being this device alone."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    from torch.distributed.tensor import DTensor, Shard

    x = inputs(Case("dtensor", 2, (4, 2), (200, 300), (64, 64), HALF), "cuda")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cuda", (1,))

        def run(x, call):
            leaves = [DTensor.from_local(t, mesh, [Shard(1)]).detach().requires_grad_() for t in (x.q, x.k, x.v)]
            before = routed_calls()
            out = sdpa(*leaves, is_causal=True, enable_gqa=True)
            grads = torch.autograd.grad(out, leaves, DTensor.from_local(x.grad_out, mesh, [Shard(1)]))
            assert routed_calls() == before + 1 and {t.placements for t in (out, *grads)} == {(Shard(1),)}
            return Result(out.to_local().detach(), None, dict(zip(x.names(), [t.to_local() for t in grads])))

        check(x, Call(is_causal=True), run=run)
    finally:
        dist.destroy_process_group()


def test_jagged_tensors_train_as_with_stock(routed):
    enable("flashsdpa")  # stock serves them
    parts = normal("jagged", *[(n, 2, 64) for n in (30, 100, 7)])

    def train():
        leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        x = leaf.transpose(1, 2)
        out = sdpa(x, x, x)
        out.values().float().square().sum().backward()
        return out.values().detach(), leaf.grad.values()

    assert routed(train) == 0
    with sdpa_backend("stock"):
        want = train()
    for got, expected in zip(train(), want):
        assert (got - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.parametrize("lengths", ((90, 90), (50, 90)), ids=str)
def test_causal_bias_stays_causal(lengths):
    enable("flashsdpa")
    rows, keys = lengths
    q, k, v = (t.requires_grad_() for t in normal("bias", *[(1, 2, n, 64) for n in (rows, keys, keys)]))
    (grad_out,) = normal("bias grad", (1, 2, rows, 64))
    allowed = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    got = step(lambda *t: sdpa(*t, attn_mask=causal_lower_right(rows, keys)), (q, k, v), grad_out)
    want = step(lambda *t: sdpa(*t, attn_mask=allowed), (q, k, v), grad_out)
    for a, b in zip(got, want):
        assert (a - b).abs().max() <= 2**-6 * b.abs().max()


# --- modules ----------------------------------------------------------------------------------------------------------
# In float32, which tells rounding from faults.

WIDTH, HEADS, LENGTH = 128, 2, 100
PADDING = [100, 61, 3]  # lengths of the batch's sequences


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options)


def padding():
    return torch.arange(LENGTH) >= torch.tensor(PADDING)[:, None]  # True: padded


def gradients_of(module, x, **options):
    leaf = x.clone().requires_grad_()
    out = module(leaf, **options)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out.square().mean(), [leaf, *module.parameters()], allow_unused=True)]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 1e-4 * max(b.abs().max().item(), 1e-3)


MASKS = {
    "": lambda: {},
    "causal": lambda: dict(mask=nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True),
    "padded": lambda: dict(src_key_padding_mask=padding()),
    "both": lambda: dict(mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), src_key_padding_mask=padding()),
}


@pytest.mark.parametrize("mask", MASKS)
def test_encoder_trains_as_with_stock(routed, mask):
    module, options = encoder(), MASKS[mask]()
    (x,) = normal("encoder", (3, LENGTH, WIDTH), dtype=torch.float32)
    got = []
    assert routed(lambda: got.extend(gradients_of(module, x, **options))) == 2
    with sdpa_backend("stock"):
        close(got, gradients_of(module, x, **options))


@pytest.mark.parametrize("nested", (False, True), ids=("dense", "nested"))
def test_the_fast_path_of_encoders_reaches_us(routed, nested):
    """On the GPU torch's eval fast path calls SDPA itself; padded batches that it makes nested tensors of are stock's."""
    enable("flashsdpa")
    module = encoder(enable_nested_tensor=nested).eval()
    (x,) = normal("fast path", (3, LENGTH, WIDTH), dtype=torch.float32)
    for options in ({}, dict(src_key_padding_mask=padding())):
        got, want = [], []
        with torch.inference_mode():
            calls = routed(lambda: got.append(module(x, **options)))  # noqa: B023
            with sdpa_backend("stock"):
                want.append(module(x, **options))
        if not options:
            assert calls == 2
        close(got, want)


@pytest.mark.parametrize("masked", (False, True))
def test_multihead_attention(routed, masked):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    (x,) = normal("mha", (3, LENGTH, WIDTH), dtype=torch.float32)
    options = dict(need_weights=False, key_padding_mask=padding() if masked else None)

    def attend(x, **more):
        return module(x, x, x, **options, **more)

    attend.parameters = module.parameters
    got = []
    assert routed(lambda: got.extend(gradients_of(attend, x))) == 1
    with sdpa_backend("stock"):
        close(got, gradients_of(attend, x))
    module.eval()
    enable("flashsdpa")  # with a mask the fast path is stock's own
    with torch.inference_mode():
        results = [attend(x)[0]]
        with sdpa_backend("stock"):
            close(results, [attend(x)[0]])
