"""What PyTorch's own test suite, and its peers', pin down about SDPA, as far as a CPU shows it; with ours in force."""

import re
from pathlib import Path

import pytest
import torch
import torch_flashsdpa
from oracle import INF, Call, Inputs, check, generator, ops, reference, run_op, run_sdpa
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa  # taken before anything is enabled
from torch_flashsdpa import enable, sdpa_backend


def normal(name, *shapes, dtype=torch.float32):
    g = generator(name)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def outcome(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def same_as_stock(*args, **kwargs):
    """The outcome with ours enabled, which must be stock's, text of an error included; from the same random numbers."""
    torch_flashsdpa.disable()
    torch.manual_seed(42)
    want = outcome(sdpa, *args, **kwargs)
    enable("flashsdpa")
    torch.manual_seed(42)
    got = outcome(sdpa, *args, **kwargs)
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want, (got, want)
    return got


@pytest.fixture(autouse=True)
def served():
    enable("flashsdpa")


# --- semantics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", ((128, 256), (256, 128), (23, 56)), ids=str)
def test_is_causal_is_upper_left(seq):
    from torch.nn.attention.bias import causal_upper_left

    q, k, v = normal(f"ul{seq}", (1, 2, seq[0], 16), (1, 2, seq[1], 16), (1, 2, seq[1], 16))
    out = check(Inputs(q, k, v, grad_out=q), Call(is_causal=True), run=run_sdpa).out
    explicit = torch.ones(seq, dtype=torch.bool).tril()
    assert (sdpa(q, k, v, attn_mask=explicit) - out).abs().max() < 1e-6
    assert (sdpa(q, k, v, attn_mask=causal_upper_left(*seq)) - out).abs().max() < 1e-6


def test_mask_together_with_is_causal(routed):
    """By default both apply; under MATH alone it is stock's error."""
    q, k, v = normal("both", *[(1, 2, 70, 8)] * 3)
    mask = torch.rand(70, 70, generator=generator("m")) < 0.5
    assert routed(sdpa, q, k, v, attn_mask=mask, is_causal=True) == 1
    check(Inputs(q, k, v, mask[None, None]), Call(is_causal=True), run=run_sdpa)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
        sdpa(q, k, v, attn_mask=mask, is_causal=True)


def test_causal_bias_with_is_causal_is_a_value_error():
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = normal("bias", (1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    with pytest.raises(ValueError):
        sdpa(q, k, v, attn_mask=causal_lower_right(5, 9), is_causal=True)
    want = reference(Inputs(q, k, v), Call(is_causal=True, bottom_right=True)).out
    assert (sdpa(q, k, v, attn_mask=causal_lower_right(5, 9)) - want).abs().max() < 1e-6


def test_scale_is_keyword_only_and_may_be_negative():
    q, k, v, grad = normal("scale", *[(1, 2, 70, 8)] * 4)
    with pytest.raises(TypeError):
        sdpa(q, k, v, None, 0.0, False, 0.5)
    check(Inputs(q, k, v, grad_out=grad), Call(scale=-1.0, is_causal=True), run=run_sdpa)


def test_default_scale_of_an_odd_head_dim():
    q, k, v, grad = normal("203", *[(1, 2, 40, 203)] * 4, dtype=torch.float16)
    check(Inputs(q, k, v, grad_out=grad), run=run_sdpa)


@pytest.mark.parametrize("lead", ((), (3,), (2, 3), (2, 2, 3)), ids=str)
def test_output_has_the_values_last_size(lead):
    q, k, v = normal("last", (*lead, 5, 16), (*lead, 7, 16), (*lead, 7, 24))
    out = sdpa(q, k, v)
    want = (q.double() @ k.double().mT / 4).softmax(-1) @ v.double()
    assert out.shape == (*lead, 5, 24) and (out - want).abs().max() < 1e-6


def test_one_dimensional_inputs_raise_as_stock():
    assert same_as_stock(*[torch.ones(8)] * 3)[0] is RuntimeError


def test_zero_width_heads_give_the_mean_of_v():
    v = normal("mean", (2, 3, 7, 5))[0]
    out = sdpa(torch.zeros(2, 3, 4, 0), torch.zeros(2, 3, 7, 0), v, scale=1.0)
    assert (out - v.mean(2, keepdim=True)).abs().max() < 1e-6


@pytest.mark.parametrize("axis", range(4))
def test_zero_sized_tensors_have_zero_sized_gradients(axis):
    shape = [2, 3, 5, 8]
    shape[axis] = 0
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    sdpa(q, k, v).sum().backward()
    assert all(t.grad.shape == t.shape for t in (q, k, v))


def test_strides_of_single_sizes_say_nothing():
    values = normal("single", (1, 3, 1, 16))[0]
    want = run_op(Inputs(values, values, values, grad_out=values), Call())
    for strides in ((7, 16, 3, 1), (0, 16, 0, 1), (1, 16, 1, 1)):
        t = values.as_strided((1, 3, 1, 16), strides)
        got = run_op(Inputs(t, t, t, grad_out=t), Call())
        assert torch.equal(got.out, want.out) and got.out.stride()[1] == 16 and got.out.stride()[3] == 1
    column = normal("column", (2, 3, 9, 1))[0]
    spread = torch.stack([column, column], -1)[..., 0]  # head dim 1 with last stride 2
    assert torch.equal(run_op(Inputs(spread, spread, spread), Call()).out, run_op(Inputs(column, column, column), Call()).out)


@pytest.mark.parametrize("dtype, value, dim", ((torch.float16, 256.0, 80), (torch.bfloat16, 133120.0, 64)), ids=str)
def test_large_constant_inputs_do_not_give_nan(dtype, value, dim):
    t = torch.full((1, 2, 70, dim), value, dtype=dtype)
    for call in (Call(), Call(is_causal=True)):
        got = run_op(Inputs(t, t, t, grad_out=torch.ones_like(t)), call)
        assert torch.equal(got.out, t) and all(g.isfinite().all() for g in got.grads.values())


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_gradients_of_inputs_ten_times_normal_are_finite(dtype):
    q, k, v, grad = (10 * t for t in normal("ten", *[(1, 2, 130, 64)] * 4, dtype=dtype))
    assert all(g.isfinite().all() for g in check(Inputs(q, k, v, grad_out=grad)).grads.values())


def test_blocks_of_minus_infinity_beside_valid_ones():
    q, k, v, grad = normal("blocks", *[(1, 2, 200, 16)] * 4)
    mask = torch.full((1, 1, 200, 200), -INF)
    mask[..., 64:70, 128:], mask[..., 70:, :64], mask[..., 3, 199] = 0, 0, 0
    for planned in (False, True):
        check(Inputs(q, k, v, mask, planned=planned, grad_out=grad))


def test_grouped_heads_need_the_flag():
    q, k, v = normal("gqa", (1, 8, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
    assert same_as_stock(q, k, v)[0] is RuntimeError
    check(Inputs(q, k, v), run=run_sdpa)
    same_as_stock(q, k, v[:, :1], enable_gqa=True)  # K and V heads differ: whatever stock says


def test_dense_batches_broadcast_by_default_and_not_in_a_forced_backend():
    q, k, v = normal("batch", (2, 2, 70, 8), (1, 2, 70, 8), (1, 2, 70, 8))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = sdpa(*leaves)
    wide = [t.detach().expand(2, -1, -1, -1) for t in leaves]
    want = reference(Inputs(*wide, grad_out=torch.ones(2, 2, 70, 8)), Call())
    assert (out - want.out).abs().max() < 1e-6
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert (grads[2] - want.grads["dv"].sum(0, keepdim=True)).abs().max() < 1e-5
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert same_as_stock(*(t.detach() for t in leaves))[0] is RuntimeError


def test_nan_in_an_unmasked_row_comes_through():
    q, k, v = normal("nan", *[(1, 1, 70, 16)] * 3)
    q[..., 3, 0] = float("nan")
    got = check(Inputs(q, k, v, torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()), run=run_sdpa)
    assert got.out.isnan().any(-1).nonzero().tolist() == [[0, 0, 3]]


# --- masks, layout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.int32, torch.uint8, torch.float64, torch.float16), ids=str)
def test_mask_dtypes_other_than_bool_float32_and_the_querys(dtype):
    q, k, v = normal("dtype", *[(1, 1, 5, 8)] * 3)
    assert same_as_stock(q, k, v, attn_mask=torch.ones(5, 5, dtype=dtype))[0] is RuntimeError


@pytest.mark.parametrize("shape", ((1, 3, 70, 90), (3, 1, 70, 90), (1, 1, 60, 90), (1, 1, 70, 80), (3, 70, 90)), ids=str)
def test_an_expanded_mask_of_the_wrong_size_raises_as_stock(shape):
    """One row in memory says the same for any size; the size given must fit all the same."""
    q, k = normal("expanded", (2, 4, 70, 8), (2, 4, 90, 8))
    for mask in (torch.zeros(1, 1).expand(shape), torch.ones(1, 1, dtype=torch.bool).expand(shape)):
        assert same_as_stock(q, k, k, attn_mask=mask)[0] is RuntimeError
        with pytest.raises(RuntimeError, match="does not broadcast"):
            torch_flashsdpa.attention(q, k, k, attn_mask=mask)


def test_an_expanded_mask_of_more_batches_than_the_query_is_stocks():
    q, k = normal("batches", (1, 4, 70, 8), (1, 4, 90, 8))
    for mask in (torch.zeros(3, 1, 70, 90), torch.zeros(1, 1).expand(3, 1, 70, 90)):
        same_as_stock(q, k, k, attn_mask=mask)


def test_gradient_of_a_mask_of_two_axes_is_summed(routed):
    q, k, v, grad = normal("grad", *[(2, 3, 66, 8)] * 4)
    mask = normal("mask", (66, 66))[0].requires_grad_()
    assert routed(sdpa, q, k, v, attn_mask=mask) == 1
    sdpa(q, k, v, attn_mask=mask).backward(grad)
    want = reference(Inputs(q, k, v, mask[None, None], True, grad_out=grad), Call()).grads["dmask"]
    assert mask.grad.shape == (66, 66) and (mask.grad - want[0, 0]).abs().max() < 1e-5


def test_inputs_with_stride_0_give_a_dense_output():
    q, k, v = (t.expand(2, 4, 9, 8) for t in normal("zero", *[(1, 1, 1, 8)] * 3))
    out = sdpa(q, k, v)
    assert out.stride(-1) == 1 and out.is_contiguous() and (out - v).abs().max() < 1e-6


# --- errors and selection ---------------------------------------------------------------------------------------------


def test_no_backend_allowed():
    q, k, v = normal("none", *[(1, 1, 5, 8)] * 3)
    with sdpa_kernel(SDPBackend.ERROR):
        kind, text = same_as_stock(q, k, v)
        assert kind is RuntimeError and "No viable backend" in text
        with pytest.raises(RuntimeError, match="No viable backend"):
            torch._fused_sdp_choice(q, k, v)


@pytest.mark.parametrize("change", ("dtype", "device"))
def test_mixed_dtypes_and_devices_are_runtime_errors(change):
    q, k, v = normal("mixed", *[(1, 1, 5, 8)] * 3)
    k = k.double() if change == "dtype" else k.to("meta")
    assert issubclass(same_as_stock(q, k, v)[0], RuntimeError)


@pytest.mark.parametrize("backend", ("FLASH_ATTENTION", "MATH", "EFFICIENT_ATTENTION"))
@pytest.mark.parametrize("case", ("plain", "float64", "head_dim 257", "head_dim 5", "mask", "mask of spread keys", "gqa",
                                  "rank 3", "causal of unequal lengths", "spread head_dim", "dropout"))
def test_a_forced_backend_is_stock_exactly(backend, case, routed):
    """More capable than the backend that was asked for would be another backend."""
    q, k, v = normal("forced", *[(2, 4, 6, 8)] * 3)
    options = {}
    if case == "float64":
        q, k, v = q.double(), k.double(), v.double()
    elif case.startswith("head_dim"):
        q, k, v = normal("big", *[(2, 4, 6, int(case.split()[1]))] * 3)
    elif case == "causal of unequal lengths":
        q, options["is_causal"] = q[:, :, :4], True
    elif case == "spread head_dim":
        q, k, v = (torch.stack([t, t], -1)[..., 0] for t in (q, k, v))
    elif case == "mask of spread keys":
        options["attn_mask"] = torch.zeros(6, 12)[:, ::2]
    elif case == "dropout":
        options["dropout_p"] = 0.22
    elif case == "mask":
        options["attn_mask"] = torch.ones(6, 6, dtype=torch.bool).tril()
    elif case == "gqa":
        k, v, options["enable_gqa"] = k[:, :2], v[:, :2], True
    elif case == "rank 3":
        q, k, v = q[0], k[0], v[0]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        same_as_stock(q, k, v, **options)
        assert routed(outcome, sdpa, q, k, v, **options) == 0


@pytest.mark.parametrize("case", ("plain", "mask", "float64", "gqa"))
def test_fused_choice_answers_as_stock(case):
    q, k, v = normal("choice", *[(2, 4, 6, 8)] * 3, dtype=torch.float64 if case == "float64" else torch.float32)
    options = dict(attn_mask=torch.ones(6, 6, dtype=torch.bool)) if case == "mask" else {}
    if case == "gqa":
        k, v, options["enable_gqa"] = k[:, :2], v[:, :2], True
    torch_flashsdpa.disable()
    want = torch._fused_sdp_choice(q, k, v, **options)
    enable("flashsdpa")
    assert torch._fused_sdp_choice(q, k, v, **options) == want


def test_the_order_of_torchs_backends_is_left_alone():
    def order():
        return torch._C._get_sdp_priority_order()

    q, k, v = normal("order", *[(1, 2, 6, 8)] * 3)
    before = order()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        inside = order()
        sdpa(q, k, v)
        with sdpa_backend("flashsdpa"):
            sdpa(q, k, v)
        assert order() == inside != before
    assert order() == before


def test_the_fused_ops_of_torch_are_not_replaced(routed):
    """Tests and compilers call them by name, and read more results than the output."""
    q, k, v = normal("aten", *[(1, 2, 6, 8)] * 3)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert routed(flash, q, k, v) == 0
    got = flash(q, k, v, is_causal=True)
    torch_flashsdpa.disable()
    assert all(torch.equal(a, b) for a, b in zip(got, flash(q, k, v, is_causal=True), strict=True))


def test_a_dropout_of_next_to_nothing_drops_nothing():
    q, k, v = normal("low", *[(1, 2, 70, 8)] * 3)
    assert (sdpa(q, k, v, dropout_p=1e-11) - sdpa(q, k, v)).abs().max() < 1e-6


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_autocast_casts_before_any_check(dtype, routed):
    q, k, v = normal("autocast", *[(1, 2, 9, 8)] * 3)
    with torch.autocast("cpu", torch.bfloat16):
        want_dtype = torch.bfloat16 if dtype == torch.float32 else None
        out = sdpa(q.to(dtype), k, v) if want_dtype else outcome(sdpa, q.to(dtype), k, v)
        if want_dtype:
            assert out.dtype == want_dtype and routed(sdpa, q, k, v) == 1
        else:
            assert isinstance(out, (torch.Tensor, tuple))


def test_compile_with_an_unbacked_length_also_of_zero():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(x, n):
        y = x[:, :, : n.item()]
        return sdpa(y, y, y)

    (x,) = normal("unbacked", (1, 2, 9, 8))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for n in (5, 0, 9):
            out = attend(x, torch.tensor(n))
            y = x[:, :, :n]
            assert out.shape == y.shape and (out - reference(Inputs(y, y, y), Call()).out).abs().sum() < 1e-4


def test_causal_bias_compiles_to_one_frame():
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.nn.attention.bias import causal_lower_right

    frames = CompileCounterWithBackend("aot_eager")
    q, k, v = normal("frame", (1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    attend = torch.compile(lambda q, k, v, bias: sdpa(q, k, v, attn_mask=bias), backend=frames, fullgraph=True)
    out = attend(q, k, v, causal_lower_right(5, 9))
    assert frames.frame_count == 1
    assert (out - reference(Inputs(q, k, v), Call(is_causal=True, bottom_right=True)).out).abs().max() < 1e-6


@pytest.mark.parametrize("options", (dict(), dict(is_causal=True), dict(window_left=2, window_right=1, bottom_right=True),
                                     dict(mask=True)), ids=str)
def test_gradcheck_in_float64(options):
    """Finite differences, with no formula of ours or of the oracle's in between; through out and lse."""
    options = dict(options)
    q, k, v = (t.requires_grad_() for t in normal("check", (1, 4, 5, 3), (1, 2, 6, 3), (1, 2, 6, 2), dtype=torch.float64))
    if options.pop("mask", False):
        mask = normal("bias", (1, 4, 5, 1), dtype=torch.float64)[0].requires_grad_()
        torch.autograd.gradcheck(lambda q, k, v, m: ops().forward(q, k, v, attn_mask=m, **options), (q, k, v, mask))
    else:
        torch.autograd.gradcheck(lambda q, k, v: ops().forward(q, k, v, **options), (q, k, v))


def test_second_derivatives_of_the_math_backend():
    q, k, v = (t.requires_grad_() for t in normal("second", *[(1, 2, 4, 3)] * 3, dtype=torch.float64))
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda q, k, v: sdpa(q, k, v, is_causal=True), (q, k, v))


@pytest.mark.parametrize("module", ("MultiheadAttention", "TransformerEncoderLayer"))
def test_scripted_modules_are_served(module, routed):
    torch.manual_seed(0)
    if module == "MultiheadAttention":
        plain = nn.MultiheadAttention(16, 2, batch_first=True)
        scripted = torch.jit.script(plain)
        def run(m):
            return m(x, x, x, need_weights=False)[0]
    else:
        plain = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        scripted = torch.jit.script(plain)
        def run(m):
            return m(x)
    (x,) = normal("script", (2, 7, 16))
    assert routed(run, scripted) == 1 and routed(run, plain) == 1
    with sdpa_backend("stock"):
        want = run(plain)
    assert torch.allclose(run(scripted), want, atol=1e-6)


def test_nested_members_of_length_zero_raise_as_stock():
    q = torch.nested.nested_tensor([torch.randn(2, 0, 8), torch.randn(2, 3, 8)])
    torch_flashsdpa.disable()
    want = outcome(sdpa, q, q, q)
    enable("flashsdpa")
    got = outcome(sdpa, q, q, q)
    assert type(got) is type(want) and (not isinstance(want, tuple) or got == want)


def test_registry_handle_is_removed_when_another_is_activated():
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    torch_flashsdpa.disable()
    activate_flash_attention_impl("flashsdpa")
    assert torch_flashsdpa.is_enabled()
    restore_flash_attention_impl()
    assert not torch_flashsdpa.is_enabled()


def test_the_table_of_points_names_tests_that_exist():
    here = Path(__file__).parent
    table = here.parent / "docs" / "conformance.md"
    if not table.exists():
        pytest.skip("the documentation is not here")
    named, last = 0, None
    for line in table.read_text().splitlines():
        for stem, name in re.findall(r"(\w*)::(\w+)", line.replace("`conformance::x`", "")):
            last = stem or last
            if last == "py":  # the line that explains how tests are named
                continue
            files = [*here.glob(f"test_{last}.py"), *here.glob(f"gpu/test_{last}.py")]
            # A case of the public collection is named by its number alone.
            pattern = rf"^def test_{name}{'_' if re.fullmatch(r'up_[0-9]+', name) else r'[(]'}"
            assert any(re.search(pattern, file.read_text(), re.M) for file in files), f"{last}::{name}"
            named += 1
    assert named > 50
