"""Reports from the field, one test each, named after the report: compilers, transforms, threads, modules, refusals.

Reports that need a GPU's streams, graphs or devices (UP-096, UP-097, UP-117), or a clock (UP-133), are not here.
"""

import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch_flashsdpa
from cases import Case, inputs
from oracle import Call, Inputs, check, generator, ops, reference
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_flashsdpa import enable, routed_calls, sdpa_backend


def normal(name, *shapes, dtype=torch.float32):
    g = generator(name)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def want64(q, k, v, mask=None, call=Call()):
    return reference(Inputs(q, k, v, mask), call).out


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


@pytest.fixture
def ours():
    enable("flashsdpa", strict=True)


@pytest.fixture
def lenient():
    enable("flashsdpa")


def test_up_015_native_transformer_fast_path_never_reaches_sdpa(routed, lenient):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    rows = torch.arange(16)
    mask = (rows[:, None] - rows).abs() > 4
    padding = (rows >= 12).expand(2, 16)
    (x,) = normal("up015", (2, 16, 32))
    with torch.no_grad():
        # Reported: the routed count stays 0, and with torch's documented switch it is 2, with the same numbers.
        assert routed(encoder, x, mask=mask, src_key_padding_mask=padding) == 0
        fast = encoder(x, mask=mask, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert routed(encoder, x, mask=mask, src_key_padding_mask=padding) == 2
            slow = encoder(x, mask=mask, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert (fast - slow)[:, :12].abs().max() < 1e-5


def test_up_033_hand_written_attention_keeps_its_scale_under_a_compiler(ours):
    q, k, v = normal("up033", *[(2, 4, 24, 64)] * 3)
    mask = torch.zeros(24, 24).masked_fill_(torch.rand(24, 24, generator=generator("m")) < 0.3, -torch.inf)

    def attend(q, k, v, mask):
        return (q @ k.transpose(-1, -2) / 8**-0.5 + mask).softmax(-1) @ v

    out = torch.compile(attend)(q, k, v, mask)  # inductor, whose pattern matcher looks for this very form
    assert (out - want64(q, k, v, mask[None, None], Call(scale=8**0.5))).abs().max() < 2e-4  # scores near 60


def test_up_073_compiled_graph_meets_an_empty_batch(ours, routed):
    function = compiled(sdpa, dynamic=True)
    for batch in (3, 2, 0, 4):
        leaves = [t.requires_grad_() for t in normal("up073", *[(batch, 2, 9, 8)] * 3)]
        out = function(*leaves)
        grads = torch.autograd.grad(out.sum(), leaves)
        assert out.shape == leaves[0].shape and [g.shape for g in grads] == [t.shape for t in leaves]
        if batch:
            assert (out - want64(*(t.detach() for t in leaves))).abs().max() < 1e-5


def test_up_082_symbolic_scale(ours, routed):
    def attend(q, k, v):
        return sdpa(q, k, v, scale=1.0 / (q.size(-1) ** 0.5 * 2))

    function = compiled(attend, dynamic=True)
    for dim in (8, 16, 24):
        tensors = normal(f"up082{dim}", *[(1, 2, 10, dim)] * 3)
        assert routed(function, *tensors) == 1
        assert (function(*tensors) - want64(*tensors, call=Call(scale=0.5 * dim**-0.5))).abs().max() < 1e-5


def test_up_084_the_selection_is_part_of_the_cache_key():
    """The tag that torch puts into its disk cache's key, as it is while a function is compiled."""
    tags = []

    def backend(graph, example):
        tags.append(torch.compiler.config.cache_key_tag)
        return graph

    def aot(graph, example):
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    (t,) = normal("up084", (1, 2, 8, 8))
    for name in ("flashsdpa", "stock", "auto"):
        with sdpa_backend(name):
            torch._dynamo.reset()
            torch.compile(lambda x: sdpa(x, x, x), backend=lambda g, e: (backend(g, e), aot(g, e))[1])(t)
    assert len(set(tags)) == 3 and all("flashsdpa" in tag for tag in tags)


def test_up_085_torchs_context_manager_inside_a_compiled_region(routed):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(x):
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
            theirs = sdpa(x, x, x)
        with sdpa_backend("flashsdpa"):
            return theirs, sdpa(x, x, x)

    (x,) = normal("up085", (1, 2, 12, 8))
    for function in (attend, compiled(attend)):
        assert routed(function, x) == 1
        for out in function(x):
            assert (out - want64(x, x, x)).abs().max() < 1e-5


def test_up_087_is_causal_computed_from_a_dynamic_length(ours):
    """With a static length it is specialised with a guard; a symbolic bool is refused in torch's words. Never frozen."""

    def attend(q, k, v):
        return sdpa(q, k, v, is_causal=q.size(-2) > 1)

    class Attend(nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    function = compiled(attend, dynamic=False)
    for seq in (9, 1, 30):
        tensors = normal(f"up087{seq}", (1, 2, seq, 8), *[(1, 2, 30, 8)] * 2)
        assert (function(*tensors) - want64(*tensors, call=Call(is_causal=seq > 1))).abs().max() < 1e-5
    with pytest.raises(Exception, match="is_causal"):
        compiled(attend, dynamic=True)(*tensors)
    lengths = torch.export.Dim("queries", min=1, max=64)
    with torch_flashsdpa.route_in_export(), pytest.raises(Exception, match="is_causal"):
        torch.export.export(Attend(), tuple(tensors), dynamic_shapes=({2: lengths}, None, None))


def test_up_088_dynamic_lengths_without_a_graph_break(ours, routed):
    def attend(q, k, v):
        return torch_flashsdpa.attention(q, k, v, is_causal=True, return_lse=True)

    function = compiled(attend, dynamic=True)
    for seq in (7, 12, 70):
        tensors = normal(f"up088{seq}", *[(2, 2, seq, 8)] * 3)
        out, lse = function(*tensors)
        assert (out - want64(*tensors, call=Call(is_causal=True))).abs().max() < 1e-5 and lse.shape == (2, 2, seq)


def test_up_091_no_output_is_an_input():
    """No op has an out argument or an alias; where nothing is to be computed the result is still a new tensor."""
    for name in ("forward", "backward", "mask_plan"):
        schema = getattr(ops(), name).default._schema
        assert not schema.is_mutable and not any(a.alias_info for a in (*schema.arguments, *schema.returns))
    q, k, v = normal("up091", (1, 1, 1, 4), (1, 1, 1, 4), (1, 1, 1, 4))
    out, _ = ops().forward(q, k, v)
    assert torch.equal(out, v) and out.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in (q, k, v)}


def test_up_099_scope_of_another_thread(routed):
    (x,) = normal("up099", (1, 2, 8, 8))
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def hold():
        with pytest.raises(ValueError), sdpa_backend("stock"):
            inside.set()
            leave.wait(20)
            seen.append(routed(sdpa, x, x, x))
            raise ValueError
        seen.append(routed(sdpa, x, x, x))

    enable("flashsdpa")
    function = compiled(lambda x: sdpa(x, x, x))
    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    assert routed(sdpa, x, x, x) == 1 and routed(function, x) == 1
    leave.set()
    thread.join()
    assert seen == [0, 1]


def test_up_100_autocast_with_mixed_inputs(ours):
    q, k, v = normal("up100", *[(2, 2, 12, 8)] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sdpa(q, k, v.bfloat16())
        explicit = torch_flashsdpa.attention(q, k, v.bfloat16())
    low = [t.bfloat16() for t in (q, k, v)]
    want = check(Inputs(*low)).out
    assert out.dtype == torch.bfloat16 and torch.equal(out, want) and torch.equal(explicit, want)


@pytest.mark.parametrize("biased", (False, True), ids=("up_102", "up_103"))
def test_up_102_up_103_vmap_of_grad_with_a_shared_bias(ours, routed, biased):
    q, k, v, bias = normal("up102", *[(8, 2, 6, 4)] * 3, (2, 6, 6))
    bias = bias if biased else torch.zeros_like(bias)

    def loss(q, k, v, bias):
        return sdpa(q, k, v, attn_mask=bias).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=(0, 0, 0, None))
    assert routed(each, q, k, v, bias) == 1
    grads = each(q, k, v, bias)
    leaves = [t.double().requires_grad_() for t in (q, k, v, bias)]
    out = (leaves[0] @ leaves[1].mT / 2 + leaves[3]).softmax(-1) @ leaves[2]
    want = torch.autograd.grad(out.square().sum(), leaves)
    for got, expected in zip(grads, want):
        got = got.sum(0) if got.dim() > expected.dim() else got
        assert (got - expected).abs().max() < 1e-4


def test_up_105_forward_mode_is_never_a_silent_zero(ours):
    q, k, v, tangent = normal("up105", *[(1, 2, 6, 4)] * 4, dtype=torch.float64)
    got = torch.func.jvp(lambda q: sdpa(q, k, v), (q,), (tangent,))[1]
    want = torch.func.jvp(lambda q: (q @ k.mT / 2).softmax(-1) @ v, (q,), (tangent,))[1]
    assert (got - want).abs().max() < 1e-12


def test_up_106_checkpoint_with_a_mode_that_rewrites_inputs(routed):
    from torch.overrides import TorchFunctionMode
    from torch.utils.checkpoint import checkpoint

    class Doubled(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is sdpa:
                args = (args[0] * 2, *args[1:])
            return function(*args, **(kwargs or {}))

    (x,) = normal("up106", (1, 2, 9, 8))
    x.requires_grad_()

    def step():
        with sdpa_backend("flashsdpa", strict=True), Doubled():
            out = checkpoint(lambda x: sdpa(x, x, x), x, use_reentrant=False)
            return torch.autograd.grad(out.sum(), x)[0]

    assert routed(step) == 2  # forward and recomputation alike
    wide = x.detach().double().requires_grad_()
    plain = ((2 * wide) @ wide.mT / 8**0.5).softmax(-1) @ wide
    # torch pops the mode while it recomputes in its own way; ours must differ from stock in nothing.
    with Doubled():
        stock = torch.autograd.grad(checkpoint(lambda x: sdpa(x, x, x), x, use_reentrant=False).sum(), x)[0]
    assert (step() - stock).abs().max() < 1e-5 and plain.shape == x.shape


def test_up_108_dtensor_inputs_reach_their_own_dispatch(lenient, routed):
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    try:
        mesh = distributed.init_device_mesh("cpu", (2,))
        tensors = [DTensor.from_local(t, mesh, [Shard(1)]) for t in normal("up108", *[(1, 2, 9, 8)] * 3)]
        mask = DTensor.from_local(torch.zeros(9, 9), mesh, [Replicate()])
        for options, served in (({}, 1), (dict(attn_mask=mask), 0)):  # a mask is for DTensor's own rules
            before = routed_calls()
            with sdpa_kernel(SDPBackend.MATH), sdpa_backend("flashsdpa"):
                out = sdpa(*tensors, **options)
            assert isinstance(out, DTensor) and out.shape == (1, 4, 9, 8) and routed_calls() == before + served
            assert (out.to_local() - want64(*(t.to_local() for t in tensors))).abs().max() < 1e-5
        assert "DTensor" in str(_strict_error(*tensors, attn_mask=mask))
    finally:
        distributed.destroy_process_group()


def _strict_error(*args, **kwargs):
    with sdpa_backend("flashsdpa", strict=True), pytest.raises(RuntimeError) as error:
        sdpa(*args, **kwargs)
    return error.value


def test_up_109_flop_counter(ours):
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (t.requires_grad_() for t in normal("up109", *[(1, 12, 64, 64)] * 3))
    with FlopCounterMode(display=False) as counter:
        sdpa(q, k, v).sum().backward()
    shape = (1, 12, 64, 64)
    assert counter.get_total_flops() == sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        sdpa(q.detach(), k.detach(), v.detach())
    assert counter.get_total_flops() == sdpa_flop_count(shape, shape, shape)


@pytest.mark.parametrize("p", (-1.0, 1.5))
def test_up_111_dropout_outside_0_to_1(p):
    q, k, v = normal("up111", *[(2, 2, 6, 8)] * 3)
    with pytest.raises(RuntimeError) as stock:
        sdpa(q, k, v, dropout_p=p)
    with sdpa_backend("flashsdpa"), pytest.raises(RuntimeError) as ours:
        sdpa(q, k, v, dropout_p=p)
    assert str(ours.value) == str(stock.value)


def test_up_111_dropout_of_everything(lenient):
    q, k, v = normal("up111", *[(2, 2, 6, 8)] * 3)
    assert (sdpa(q, k, v, dropout_p=1.0) == 0).all()


def test_up_094_every_call_drops_others_and_its_backward_the_same(lenient, routed):
    q, k = (torch.zeros(1, 2, 40, 16) for _ in range(2))
    v = torch.eye(40).expand(1, 2, -1, -1).clone().requires_grad_()
    outs = []
    for _ in range(2):
        assert routed(lambda: outs.append(sdpa(q, k, v, dropout_p=0.1))) == 1
        (dv,) = torch.autograd.grad(outs[-1], v, torch.eye(40).expand(1, 2, -1, -1))
        assert torch.allclose(dv, outs[-1].transpose(-1, -2))
    assert not torch.equal(*outs)


def test_up_123_float8_is_refused():
    q, k, v = (t.to(torch.float8_e4m3fn) for t in normal("up123", *[(1, 2, 8, 16)] * 3))
    with pytest.raises(RuntimeError, match="dtype is Float8_e4m3fn; supported"):
        torch_flashsdpa.attention(q, k, v)
    with pytest.raises(Exception) as stock:
        sdpa(q, k, v)
    with sdpa_backend("flashsdpa"), pytest.raises(type(stock.value)) as ours:
        sdpa(q, k, v)
    assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize("softcap", (5.0, 50.0))
def test_up_124_softcap_is_never_ignored(softcap):
    q, k, v = normal("up124", *[(1, 2, 8, 16)] * 3)
    got = torch_flashsdpa.attention(q, k, v, softcap=softcap, scale=3.0)
    assert (got - want64(q, k, v, call=Call(scale=3.0, softcap=softcap))).abs().max() < 1e-5
    assert (torch_flashsdpa.attention(q, k, v, softcap=0.0) - want64(q, k, v)).abs().max() < 1e-6


def test_up_129_jagged_sequences_stay_separate(lenient):
    parts = [normal(f"up129{n}", (n, 4, 8))[0] for n in (3, 5, 2)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    for out, part in zip(sdpa(q, q, q).unbind(), parts):
        x = part.transpose(0, 1)[None]
        assert (out - want64(x, x, x)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("layout", (torch.jagged, torch.strided), ids=str)
def test_up_130_causal_on_nested_tensors_passes_through_untouched(lenient, layout):
    """Where stock takes it, it is causal per sequence; where stock raises, so do we, in its words."""
    parts = [normal(f"up130{n}", (n, 2, 8))[0] for n in (4, 6)]
    if layout == torch.jagged:
        q = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    else:
        q = torch.nested.nested_tensor([p.transpose(0, 1) for p in parts])

    def attempt():
        try:
            return sdpa(q, q, q, is_causal=True)
        except Exception as error:
            return type(error), str(error)

    got = attempt()
    torch_flashsdpa.disable()
    stock = attempt()
    if isinstance(stock, tuple):
        assert got == stock
        return
    for out, part in zip(got.unbind(), parts):
        x = part.transpose(0, 1)[None]
        assert (out - want64(x, x, x, call=Call(is_causal=True))[0]).abs().max() < 1e-5


def test_up_135_a_binding_for_another_torch_never_breaks_the_import(run_python, tmp_path):
    package = Path(torch_flashsdpa.__file__).parent
    shutil.copytree(package, tmp_path / "torch_flashsdpa", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    other = tmp_path / "torch_flashsdpa" / "lib" / "torch9.9.9-cp399"
    other.mkdir(parents=True)
    (other / "_C.so").write_bytes(b"for another torch")
    out = run_python(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, torch_flashsdpa as t, torch.nn.functional as F\n"
        "t.enable(); q = torch.ones(1, 1, 2, 4)\n"
        "print(F.scaled_dot_product_attention(q, q, q).sum().item(), t.status()['problem'])",
        env={"HOME": str(tmp_path)}, package_root=tmp_path)
    assert out.startswith("8.0 ") and "torch9.9.9-cp399" in out and "python -m torch_flashsdpa build" in out


def test_case_inputs_are_fresh_and_reproducible():
    """The same case gives the same numbers within a session, another case other ones."""
    a, b = (inputs(Case("fresh")) for _ in range(2))
    assert torch.equal(a.q, b.q) and not torch.equal(a.q, inputs(Case("other")).q)
