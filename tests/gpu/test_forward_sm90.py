"""The Hopper forward kernel: both oracles over dtypes, head dims, lengths, bands, heads and layouts; streams, capture, size.

Everything is made on the GPU (`torch.device("cuda")` is the default device of these tests), also the float64 reference.
"""

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, LAYOUTS, Case, inputs
from hopper import needs_hopper, on_the_gpu  # noqa: F401
from oracle import INF, Call, Inputs, attention64, check, check_counting, generator, ops

import torch_flashsdpa

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
DIMS = (1, 8, 40, 64, 70, 72, 80, 96, 128, 160, 192, 200, 256)
MIXED_DIMS = ((192, 128), (128, 192), (64, 256), (256, 64), (96, 33), (5, 70), (64, 1), (1, 64))
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 1000, 1021)
HEADS = ((2, 2), (4, 1), (6, 3), (7, 1))


def hold(case):
    check(inputs(case, "cuda"), case.call)


def forward(q, k, v, **options):
    return ops().forward(q, k, v, **options)


def normal(name, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator(name), device="cpu").to("cuda", dtype)


# --- the oracles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_dims(dim, dtype):
    for band, heads in zip(("full", "causal", "causal_br"), HEADS):
        hold(Case(f"D{dim}-{band}", 2, heads, (200, 300), (dim, dim), dtype, call=BANDS[band], grad=""))


@pytest.mark.parametrize("dims", MIXED_DIMS, ids=str)
def test_head_dims_of_q_and_v_differ(dims):
    for band, dtype in itertools.product(("full", "causal"), HALVES):
        hold(Case(f"D{dims}-{band}", 2, (4, 2), (300, 200), dims, dtype, call=BANDS[band], grad=""))


@pytest.mark.parametrize("seq_q", LENGTHS)
def test_lengths(seq_q):
    dims, dtypes, heads = itertools.cycle(DIMS[3:]), itertools.cycle(HALVES), itertools.cycle(HEADS)
    for seq_k, band in itertools.product(LENGTHS, ("full", "causal", "causal_br")):
        dim = next(dims)
        hold(Case(f"{seq_q}x{seq_k}-{band}", 1, next(heads), (seq_q, seq_k), (dim, dim), next(dtypes), call=BANDS[band],
                  grad=""))


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
def test_4096(dim):
    for band, dtype in zip(("full", "causal", "window_64_63"), (*HALVES, torch.bfloat16)):
        hold(Case(f"4096-{band}", 1, (2, 1), (4096, 4096), (dim, dim), dtype, call=BANDS[band], grad=""))


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for (seq_q, seq_k), dim in itertools.product(((300, 200), (200, 300), (129, 700), (700, 129)), (64, 80, 128)):
        hold(Case(f"{band}-{seq_q}x{seq_k}", 1, (4, 2), (seq_q, seq_k), (dim, dim), torch.bfloat16, call=BANDS[band],
                  grad=""))


@pytest.mark.parametrize("scale", (0.3, -0.5, 0.0, 3.0, -1e-3))
def test_scales(scale):
    for band, dim in itertools.product(("full", "causal"), (64, 128)):
        hold(Case(f"scale{scale}-{band}", 1, (2, 2), (200, 300), (dim, dim), torch.float16,
                  call=replace(BANDS[band], scale=scale), grad=""))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Also those that TMA cannot read: odd offsets, odd strides; mixed with some that it can."""
    for dim, band in itertools.product((64, 70, 128), ("full", "causal")):
        for layouts in ((layout,) * 3, ("bsh", layout, "bhs"), (layout, "bhs", "packed")):
            hold(Case(f"{layouts}-{band}", 2, (4, 2), (130, 200), (dim, dim), torch.bfloat16, call=BANDS[band],
                      layout=layouts, grad=""))


@pytest.mark.parametrize("dim", (64, 72, 96, 128, 160, 192, 256))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_counting(dim, dtype):
    """Every (query, key) pair, around the edges of tiles of 64 to 192 queries and 64 to 192 keys."""
    for seq_q, seq_k in ((1, 1), (65, 63), (127, 129), (193, 385), (257, 320), (500, 177)):
        for band in (Call(), Call(is_causal=True), Call(is_causal=True, bottom_right=True), Call(window=(70, 3))):
            check_counting(1, 4, 2, seq_q, seq_k, dim, dtype, call=band, backward=False)


def test_counting_of_many_tiles():
    """More tiles than processors: none is lost or done twice, whichever way they are dealt out."""
    for dim, band in itertools.product((64, 128), ("full", "causal", "causal_br")):
        check_counting(3, 14, 7, 900, 700, dim, torch.bfloat16, call=BANDS[band], backward=False)


# --- few queries on long keys -----------------------------------------------------------------------------------------

DECODE_HEADS = ((32, 8), (8, 8), (7, 1), (71, 1), (6, 2))


def kernels_of(*inputs, **options):
    with torch_flashsdpa.profiler.kernels_run() as kernels:
        forward(*inputs, **options)
        torch.cuda.synchronize()
    return kernels


@pytest.mark.parametrize("heads", DECODE_HEADS, ids=str)
@pytest.mark.parametrize("seq_q", (1, 5, 64, 100))
def test_few_queries(heads, seq_q):
    dims, dtypes = itertools.cycle((64, 128, 256, 80, 192)), itertools.cycle(HALVES)
    for seq_k, band in itertools.product((63, 700, 8192, 20001), ("full", "causal_br", "window_br")):
        dim = next(dims)
        hold(Case(f"few-{heads}-{seq_q}x{seq_k}-{band}", 2, heads, (seq_q, seq_k), (dim, dim), next(dtypes), call=BANDS[band],
                  grad=""))


def test_few_queries_head_dims_of_q_and_v_differ():
    for dims in MIXED_DIMS:
        hold(Case(f"few-{dims}", 2, (8, 2), (3, 5000), dims, torch.bfloat16, call=BANDS["causal_br"], grad=""))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_queries_layouts(layout):
    for dim, layouts in itertools.product((64, 70, 128), ((layout,) * 3, ("bsh", layout, "bhs"), (layout, "bhs", "packed"))):
        hold(Case(f"few-{layouts}", 2, (8, 2), (5, 3000), (dim, dim), torch.bfloat16, call=BANDS["causal_br"], layout=layouts,
                  grad=""))


@pytest.mark.parametrize("dim", (64, 128, 256))
def test_few_queries_counting(dim):
    for (seq_q, seq_k), heads in itertools.product(((1, 4000), (4, 1500), (70, 2100)), ((8, 2), (5, 1), (3, 3))):
        for call in (Call(), Call(is_causal=True), Call(is_causal=True, bottom_right=True), Call(window=(70, 3))):
            check_counting(1, *heads, seq_q, seq_k, dim, torch.bfloat16, call=call, backward=False)


def test_keys_are_split_where_processors_would_idle():
    q, k, v = normal("split q", 1, 32, 1, 128), normal("split k", 1, 8, 8192, 128), normal("split v", 1, 8, 8192, 128)
    kernels = kernels_of(q, k, v)
    assert any("fwd_sm90" in name for name in kernels) and any("fwd_combine_sm90" in name for name in kernels), kernels
    full = normal("whole q", 4, 32, 2048, 128), *(normal(f"whole {i}", 4, 8, 2048, 128) for i in "kv")
    assert not any("combine" in name for name in kernels_of(*full))


def test_few_queries_of_scores_of_any_magnitude():
    for magnitude in (1.0, 133120.0, 1e18):
        q = torch.full((1, 4, 3, 128), magnitude, dtype=torch.bfloat16)
        k, v = torch.full((1, 1, 9000, 128), magnitude, dtype=torch.bfloat16), normal("few equal", 1, 1, 9000, 128)
        out, lse = forward(q, k, v)
        assert (out.float() - v.float().mean(2, keepdim=True)).abs().max() < 1e-2
        assert lse.isfinite().all()


def test_few_queries_on_a_million_keys():
    q, k, v = normal("million q", 1, 16, 3, 128), normal("million k", 1, 2, 1_048_576, 128), normal("million v", 1, 2, 1_048_576, 128)
    out, lse = forward(q, k, v)
    sampled_rows(q, k, v, out, lse, [0, 1, 2])


# --- numbers that are special -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_running_maximum_rises_in_every_block(dtype):
    """Keys of growing scores, seen from the last to the first and the other way round."""
    for dim, order in itertools.product((64, 128), (1, -1)):
        q = torch.ones(1, 1, 70, dim, dtype=dtype)
        k = (order * torch.linspace(-2, 2, 1000)[:, None] * torch.ones(dim)).to(dtype)[None, None]
        check(Inputs(q, k, normal(f"rise{dim}", 1, 1, 1000, dim, dtype=dtype)))


@pytest.mark.parametrize("magnitude", (1e2, 1e4))
def test_large_scores(magnitude):
    for dim in (64, 128):
        x = inputs(Case(f"large{magnitude}{dim}", 1, (2, 2), (200, 300), (dim, dim), torch.bfloat16, grad=""), "cuda")
        check(replace(x, q=(x.q * magnitude).bfloat16()))


@pytest.mark.parametrize("magnitude", (1.0, 1e3, 133120.0, 1e18))
@pytest.mark.parametrize("sign", (1, -1))
def test_equal_scores_of_any_magnitude_weigh_the_same(sign, magnitude):
    """Also where one more rounding of a score is more than exp2 can hold."""
    for dim, seq_k, dtype in ((64, 300, torch.bfloat16), (128, 700, torch.bfloat16), (256, 300, torch.bfloat16)):
        q = torch.full((1, 1, 65, dim), sign * magnitude, dtype=dtype)
        k, v = torch.full((1, 1, seq_k, dim), magnitude, dtype=dtype), normal("equal", 1, 1, seq_k, dim, dtype=dtype)
        out, lse = forward(q, k, v)
        assert (out.float() - v.float().mean(2, keepdim=True)).abs().max() < 1e-2
        assert lse.isfinite().all()


def test_scores_that_grow_beyond_what_a_multiply_add_resolves():
    """Rows whose reference goes from ordinary to huge and back, block by block; the largest key alone counts."""
    q = torch.full((1, 1, 130, 64), 100.0, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 1000, 64, dtype=torch.bfloat16)
    k[0, 0, 300], k[0, 0, 700] = 1e4, -1e4
    v = normal("grow", 1, 1, 1000, 64)
    out, _ = forward(q, k, v)
    assert torch.equal(out, v[:, :, 300:301].expand_as(out))
    out, _ = forward(-q, k, v)
    assert torch.equal(out, v[:, :, 700:701].expand_as(out))


def test_nan_and_inf_stay_where_they_are():
    q, k, v = (normal(f"nan{i}", 1, 2, 200, 64) for i in range(3))
    clean, _ = forward(q, k, v, is_causal=True)
    bad_q, bad_k = q.clone(), k.clone()
    bad_q[0, 0, 100] = float("nan")
    out, _ = forward(bad_q, k, v, is_causal=True)
    assert out[0, 0, 100].isnan().all()
    rest = torch.ones(200, dtype=torch.bool)
    rest[100] = False
    assert torch.equal(out[0, 0, rest], clean[0, 0, rest]) and torch.equal(out[0, 1], clean[0, 1])
    bad_k[0, 1, 150] = float("nan")
    out, _ = forward(q, bad_k, v, is_causal=True)
    assert torch.equal(out[0, 0], clean[0, 0]) and torch.equal(out[0, 1, :150], clean[0, 1, :150])
    assert out[0, 1, 150:].isnan().all()


def test_rows_and_sides_without_anything():
    for shape_q, shape_k in (((2, 3, 5, 64), (2, 3, 0, 64)), ((2, 3, 0, 64), (2, 3, 5, 64)), ((0, 3, 5, 64), (0, 3, 5, 64))):
        q, k = torch.randn(shape_q).bfloat16(), torch.randn(shape_k).bfloat16()
        out, lse = forward(q, k, k)
        assert out.shape == shape_q and lse.shape == shape_q[:3]
        assert (out == 0).all() and (lse == -INF).all()
    q, k = normal("blind", 1, 2, 300, 64), normal("blind k", 1, 2, 100, 64)
    out, lse = forward(q, k, k, is_causal=True, bottom_right=True)  # the first 200 rows see no key
    assert (out[:, :, :200] == 0).all() and (lse[:, :, :200] == -INF).all() and lse[:, :, 200:].isfinite().all()


# --- large ------------------------------------------------------------------------------------------------------------


def sampled_rows(q, k, v, out, lse, rows, is_causal=False):
    """The rows of the first and last (batch, head) against float64."""
    for b, h in ((0, 0), (q.size(0) - 1, q.size(1) - 1)):
        kv = h // (q.size(1) // k.size(1))
        keep = torch.ones(len(rows), k.size(2), dtype=torch.bool)
        if is_causal:
            keep = torch.arange(k.size(2)) <= torch.tensor(rows)[:, None]
        want, want_lse, _ = attention64(q[b, h, rows].double()[None, None], k[b, kv].double()[None, None],
                                        v[b, kv].double()[None, None], None, keep[None, None], q.size(3) ** -0.5)
        error = (out[b, h, rows].double() - want[0, 0]).abs().max().item()
        assert error < 0.02 * want.abs().max().item() + 1e-4, f"({b}, {h}): error {error}"
        assert (lse[b, h, rows].double() - want_lse[0, 0]).abs().max().item() < 1e-3


@pytest.mark.parametrize("seq", (131072, 1048576))
def test_long_sequences(seq):
    q = normal("long", 1, 1, 4096 if seq > 200_000 else seq, 128)
    k, v = normal("long k", 1, 1, seq, 128), normal("long v", 1, 1, seq, 128)
    out, lse = forward(q, k, v)
    sampled_rows(q, k, v, out, lse, [0, 1, 2000, q.size(2) - 1])
    if q.size(2) == seq:
        out, lse = forward(q, k, v, is_causal=True)
        sampled_rows(q, k, v, out, lse, [0, 1, 127, 128, 65535, 65536, seq - 1], is_causal=True)


def test_more_heads_than_a_grid_axis_holds():
    q, k, v = (normal(f"heads{i}", 700, 96, 17, 64) for i in range(3))  # 67200 > 65535
    out, lse = forward(q, k, v, is_causal=True)
    sampled_rows(q, k, v, out, lse, list(range(17)), is_causal=True)
    want = attention64(*(t[350:352].double() for t in (q, k, v)), None, torch.ones(17, 17, dtype=torch.bool).tril(), 0.125)
    assert (out[350:352].double() - want[0]).abs().max() < 0.03


def test_over_2_to_31_elements():
    q = normal("big", 1, 1, 1000, 128).expand(1, 17, 1000, 128)
    q = q.contiguous()
    k = torch.randn(1, 17, 1_000_000, 128, dtype=torch.bfloat16)  # 2.2e9 elements
    out, lse = forward(q, k, k)
    sampled_rows(q, k, k, out, lse, [0, 500, 999])
    many_q = torch.randn(17, 8, 125_000, 128, dtype=torch.bfloat16)
    few = normal("few", 17, 8, 70, 128)
    out, lse = forward(many_q, few, few)
    sampled_rows(many_q, few, few, out, lse, [0, 62_500, 124_999])


# --- streams, capture, repetition -------------------------------------------------------------------------------------


def test_repeats_are_bitwise_equal_beside_a_busy_stream():
    """An error that moves is a race. Another stream keeps processors busy, so that blocks start in other orders."""
    noise, other = torch.randn(4096, 4096, dtype=torch.bfloat16), torch.cuda.Stream()
    for dim, is_causal, (seq_q, seq) in itertools.product((64, 128, 256), (False, True), ((333, 333), (2048, 2048), (3, 9000))):
        q, k, v = (normal(f"repeat{i}", 2, 8, length, dim) for i, length in enumerate((seq_q, seq, seq)))
        first = forward(q, k, v, is_causal=is_causal)
        for turn in range(40):
            if turn % 2:
                with torch.cuda.stream(other):
                    noise @ noise
            out, lse = forward(q, k, v, is_causal=is_causal)
            assert torch.equal(out, first[0]) and torch.equal(lse, first[1]), f"turn {turn}"
    torch.cuda.synchronize()


def test_captured_and_replayed_with_other_contents():
    for is_causal, seq_q, seq in ((False, 300, 300), (True, 300, 300), (True, 3000, 3000), (False, 1, 9000), (True, 40, 9000)):
        q, k, v = (normal(f"capture{i}", 2, heads, length, 64) for i, (heads, length) in enumerate(((16, seq_q), (4, seq), (4, seq))))
        forward(q, k, v, is_causal=is_causal)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = forward(q, k, v, is_causal=is_causal)
        for turn in range(3):
            for i, t in enumerate((q, k, v)):
                t.copy_(normal(f"replay{turn}{i}", *t.shape))
            graph.replay()
            eager = forward(q, k, v, is_causal=is_causal)  # eager work in between must not disturb the graph's scratch
            assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
            out.fill_(float("nan"))


def test_side_stream_and_no_synchronisation():
    q, k, v = (normal(f"stream{i}", 2, 8, 1000, 128) for i in range(3))
    want = forward(q, k, v, is_causal=True)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = q * 1  # ready only after the sleep, on this stream
            out = forward(late, k, v, is_causal=True)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(out, want)


def test_a_thread_that_has_not_used_the_device():
    q, k, v = (normal(f"thread{i}", 2, 8, 300, 64) for i in range(3))
    want = forward(q, k, v)[0]
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(lambda: forward(q, k, v)[0]).result(), want)


# --- the unchanged call -----------------------------------------------------------------------------------------------


def test_the_unchanged_call_runs_our_kernel():
    q, k, v = (normal(f"call{i}", 2, 8, 300, 64) for i in range(3))
    with torch_flashsdpa.profiler.kernels_run() as kernels:
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.cuda.synchronize()
    assert any("flashsdpa_fwd_sm90" in name for name in kernels), kernels
    assert torch.allclose(out.float(), F.scaled_dot_product_attention(q, k, v, is_causal=True).float(), atol=0.02)


def test_the_output_follows_the_layout_of_the_query():
    q, k, v = (normal(f"layout{i}", 2, 300, 8, 64).transpose(1, 2) for i in range(3))
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        assert F.scaled_dot_product_attention(q, k, v).stride() == q.stride()
        flat = F.scaled_dot_product_attention(q[0], k[0], v[0])
    assert flat.shape == q[0].shape


def test_compiled():
    q, k, v = (normal(f"compiled{i}", 2, 8, 300, 64) for i in range(3))
    compiled = torch.compile(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), fullgraph=True)
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        assert torch.equal(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("change, reason", [
    ({"dtype": torch.float64}, "dtype is float64"),
    ({"dim": 264}, "head_dim is 264"),
])  # fmt: skip
def test_refusals_say_why(change, reason):
    dim, dtype = change.get("dim", 64), change.get("dtype", torch.bfloat16)
    with torch.enable_grad():
        q = torch.randn(1, 2, 70, dim, dtype=dtype)
        k = v = torch.randn(1, 2, 70, dim, dtype=dtype)
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True), pytest.raises(RuntimeError, match=reason):
            F.scaled_dot_product_attention(q, k, v)
        with torch_flashsdpa.sdpa_backend("flashsdpa"):
            F.scaled_dot_product_attention(q, k, v)  # stock serves it


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_tensors_not_the_current_one():
    q, k, v = (normal(f"second{i}", 1, 2, 300, 64).to("cuda:1") for i in range(3))
    out, lse = forward(q, k, v)
    assert out.device == lse.device == q.device
    assert torch.equal(out.cpu(), forward(q.to("cuda:0"), k.to("cuda:0"), v.to("cuda:0"))[0].cpu())


def test_without_a_context_of_its_own():
    """The first CUDA work of a process: the driver's entry points and the context are found then."""
    code = ("import torch, torch_flashsdpa; from torch_flashsdpa._loader import binding; binding();"
            "q = torch.ones(1, 1, 64, 64, device='cuda', dtype=torch.float16);"
            "print(torch.ops.flashsdpa.forward(q, q, q)[0].float().mean().item())")
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == "1.0", answer.stderr
