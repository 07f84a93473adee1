"""PyTorch's own modules and tools with ours in force: each behaves as with stock attention, and sees ours where it looks."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from oracle import generator
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_flashsdpa import enable, sdpa_backend

WIDTH, HEADS = 16, 2


def normal(name, *shapes):
    g = generator(name)
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.fixture(autouse=True)
def served():
    enable("flashsdpa")


def step(module, leaf, *args, **kwargs):
    """(out, gradients of the leaf and of all parameters) of the mean square of module(*args)."""
    out = module(*args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    return out, *torch.autograd.grad(out.square().mean(), [leaf, *module.parameters()])


def same_as_stock(function, *args, **kwargs):
    got = function(*args, **kwargs)
    with sdpa_backend("stock"):
        want = function(*args, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return got


# --- modules ----------------------------------------------------------------------------------------------------------


def block(kind):
    torch.manual_seed(0)
    return kind(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)
PADDING = torch.arange(7) >= torch.tensor([[5], [7]])  # True: padded; (batch, length)
STACKS = {
    "encoder": (lambda: nn.TransformerEncoder(block(nn.TransformerEncoderLayer), 2), 2, {}),
    "encoder, causal": (lambda: nn.TransformerEncoder(block(nn.TransformerEncoderLayer), 2), 2,
                        dict(mask=CAUSAL, is_causal=True)),
    "encoder, padded": (lambda: nn.TransformerEncoder(block(nn.TransformerEncoderLayer), 2), 2,
                        dict(src_key_padding_mask=PADDING)),
    "encoder, both": (lambda: nn.TransformerEncoder(block(nn.TransformerEncoderLayer), 2), 2,
                      dict(mask=CAUSAL.isinf(), src_key_padding_mask=PADDING)),
    "decoder": (lambda: nn.TransformerDecoder(block(nn.TransformerDecoderLayer), 2), 4, dict(tgt_mask=CAUSAL)),
    "transformer": (lambda: nn.Transformer(WIDTH, HEADS, 1, 2, 32, dropout=0.0, batch_first=True), 5,
                    dict(tgt_mask=CAUSAL, memory_key_padding_mask=PADDING)),
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
def test_stacks_of_layers(name, training, routed):
    make, attentions, options = STACKS[name]
    module = make().train(training)
    x, memory = (t.requires_grad_() for t in normal(name, (2, 7, WIDTH), (2, 7, WIDTH)))
    inputs = (x,) if name.startswith("encoder") else (x, memory)
    assert routed(step, module, x, *inputs, **options) == attentions
    same_as_stock(step, module, x, *inputs, **options)
    with torch.no_grad():  # eval: torch's fast path, which attends without SDPA, or the same layers
        same_as_stock(module, *inputs, **options)


@pytest.mark.parametrize("options", (
    dict(), dict(batch_first=True), dict(add_bias_kv=True), dict(add_zero_attn=True), dict(kdim=6, vdim=10), dict(bias=False),
), ids=str)
def test_multihead_attention(options, routed):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, **options)
    (q,) = normal("q", (2, 7, WIDTH))
    k, v = normal("kv", (2, 7, options.get("kdim", WIDTH)), (2, 7, options.get("vdim", WIDTH)))
    q.requires_grad_()
    padding = torch.zeros((2, 7) if options.get("batch_first") else (7, 2), dtype=torch.bool)
    padding[:, -1] = True
    for extra in (dict(), dict(key_padding_mask=padding)):
        assert routed(step, module, q, q, k, v, need_weights=False, **extra) == 1
        same_as_stock(step, module, q, q, k, v, need_weights=False, **extra)
    assert routed(module, q, k, v) == 0  # its weights are wanted, which SDPA has not
    same_as_stock(module, q, k, v)


@pytest.mark.parametrize("variant", (causal_upper_left, causal_lower_right))
@pytest.mark.parametrize("seq", ((9, 9), (5, 9)), ids=str)
def test_causal_bias(variant, seq):
    q, k, v = (t.requires_grad_() for t in normal("bias", (1, 2, seq[0], 8), (1, 2, seq[1], 8), (1, 2, seq[1], 8)))
    allowed = torch.ones(seq, dtype=torch.bool).tril(seq[1] - seq[0] if variant is causal_lower_right else 0)

    def attend(mask):
        out = sdpa(q, k, v, attn_mask=mask)
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    with sdpa_backend("stock"):
        want = attend(allowed)
    torch.testing.assert_close(attend(variant(*seq)), want, rtol=1e-4, atol=1e-6)


# --- nested tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_jagged_tensors_train_as_with_stock(compiled, routed):
    parts = normal("jagged", *[(n, HEADS, 8) for n in (3, 5, 2)])

    def attend(x):
        return sdpa(x, x, x)

    function = torch.compile(attend, backend="aot_eager") if compiled else attend

    def train():
        leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        out = function(leaf.transpose(1, 2))
        out.values().square().sum().backward()
        return out.values().detach(), leaf.grad.values()

    assert routed(train) == 0
    same_as_stock(train)


# --- TorchScript ------------------------------------------------------------------------------------------------------


def masked(q, k, v, mask):
    return sdpa(q * 2, k, v, attn_mask=mask)


@pytest.mark.parametrize("way", ("script", "trace", "frozen"))
def test_torchscript(way, routed):
    """The profiling executor rewrites a graph after its first runs, and the gradient after that."""
    q, k, v = (t.requires_grad_() for t in normal("script", *[(2, 2, 9, 8)] * 3))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()

    class Masked(nn.Module):
        def forward(self, q, k, v, mask):
            return sdpa(q * 2, k, v, attn_mask=mask)

    if way == "script":
        program = torch.jit.script(masked)
    elif way == "trace":
        program = torch.jit.trace(masked, (q, k, v, mask))
    else:
        program = torch.jit.freeze(torch.jit.script(Masked().eval()))

    def train():
        out = program(q, k, v, mask)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    for _ in range(3):
        assert routed(train) == 1
        same_as_stock(train)


def test_saved_torchscript_needs_no_package_of_ours(run_python, tmp_path):
    q, k, v = normal("saved", *[(1, 2, 9, 8)] * 3)
    torch.jit.save(torch.jit.trace(masked, (q, k, v, torch.zeros(9, 9))), str(tmp_path / "attend.pt"))
    code = """
import torch
program = torch.jit.load("attend.pt")
print(tuple(program(*[torch.zeros(1, 2, 9, 8)] * 3, torch.zeros(9, 9)).shape), hasattr(torch.ops.flashsdpa, "forward"))
"""
    assert run_python(code) == "(1, 2, 9, 8) False"


# --- tools that watch and trace ---------------------------------------------------------------------------------------


def test_flop_counter_puts_ours_below_the_module():
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    (x,) = normal("flops", (2, 7, WIDTH))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x, x, x, need_weights=False)
    shape = (2, HEADS, 7, WIDTH // HEADS)
    counts = {str(op): n for op, n in counter.get_flop_counts()["MultiheadAttention"].items()}
    assert counts["flashsdpa.forward"] == sdpa_flop_count(shape, shape, shape)


def test_profiler_shows_shapes_and_the_callers_op():
    q, k, v = (t.requires_grad_() for t in normal("profile", (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6)))
    with torch.profiler.profile(record_shapes=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sdpa(q, k, v, enable_gqa=True).sum().backward()
    events = {event.name: event for event in profile.events()}
    forward, backward = events["flashsdpa::forward"], events["flashsdpa::backward"]
    assert forward.input_shapes[:3] == [[2, 4, 9, 8], [2, 2, 11, 8], [2, 2, 11, 6]]
    assert backward.input_shapes[2:6] == [[2, 4, 9, 8], [2, 2, 11, 8], [2, 2, 11, 6], [2, 4, 9, 6]]
    names, event = [], forward
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    assert "aten::scaled_dot_product_attention" in names
    keys = {str(row.input_shapes[:3]) for row in profile.key_averages(group_by_input_shape=True) if row.key == forward.name}
    assert "[[2, 4, 9, 8], [2, 2, 11, 8], [2, 2, 11, 6]]" in keys


def test_saved_tensor_hooks_see_what_the_backward_reads(routed):
    q, k, v = (t.requires_grad_() for t in normal("hooks", *[(1, 2, 9, 8)] * 3))
    packed = []

    def attend():
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
            return torch.autograd.grad(sdpa(q, k, v).square().sum(), (q, k, v))

    assert routed(attend) == 1 and packed.count(q.shape) >= 4  # q, k, v, out
    same_as_stock(attend)


def test_symbolic_trace_keeps_the_call(routed):
    class Attend(nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, is_causal=True)

    inputs = normal("fx", *[(1, 2, 9, 8)] * 3)
    program = torch.fx.symbolic_trace(Attend())
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [sdpa]
    assert routed(program, *inputs) == 1
    same_as_stock(program, *inputs)


def test_make_fx_sees_our_op():
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = normal("proxy", *[(1, 2, 9, 8)] * 3)
    program = make_fx(lambda q, k, v: sdpa(q, k, v))(*inputs)
    assert torch.ops.flashsdpa.forward.default in [node.target for node in program.graph.nodes]
    torch.testing.assert_close(program(*inputs), sdpa(*inputs))


@pytest.mark.parametrize("mask", ("causal", "bool", "bias"))
@pytest.mark.parametrize("layout", ("bhsd", "bshd"))
def test_fake_cuda_tensors_on_a_machine_without_a_gpu(layout, mask):
    """Without a gradient: autograd of any op on a fake CUDA tensor ends the process where torch has no CUDA."""

    def make(heads, length):
        if layout == "bhsd":
            return torch.empty(2, heads, length, 64, dtype=torch.bfloat16, device="cuda")
        return torch.empty(2, length, heads, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    with FakeTensorMode():
        q, k, v = make(4, 128), make(2, 300), make(2, 300)
        options = dict(is_causal=True)
        if mask != "causal":
            dtype = torch.bool if mask == "bool" else torch.bfloat16
            options = dict(attn_mask=torch.empty(2, 1, 128, 300, dtype=dtype, device="cuda"))
        out = sdpa(q, k, v, enable_gqa=True, **options)
        assert (out.device.type, out.dtype, out.shape, out.stride()) == ("cuda", q.dtype, q.shape, q.stride())
        if mask != "causal":
            plan = torch.ops.flashsdpa.mask_plan(options["attn_mask"])
            assert plan.device.type == "cuda" and plan.dtype == torch.int32
            options["mask_plan"] = plan
        out, lse = torch.ops.flashsdpa.forward(q, k, v, **options)
        grads = torch.ops.flashsdpa.backward(out, None, q, k, v, out, lse, **options,
                                             output_mask=[True, True, True, mask == "bias", False])
    assert [(g.shape, g.stride(), g.device.type) for g in grads[:3]] == [(t.shape, t.stride(), "cuda") for t in (q, k, v)]
    if mask == "bias":
        assert (grads[3].shape, grads[3].dtype) == (options["attn_mask"].shape, torch.bfloat16)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_copies_of_a_compiled_module_are_served(routed):
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    (x,) = normal("copy", (2, 7, WIDTH))
    compiled = torch.compile(module, backend="aot_eager")
    want = compiled(x)
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    others = {
        "deepcopy": copy.deepcopy(compiled),
        "pickle": pickle.loads(pickle.dumps(compiled)),
        "file": torch.load(file, weights_only=False),
        "module": copy.deepcopy(module),
    }
    for name, other in others.items():
        assert routed(other, x) == 1, name
        torch.testing.assert_close(other(x), want)
        with sdpa_backend("stock"):
            assert routed(other, x) == 0, name


def _attend_in_a_worker(queue):
    torch.set_num_threads(1)  # as torch's data loader does in its workers
    q = torch.ones(1, 2, 9, 8)
    queue.put(sdpa(q, q, q).sum().item())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_worker_attends():
    (q,) = normal("fork", (4, 8, 200, 64))
    sdpa(q, q, q)  # the threads of this process exist, and do not in the worker
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_attend_in_a_worker, args=(queue,))
    worker.start()
    try:
        assert queue.get(timeout=60) == 1 * 2 * 9 * 8
    finally:
        worker.kill()
        worker.join()
