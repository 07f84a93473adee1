"""Reports from the field, one test each, named after the report: sizes, heads, head dims, strides, layouts, repeats."""

import itertools

import pytest
import torch
import torch_flashsdpa
from cases import LAYOUTS, Case, inputs, make_mask
from oracle import (INF, Call, Inputs, bytes_allocated, check, check_counting, generator, ops, poison_scratch, reference,
                    run_op, run_sdpa, virtual)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as sdpa

CAUSAL = Call(is_causal=True)
HALVES = (torch.bfloat16, torch.float16)


def normal(name, *shapes, dtype=torch.float32):
    g = generator(name)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def served(*args, **kwargs):
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        return sdpa(*args, **kwargs)


def test_up_018_gradients_do_not_depend_on_old_memory():
    case = Case("up018", heads=(4, 1), seq=(130, 130), dim=(256, 256), dtype=torch.bfloat16, call=CAUSAL)
    x = inputs(case)
    results = []
    for junk in (0.0, float("nan"), 3e38):
        garbage = [torch.full((n,), junk) for n in (1 << 10, 1 << 14, 1 << 18, 1 << 20)]
        del garbage
        poison_scratch(case.dtype)
        results.append(run_op(x, CAUSAL).grads)
    assert all(torch.equal(r[n], results[0][n]) for r in results for n in r)
    check(x, CAUSAL)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_up_019_grad_out_contiguous_transposed_and_sliced(dtype):
    q, k, v, grad = normal("up019", *[(2, 4, 70, 24)] * 4, dtype=dtype)
    for name in ("bhs", "bsh", "packed", "shb", "every_second_row"):
        check(Inputs(q, k, v, grad_out=LAYOUTS[name](grad)))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    weight = normal("up019w", (2, 70, 96), dtype=dtype)[0]
    served(q, k, v).transpose(1, 2).reshape(2, 70, 96).backward(weight)
    view = weight.view(2, 70, 4, 24).transpose(1, 2)
    want = check(Inputs(*(t.detach() for t in (q, k, v)), grad_out=view)).grads
    assert all(torch.equal(t.grad, want[n]) for t, n in ((q, "dq"), (k, "dk"), (v, "dv")))


def test_up_021_same_shapes_different_scale():
    q, k, v, grad = normal("up021", *[(1, 2, 66, 16)] * 4)
    for scale in (0.25, 0.75, 0.25, None):
        for run in (run_op, run_sdpa):
            check(Inputs(q, k, v, grad_out=grad), Call(scale=scale), run=run)


def test_up_022_same_shapes_different_strides_or_dtype():
    q, k, v = normal("up022", *[(2, 2, 66, 16)] * 3)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, torch.float32):
        low = [t.to(dtype) for t in (q, k, v)]
        dense = check(Inputs(*low))
        spread = check(Inputs(low[0], LAYOUTS["packed"](low[1]), low[2]))
        assert torch.equal(dense.out, spread.out) and torch.equal(dense.lse, spread.lse)


def test_up_048_batch_of_65536():
    for batch in (65535, 65536):
        q, k, v = (t.requires_grad_() for t in normal("up048", *[(batch, 1, 4, 8)] * 3, dtype=torch.float16))
        half = batch // 2
        whole = torch.autograd.grad(served(q, k, v).sum(), (q, k, v))
        parts = [torch.autograd.grad(served(*(t[s] for t in (q, k, v))).sum(), (q, k, v)) for s in
                 (slice(None, half), slice(half, None))]
        for i, t in enumerate(whole):
            assert torch.equal(t, parts[0][i] + parts[1][i])
    assert torch.equal(served(q, k, v)[half:], served(q[half:], k[half:], v[half:]))


def test_up_049_more_heads_or_queries_than_a_grid_axis():
    q, k, v = normal("up049", *[(1, 65536, 5, 8)] * 3)
    check(Inputs(q, k, v))
    seq = 64 * 65535 + 1
    q, k, v = normal("up049", (1, 1, seq, 2), (1, 1, 2, 2), (1, 1, 2, 2))
    out, lse = ops().forward(q, k, v, is_causal=True)
    for rows in (slice(0, 3), slice(seq - 3, seq)):
        want = reference(Inputs(q[:, :, rows], k, v), Call(is_causal=rows.start == 0))
        assert (out[:, :, rows] - want.out).abs().max() < 1e-6 and (lse[:, :, rows] - want.lse).abs().max() < 1e-6


def test_up_051_head_and_sequence_axes_swapped():
    """(B, S, H, D) handed over as (B, H, S, D): many heads of few queries just work."""
    q, k, v = normal("up051", *[(1, 3, 712, 16)] * 3)
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    check(Inputs(*swapped, grad_out=swapped[0]))
    with pytest.raises(RuntimeError, match="heads"):  # unequal "heads" name the layout that is expected
        torch_flashsdpa.attention(swapped[0], swapped[1][:, :511], swapped[2][:, :511])


@pytest.mark.parametrize("dim", (16, 128))
def test_up_052_offsets_beyond_2_31_elements(dim):
    """q, k and grad_out whose rows lie on both sides of 2^31 elements."""
    step = 2**31 // 60
    q, k, grad = (virtual(70 * step, torch.bfloat16).as_strided((1, 1, 70, dim), (0, 0, step, 1)) for _ in range(3))
    for t, values in zip((q, k, grad), normal("up052", *[(1, 1, 70, dim)] * 3, dtype=torch.bfloat16)):
        t.copy_(values)
    (v,) = normal("up052v", (1, 1, 70, dim), dtype=torch.bfloat16)
    got = check(Inputs(q, k, v, grad_out=grad), CAUSAL)
    dense = check(Inputs(q.contiguous(), k.contiguous(), v, grad_out=grad.contiguous()), CAUSAL)
    assert all(torch.equal(got.grads[n], dense.grads[n]) for n in got.grads)


def metadata(q, k, v, grad, **options):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out, lse = ops().forward(q, k, v, **options)
    return [(tuple(t.shape), t.stride(), t.dtype, t.storage_offset())
            for t in (out, lse, *torch.autograd.grad(out, (q, k, v), grad))]


@pytest.mark.parametrize("batch", (65535, 65536))
def test_up_054_fake_gradients_of_huge_batches(batch):
    tensors = [t.permute(1, 0, 2, 3) for t in normal("up054", *[(1, batch, 1, 2)] * 4)]
    real = metadata(*tensors)
    with FakeTensorMode() as mode:
        assert metadata(*(mode.from_tensor(t) for t in tensors)) == real


def test_up_055_float32_with_grouped_heads_is_fused():
    heads, seq = 6, 1025
    q, k, v = normal("up055", (1, heads, seq, 16), (1, 3, seq, 16), (1, 3, seq, 16))
    with torch_flashsdpa.record_dispatch() as record:
        served(q, k, v, enable_gqa=True)
    launched = [row["kernel"] for row in record.rows if row["kind"] == "launch"]
    assert len(launched) == 1 and launched[0].startswith("flashsdpa_fwd_cpu")
    assert q.numel() * 4 <= bytes_allocated(lambda: served(q, k, v, enable_gqa=True)) < seq * seq * 4
    check(Inputs(q, k, v))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=str)
def test_up_057_one_kv_head_without_the_flag(dtype):
    q, k, v, grad = normal("up057", (2, 8, 128, 64), (2, 1, 128, 64), (2, 1, 128, 64), (2, 8, 128, 64), dtype=dtype)
    want = check(Inputs(q, k, v, grad_out=grad))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = served(*leaves)  # enable_gqa stays False
    grads = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(out, want.out)
    for name, leaf, got in zip(("dq", "dk", "dv"), leaves, grads):
        assert got.shape == leaf.shape
        assert (got - want.grads[name]).abs().max() <= 2 * torch.finfo(dtype).eps * want.grads[name].abs().max()


def test_up_058_head_mismatch_without_the_flag():
    q, k, v = normal("up058", (1, 32, 4, 8), (1, 8, 4, 8), (1, 8, 4, 8))
    with pytest.raises(RuntimeError) as stock:
        sdpa(q, k, v)
    for strict in (False, True):
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=strict), pytest.raises(RuntimeError) as ours:
            sdpa(q, k, v)
        assert strict or str(ours.value) == str(stock.value)
    with pytest.raises(RuntimeError, match="32 heads.*enable_gqa"):
        torch_flashsdpa.attention(q, k, v)
    assert served(q, k, v, enable_gqa=True).shape == q.shape


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_up_060_grouped_heads_just_past_128_tokens(dtype):
    x = inputs(Case("up060", heads=(16, 2), seq=(129, 129), dim=(256, 256), dtype=dtype))
    first = check(x)
    for _ in range(20):
        again = run_op(x, Call())
        assert torch.equal(again.out, first.out) and all(torch.equal(again.grads[n], first.grads[n]) for n in first.grads)


@pytest.mark.parametrize("ratio", (1, 2, 4, 6, 7, 8, 16))
def test_up_061_every_row_of_grouped_causal_heads(ratio):
    check(inputs(Case("up061", heads=(2 * ratio, 2), seq=(200, 200), dim=(16, 16), dtype=torch.bfloat16)), CAUSAL)
    check_counting(1, 2 * ratio, 2, 140, 140, 140, torch.float32, None, CAUSAL)


@pytest.mark.parametrize("heads", ((4, 4), (4, 2)), ids=str)
def test_up_063_query_dim_192_value_dim_128(heads):
    case = Case("up063", heads=heads, seq=(130, 130), dim=(192, 128), dtype=torch.bfloat16)
    got = check(inputs(case), CAUSAL)  # the oracle's scale is 1 / sqrt(192)
    assert got.out.shape[-1] == 128 and got.grads["dv"].shape[-1] == 128
    check(inputs(case), CAUSAL, run=run_sdpa)


def test_up_064_head_dim_1_and_other_single_sizes():
    q, k, v = normal("up064", (1, 1, 2, 1), (1, 1, 1, 1), (1, 1, 1, 1))
    for query in (q, q.reshape(1, 2, 1, 1).transpose(1, 2), q.reshape(2, 1, 1, 1).permute(1, 2, 0, 3)):
        for run in (run_op, run_sdpa):
            check(Inputs(query, k, v, grad_out=torch.ones(1, 1, 2, 1)), run=run)


def test_up_066_the_padded_head_dim_does_not_show():
    x = inputs(Case("up066", heads=(1, 1), seq=(4, 4), dim=(4, 4)))
    got = check(x)
    assert got.out.shape == (1, 1, 4, 4) and got.out.stride() == (16, 16, 4, 1)


def test_up_067_mixed_head_dims_in_one_model():
    """Layers of 256 with a window are ours, layers of 512 are stock's; the record counts both."""
    small, large = normal("up067", (1, 8, 32, 256), (1, 8, 32, 512))
    window = make_mask("window:qk", "up067", (1, 8, 32, 32), torch.float32)
    with torch_flashsdpa.sdpa_backend("flashsdpa"), torch_flashsdpa.record_dispatch() as record:
        for _ in range(3):
            sdpa(small, small[:, :4], small[:, :4], attn_mask=window, enable_gqa=True)
            out = sdpa(large, large[:, :4], large[:, :4], enable_gqa=True)
    decisions = {(r["shape_q"][-1], r["kernel"].startswith("flashsdpa")): r["count"] for r in record.rows if r["kind"] == "decision"}
    assert decisions == {(256, True): 3, (512, False): 3}
    assert torch.equal(out, sdpa(large, large[:, :4], large[:, :4], enable_gqa=True))


def test_up_069_zero_width_query_and_key():
    q, v = torch.zeros(1, 16, 16, 0), normal("up069", (1, 16, 16, 1))[0]
    for run in (run_op, run_sdpa):
        got = check(Inputs(q, q, v, grad_out=torch.ones(1, 16, 16, 1)), Call(scale=1.0), run=run)
        assert (got.out - v.mean(2, keepdim=True)).abs().max() < 1e-6
        assert (got.grads["dv"] - 1).abs().max() < 1e-6 and got.grads["dq"].shape == q.shape


@pytest.mark.parametrize("causal", (False, True))
def test_up_070_no_keys_at_all(causal):
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 0, 8), torch.randn(2, 3, 0, 8)
    got = check(Inputs(q, k, v, grad_out=torch.ones(2, 3, 5, 8)), Call(is_causal=causal))
    assert (got.out == 0).all() and (got.lse == -INF).all() and (got.grads["dq"] == 0).all()
    assert (served(q, k, v, is_causal=causal) == 0).all()


def test_up_072_zero_queries_many_keys():
    k, v = normal("up072", *[(1, 1, 2538, 256)] * 2, dtype=torch.bfloat16)
    got = check(Inputs(k[:, :, :0], k, v, grad_out=v[:, :, :0]))
    assert (got.grads["dk"] == 0).all() and (got.grads["dv"] == 0).all() and got.grads["dk"].shape == k.shape


@pytest.mark.parametrize("seq_k", (*range(1, 66, 4), 33, 34, 129, 130))
def test_up_075_expanded_and_materialised_keys_agree(seq_k):
    q, k, v = normal("up075", (1, 4, 20, 256), (1, 1, seq_k, 256), (1, 1, seq_k, 256), dtype=torch.bfloat16)
    mask = make_mask("rows_false", "up075", (1, 4, 20, seq_k), torch.bfloat16)
    expanded = check(Inputs(q, k.expand(1, 4, -1, -1), v.expand(1, 4, -1, -1), mask, grad_out=q))
    dense = check(Inputs(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1), mask, grad_out=q))
    assert torch.equal(expanded.out, dense.out) and all(torch.equal(expanded.grads[n], dense.grads[n]) for n in dense.grads)


def test_up_076_output_follows_the_query_and_the_usual_view_is_free():
    q, k, v = (t.transpose(1, 2) for t in normal("up076", *[(2, 9, 4, 16)] * 3))
    out = served(q, k, v)
    assert out.stride() == q.stride()
    flat = out.transpose(1, 2).contiguous().view(2, 9, 64)
    assert flat.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("strided", itertools.product((False, True), repeat=3), ids=str)
def test_up_078_all_combinations_of_strided_and_dense(strided):
    for seq_k in (5, 300):
        tensors = normal("up078", (2, 2, 66, 64), (2, 2, seq_k, 64), (2, 2, seq_k, 64))
        spread = [LAYOUTS["packed"](t) if s else t for t, s in zip(tensors, strided)]
        check(Inputs(*spread, grad_out=tensors[0]))


@pytest.mark.parametrize("layouts", itertools.product(("bhs", "bsh"), repeat=3), ids="-".join)
def test_up_079_each_gradient_has_its_own_inputs_layout(layouts):
    tensors = [LAYOUTS[name](t) for name, t in zip((*layouts, layouts[0]), normal("up079", *[(2, 3, 13, 8)] * 4))]
    real = metadata(*tensors)
    assert [m[1] for m in real[2:]] == [t.stride() for t in tensors[:3]]
    with FakeTensorMode() as mode:
        assert metadata(*(mode.from_tensor(t) for t in tensors)) == real
    compiled = torch.compile(lambda q, k, v: served(q, k, v), backend="aot_eager", fullgraph=True)
    leaves = [t.requires_grad_() for t in tensors[:3]]
    grads = torch.autograd.grad(compiled(*leaves), leaves, tensors[3])
    assert [g.stride() for g in grads] == [t.stride() for t in tensors[:3]]


def test_up_081_memory_order_of_the_output():
    """grad_out made with empty_like(out) and filled in memory order: kernel and fallback give one order."""
    tensors = [t.transpose(1, 2) for t in normal("up081", *[(2, 49, 2, 32)] * 3)]
    ours, stock = served(*tensors), sdpa(*tensors)
    assert ours.stride() == stock.stride() == torch.empty_like(ours).stride()


def test_up_090_backward_takes_any_strides_of_what_was_saved():
    """A compiler may hand the backward other strides than the forward saw."""
    x = inputs(Case("up090", batch=2, heads=(4, 2), seq=(66, 130), dim=(24, 40), dtype=torch.bfloat16))
    out, lse = ops().forward(x.q, x.k, x.v)
    wanted = [True, True, True, False, False]
    want = ops().backward(x.grad_out, None, x.q, x.k, x.v, out, lse, output_mask=wanted)[:3]
    for name in ("bsh", "packed", "columns", "last_stride_2", "shb"):
        q, k, v, o, g = (LAYOUTS[name](t) for t in (x.q, x.k, x.v, out, x.grad_out))
        spread_lse = LAYOUTS["columns"](lse[..., None].expand(-1, -1, -1, 2))[..., 0]
        got = ops().backward(g, None, q, k, v, o, spread_lse, output_mask=wanted)[:3]
        assert all(torch.equal(a, b) for a, b in zip(got, want)), name


def test_up_093_fake_and_real_agree_for_all_lengths():
    for seq in range(1, 301, 7 if torch.get_num_threads() < 2 else 3):
        tensors = [t.transpose(1, 2) for t in normal("up093", *[(1, seq, 2, 4)] * 4)]
        real = metadata(*tensors, is_causal=True)
        with FakeTensorMode() as mode:
            assert metadata(*(mode.from_tensor(t) for t in tensors), is_causal=True) == real


@pytest.mark.parametrize("shape", ((2, 12, 130, 64), (1, 16, 66, 128), (1, 4, 66, 256)), ids=str)
def test_up_112_deterministic_gradients_are_bitwise_equal(shape):
    heads_kv = 2
    q, k, v, grad = normal("up112", shape, *[(shape[0], heads_kv, *shape[2:])] * 2, shape, dtype=torch.float16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(served(*leaves, enable_gqa=True), leaves, grad) for _ in range(12)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


def test_up_114_the_batch_does_not_matter():
    """tests/test_batch_invariance.py says more."""
    q, k, v = normal("up114", (256, 2, 1, 8), *[(256, 1, 1500, 8)] * 2)
    out = torch_flashsdpa.attention(q, k, v, enable_gqa=True, batch_invariant=True)
    for place in (0, 9, 255):
        one = slice(place, place + 1)
        assert torch.equal(torch_flashsdpa.attention(q[one], k[one], v[one], enable_gqa=True, batch_invariant=True), out[one])


def test_up_118_backward_accepts_any_pair_of_layouts_of_out_and_grad_out():
    x = inputs(Case("up118", batch=2, heads=(3, 3), seq=(9, 70), dim=(16, 16)))
    out, lse = ops().forward(x.q, x.k, x.v)
    wanted = [True, True, True, False, False]
    want = ops().backward(x.grad_out, None, x.q, x.k, x.v, out, lse, output_mask=wanted)[:3]
    for a, b in itertools.product(("bhs", "bsh", "hsb", "packed", "columns"), repeat=2):
        got = ops().backward(LAYOUTS[a](x.grad_out), None, x.q, x.k, x.v, LAYOUTS[b](out), lse, output_mask=wanted)[:3]
        assert all(torch.equal(g, w) for g, w in zip(got, want)), (a, b)


def test_up_120_a_ratio_broken_by_padding_is_refused():
    q, k, v = normal("up120", (1, 28, 4, 8), (1, 8, 4, 8), (1, 8, 4, 8))
    with pytest.raises(RuntimeError, match="query heads must be a multiple of key heads"):
        ops().forward(q, k, v)
    check(Inputs(q, k[:, :7], v[:, :7]))


def test_up_121_models_with_different_head_counts_side_by_side():
    models = [normal(f"up121{hkv}", (1, 8, 20, 16), *[(1, hkv, 20, 16)] * 2) for hkv in (8, 2, 4, 1)]
    alone = [served(*m, enable_gqa=True) for m in models]
    for _ in range(2):
        for model, want in zip(reversed(models), reversed(alone)):
            assert torch.equal(served(*model, enable_gqa=True), want)
            check(Inputs(*model))


def test_up_132_masked_cross_attention_of_one_query():
    x = inputs(Case("up132", batch=32, heads=(4, 4), seq=(1, 77), dim=(64, 64), mask="bias_inf:bk"))
    for run in (run_op, run_sdpa):
        check(x, run=run)
