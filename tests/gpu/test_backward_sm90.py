"""The Hopper backward kernels: both oracles over dtypes, head dims, lengths, bands, heads and layouts; a fixed order of
additions, streams, capture, size. Everything is made on the GPU, also the float64 reference."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, GRAD_LAYOUTS, LAYOUTS, Case, inputs
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import INF, Call, Inputs, check, check_counting, generator, ops, run_sdpa

import torch_flashsdpa

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
DIMS = (1, 8, 40, 64, 70, 72, 80, 96, 128, 160, 192, 200, 256)
CLASSES = (64, 96, 128, 192, 256)
MIXED_DIMS = ((192, 128), (128, 192), (64, 256), (256, 64), (96, 33), (5, 70), (64, 1), (1, 64), (0, 8), (24, 0))
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 1000, 1021)
HEADS = ((2, 2), (4, 1), (6, 3), (7, 1))


def poison():
    """NaN in freed blocks of the sizes that outputs and scratch memory of these tests ask for."""
    blocks = [torch.full((floats,), float("nan")) for floats in (2**8, 2**14, 2**17, 2**20, 2**22, 2**24) for _ in range(2)]
    del blocks


def hold(case):
    poison()
    check(inputs(case, "cuda"), case.call)


def normal(name, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator(name), device="cpu").to("cuda", dtype)


def gradients(q, k, v, grad_out, grad_lse=None, **options):
    """(dq, dk, dv) of the op, memory poisoned before."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = ops().forward(*leaves, **options)
    poison()
    outputs = [(out, grad_out)] + ([(lse, grad_lse)] if grad_lse is not None else [])
    return torch.autograd.grad([o for o, _ in outputs], leaves, [g for _, g in outputs])


# --- the oracles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_dims(dim, dtype):
    for band, heads in zip(("full", "causal", "causal_br"), HEADS):
        hold(Case(f"D{dim}-{band}", 2, heads, (200, 300), (dim, dim), dtype, call=BANDS[band], lse_grad=band == "causal"))


@pytest.mark.parametrize("dims", MIXED_DIMS, ids=str)
def test_head_dims_of_q_and_v_differ(dims):
    for band, dtype in itertools.product(("full", "causal"), HALVES):
        hold(Case(f"D{dims}-{band}", 2, (4, 2), (300, 200), dims, dtype, call=BANDS[band], lse_grad=True))


@pytest.mark.parametrize("seq_q", LENGTHS)
def test_lengths(seq_q):
    dims, dtypes, heads = itertools.cycle(DIMS[3:]), itertools.cycle(HALVES), itertools.cycle(HEADS)
    for seq_k, band in itertools.product(LENGTHS, ("full", "causal", "causal_br")):
        dim = next(dims)
        hold(Case(f"{seq_q}x{seq_k}-{band}", 1, next(heads), (seq_q, seq_k), (dim, dim), next(dtypes), call=BANDS[band]))


@pytest.mark.parametrize("dim", CLASSES)
def test_4096(dim):
    for band, dtype in zip(("full", "causal", "window_64_63"), (*HALVES, torch.bfloat16)):
        hold(Case(f"4096-{band}", 1, (2, 1), (4096, 4096), (dim, dim), dtype, call=BANDS[band]))


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for (seq_q, seq_k), dim in itertools.product(((300, 200), (200, 300), (129, 700), (700, 129)), (64, 80, 128, 192)):
        hold(Case(f"{band}-{seq_q}x{seq_k}", 1, (4, 2), (seq_q, seq_k), (dim, dim), torch.bfloat16, call=BANDS[band],
                  lse_grad=dim == 80))


@pytest.mark.parametrize("scale", (0.3, -0.5, 0.0, 3.0, -1e-3))
def test_scales(scale):
    for band, dim in itertools.product(("full", "causal"), (64, 128, 256)):
        hold(Case(f"scale{scale}-{band}", 1, (2, 2), (200, 300), (dim, dim), torch.float16,
                  call=replace(BANDS[band], scale=scale)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Also those that TMA cannot read or write: odd offsets, odd strides; mixed with some that it can."""
    for dim, band in itertools.product((64, 70, 128, 192), ("full", "causal")):
        for layouts in ((layout,) * 3, ("bsh", layout, "bhs"), (layout, "bhs", "packed")):
            case = Case(f"{layouts}-{band}", 2, (4, 2), (130, 200), (dim, dim), torch.bfloat16, call=BANDS[band], layout=layouts)
            hold(case)


@pytest.mark.parametrize("grad", [name for name in GRAD_LAYOUTS if name])
def test_layouts_of_grad_out(grad):
    for dim in (64, 70, 128, 256):
        hold(Case(f"grad-{grad}", 2, (4, 2), (130, 200), (dim, dim), torch.bfloat16, call=BANDS["causal"], grad=grad))


@pytest.mark.parametrize("dim", (64, 128))
def test_gradient_of_a_sum_and_of_a_mean(dim):
    """Cotangents of stride 0 in all axes."""
    x = inputs(Case("sum", 2, (4, 2), (300, 200), (dim, dim), torch.bfloat16), "cuda")
    for value in (1.0, 0.25):
        check(replace(x, grad_out=torch.full((1, 1, 1, 1), value, dtype=torch.bfloat16).expand_as(x.grad_out)))


def test_gradient_of_lse_alone():
    for dim in (64, 192):
        x = inputs(Case("lse", 1, (4, 2), (200, 300), (dim, dim), torch.bfloat16, lse_grad=True), "cuda")
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        _, lse = ops().forward(q, k, v, is_causal=True)
        dq, dk, dv = torch.autograd.grad(lse, (q, k, v), x.grad_lse, allow_unused=True)
        assert dv is None or (dv == 0).all()
        both = gradients(q, k, v, torch.zeros_like(x.grad_out), x.grad_lse, is_causal=True)
        assert (dq - both[0]).abs().max() <= 2**-8 * dq.abs().max() and torch.equal(dk, both[1])


@pytest.mark.parametrize("dim", (64, 72, 96, 128, 160, 192, 256))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_counting(dim, dtype):
    """Every (query, key) pair, around the edges of tiles of 64 and 128 queries and 80 to 128 keys."""
    for seq_q, seq_k in ((1, 1), (65, 63), (127, 129), (193, 385), (257, 320)):
        for band in (Call(), Call(is_causal=True), Call(is_causal=True, bottom_right=True), Call(window=(70, 3))):
            check_counting(1, 4, 2, seq_q, seq_k, dim, dtype, call=band)


def test_counting_of_many_tiles():
    """More tiles than processors: none is lost or done twice."""
    for dim, band in itertools.product((64, 128), ("full", "causal_br")):
        check_counting(3, 14, 14, 500, 400, dim, torch.bfloat16, call=BANDS[band])


# --- numbers that are special -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", (1e2, 1e4))
def test_large_scores(magnitude):
    for dim in (64, 128, 192):
        x = inputs(Case(f"large{magnitude}{dim}", 1, (2, 2), (200, 300), (dim, dim), torch.bfloat16), "cuda")
        check(replace(x, q=(x.q * magnitude).bfloat16()))


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("magnitude", (1e3, 133120.0, 1e18))
def test_equal_scores_of_any_magnitude(sign, magnitude):
    """dv is the mean of grad_out; keys that fill a block up, and rows that do, add nothing."""
    for dim, seq_k, dtype in ((64, 300, torch.bfloat16), (128, 700, torch.bfloat16), (256, 300, torch.bfloat16)):
        q = torch.full((1, 1, 65, dim), sign * magnitude, dtype=dtype)
        k, v = torch.full((1, 1, seq_k, dim), magnitude, dtype=dtype), normal("equal", 1, 1, seq_k, dim, dtype=dtype)
        grad_out = normal("equal grad", 1, 1, 65, dim, dtype=dtype)
        dq, dk, dv = gradients(q, k, v, grad_out)
        assert dv.isfinite().all()
        if magnitude <= 1e3:
            assert dq.isfinite().all() and dk.isfinite().all()
            want = grad_out.double().sum(2, keepdim=True) / seq_k
            assert (dv.double() - want).abs().max() < 0.1 * want.abs().max()


@pytest.mark.parametrize("magnitude", (2.0, 20.0))
@pytest.mark.parametrize("dim", (64, 128, 192))
def test_very_negative_lse(dim, magnitude):
    """All scores far below 0: a key that fills a block up would weigh e^1600 or more if it were not removed."""
    q = torch.full((1, 1, 70, dim), 10 * magnitude, dtype=torch.bfloat16)
    x = Inputs(q, -q[:, :, :67], normal("negative", 1, 1, 67, dim), grad_out=normal("negative grad", 1, 1, 70, dim))
    for scale in (None, 0.0625):
        grads = gradients(x.q, x.k, x.v, x.grad_out, scale=scale)
        assert all(g.isfinite().all() for g in grads)
        want = x.grad_out.double().sum(2, keepdim=True) / 67
        assert (grads[2].double() - want).abs().max() < 0.02 * want.abs().max()


def test_one_query():
    for dim, seq_k in itertools.product(CLASSES, (1, 63, 1000)):
        hold(Case(f"one-{dim}", 2, (4, 2), (1, seq_k), (dim, dim), torch.bfloat16, lse_grad=True))


def test_rows_and_sides_without_anything():
    for shape_q, shape_k in (((2, 3, 5, 64), (2, 3, 0, 64)), ((2, 3, 0, 64), (2, 3, 5, 64)), ((0, 3, 5, 64), (0, 3, 5, 64))):
        q, k = torch.randn(shape_q).bfloat16(), torch.randn(shape_k).bfloat16()
        assert all((g == 0).all() and g.shape == t.shape for g, t in zip(gradients(q, k, k, torch.ones_like(q)), (q, k, k)))
    for dim in CLASSES:
        hold(Case(f"blind-{dim}", 1, (2, 2), (300, 100), (dim, dim), torch.bfloat16, call=BANDS["causal_br"], lse_grad=True))
        hold(Case(f"unseen-{dim}", 1, (2, 2), (100, 300), (dim, dim), torch.bfloat16, call=BANDS["causal"], lse_grad=True))


# --- a fixed order of additions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_mode", (False, True), ids=("argument", "mode"))
@pytest.mark.parametrize("dim", (*CLASSES, 70))
def test_deterministic(dim, by_mode):
    """The same bits, whichever block comes first: another stream keeps processors busy."""
    noise, other = torch.randn(4096, 4096, dtype=torch.bfloat16), torch.cuda.Stream()
    torch.use_deterministic_algorithms(by_mode, warn_only=True)  # the oracle's matrix products only warn
    try:
        for is_causal, seq in itertools.product((False, True), (333, 2048)):
            q, grad_out = normal("fixed q", 2, 8, seq, dim), normal("fixed g", 2, 8, seq, dim)
            k, v = normal("fixed k", 2, 4, seq, dim), normal("fixed v", 2, 4, seq, dim)
            run = lambda: gradients(q, k, v, grad_out, is_causal=is_causal, deterministic=not by_mode)  # noqa: E731, B023
            first = run()
            for turn in range(200):
                if turn % 2:
                    with torch.cuda.stream(other):
                        noise @ noise
                assert all(torch.equal(a, b) for a, b in zip(run(), first)), f"turn {turn}"
            torch.cuda.synchronize()
            hold(Case(f"fixed-{dim}-{seq}", 1, (4, 2), (seq, seq), (dim, dim), torch.bfloat16, call=Call(is_causal=is_causal)))
    finally:
        torch.use_deterministic_algorithms(False)


# --- streams, capture, repetition, size -------------------------------------------------------------------------------


def test_repeats_beside_a_busy_stream():
    """dk and dv have one order of additions anyway; dq moves by rounding alone. Anything else is a race."""
    noise, other = torch.randn(4096, 4096, dtype=torch.bfloat16), torch.cuda.Stream()
    for dim, is_causal, seq in itertools.product(CLASSES, (False, True), (333, 2048)):
        q, k, v, grad_out = (normal(f"repeat{i}", 2, 8, seq, dim) for i in range(4))
        first = gradients(q, k, v, grad_out, is_causal=is_causal)
        for turn in range(20):
            if turn % 2:
                with torch.cuda.stream(other):
                    noise @ noise
            dq, dk, dv = gradients(q, k, v, grad_out, is_causal=is_causal)
            assert torch.equal(dk, first[1]) and torch.equal(dv, first[2]), f"turn {turn}"
            assert (dq.float() - first[0].float()).abs().max() <= 2**-7 * first[0].float().abs().max(), f"turn {turn}"
    torch.cuda.synchronize()


@pytest.mark.parametrize("deterministic", (False, True))
def test_captured_and_replayed_with_other_contents(deterministic):
    for is_causal, seq, dim in ((False, 300, 64), (True, 300, 192), (True, 2000, 128)):
        q, k, v, grad_out = (normal(f"capture{i}", 2, 16, seq, dim) for i in range(4))
        out, lse = ops().forward(q, k, v, is_causal=is_causal)

        def run():
            return ops().backward(grad_out, None, q, k, v, out, lse, is_causal=is_causal, deterministic=deterministic,  # noqa: B023
                                  output_mask=[True] * 3 + [False] * 2)[:3]  # fmt: skip

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for turn in range(3):
            for i, t in enumerate((q, k, v, grad_out)):
                t.copy_(normal(f"replay{turn}{i}", *t.shape))
            for t, new in zip((out, lse), ops().forward(q, k, v, is_causal=is_causal)):
                t.copy_(new)
            graph.replay()
            eager = run()  # eager work in between must not disturb the graph's scratch
            for a, b in zip(captured, eager):
                assert torch.equal(a, b) if deterministic else (a - b).abs().max() <= 2**-7 * b.abs().max()
            for t in captured:
                t.fill_(float("nan"))


def test_side_stream_and_no_synchronisation():
    q, k, v, grad_out = (normal(f"stream{i}", 2, 8, 1000, 128) for i in range(4))
    want = gradients(q, k, v, grad_out, is_causal=True, deterministic=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = (q * 1).requires_grad_()  # ready only after the sleep, on this stream
            out, _ = ops().forward(late, k, v, is_causal=True, deterministic=True)
            (dq,) = torch.autograd.grad(out, late, grad_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(dq, want[0])


def test_scratch_is_linear_in_the_length():
    used = []
    for seq in (4096, 8192, 16384):
        q, k, v, grad_out = (normal(f"linear{i}", 1, 4, seq, 128) for i in range(4))
        out, lse = ops().forward(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ops().backward(grad_out, None, q, k, v, out, lse, output_mask=[True] * 3 + [False] * 2)
        used.append(torch.cuda.max_memory_allocated() - before)
    assert used[2] < 4.5 * used[0], used


def test_grouped_heads_are_not_expanded():
    q, grad_out = normal("group q", 1, 32, 2048, 128), normal("group g", 1, 32, 2048, 128)
    k, v = normal("group k", 1, 1, 2048, 128), normal("group v", 1, 1, 2048, 128)
    out, lse = ops().forward(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops().backward(grad_out, None, q, k, v, out, lse, output_mask=[True] * 3 + [False] * 2)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 3.3 * q.numel() * 2, f"{used / q.nbytes:.2f} times q"  # dq and its sum in float32, and little more


def sampled(q, k, v, grad_out, grads, rows, is_causal):
    """dq of some rows, and dk and dv of some keys, of the first and last (batch, head), against float64."""
    dq, dk, dv = grads
    for b, h in ((0, 0), (q.size(0) - 1, q.size(1) - 1)):
        wide = [t[b : b + 1, h : h + 1].double() for t in (q, k, v, grad_out)]
        scores = wide[0] @ wide[1].mT * q.size(3) ** -0.5
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -INF)
        p = scores.softmax(-1)
        slope = wide[3] @ wide[2].mT
        ds = p * (slope - (p * slope).sum(-1, keepdim=True)) * q.size(3) ** -0.5
        for got, want in ((dq, ds @ wide[1]), (dk, ds.mT @ wide[0]), (dv, p.mT @ wide[3])):
            error = (got[b, h, rows].double() - want[0, 0, rows]).abs().max()
            assert error < 0.02 * want.abs().max(), f"({b}, {h}): error {error}"


def test_long_sequence():
    q, k, v, grad_out = (normal(f"long{i}", 1, 1, 16384, 128) for i in range(4))
    for is_causal in (False, True):
        grads = gradients(q, k, v, grad_out, is_causal=is_causal)
        sampled(q, k, v, grad_out, grads, [0, 1, 127, 128, 8191, 8192, 16383], is_causal)


def test_more_heads_than_a_grid_axis_holds():
    q, k, v, grad_out = (normal(f"heads{i}", 700, 96, 17, 64) for i in range(4))  # 67200 > 65535
    sampled(q, k, v, grad_out, gradients(q, k, v, grad_out, is_causal=True), list(range(17)), True)


def test_over_2_to_31_elements():
    q, k, v, grad_out = (torch.randn(17, 8, seq, 128, dtype=torch.bfloat16) for seq in (125_000, 70, 70, 125_000))
    dq, dk, dv = gradients(q, k, v, grad_out)
    b, h = 16, 7
    wide = [t[b, h].double().requires_grad_() for t in (q, k, v)]
    out = (wide[0] @ wide[1].T * 128**-0.5).softmax(-1) @ wide[2]
    for got, want in zip((dq, dk, dv), torch.autograd.grad(out, wide, grad_out[b, h].double())):
        assert (got[b, h].double() - want).abs().max() < 0.02 * want.abs().max()


# --- the unchanged call -----------------------------------------------------------------------------------------------


def test_the_unchanged_call_runs_our_kernels():
    x = inputs(Case("call", 2, (8, 8), (300, 300), (64, 64), torch.bfloat16), "cuda")
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    with torch_flashsdpa.profiler.kernels_run() as kernels:
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            F.scaled_dot_product_attention(*leaves, is_causal=True).backward(x.grad_out)
        torch.cuda.synchronize()
    for name in ("flashsdpa_fwd_sm90", "flashsdpa_bwd_pre_sm90", "flashsdpa_bwd_sm90", "flashsdpa_bwd_post_sm90"):
        assert any(name in kernel for kernel in kernels), kernels


@pytest.mark.parametrize("dim", (64, 96, 128, 192, 256))
def test_through_sdpa(dim):
    for is_causal, heads in ((False, (4, 2)), (True, (2, 2))):
        case = Case(f"sdpa-{dim}", 2, heads, (200, 300), (dim, dim), torch.bfloat16, call=Call(is_causal=is_causal))
        check(inputs(case, "cuda"), case.call, run=run_sdpa)


def test_the_first_work_of_autograds_thread():
    """That thread has no CUDA context before; the memory comes from the caches, so nothing else makes one."""
    code = ("import torch; from torch_flashsdpa._loader import binding; binding(); x = torch.empty(2**26, device='cuda'); del x;"
            "q = torch.ones(1, 1, 64, 64, device='cuda', dtype=torch.float16, requires_grad=True);"
            "torch.ops.flashsdpa.forward(q, q, q)[0].backward(torch.ones_like(q)); print(q.grad.float().mean().item())")
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == "1.0", answer.stderr


def test_gradients_follow_the_layout_of_their_inputs():
    q, k, v = (normal(f"layout{i}", 2, 300, 8, 64).transpose(1, 2).requires_grad_() for i in range(3))
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert all(t.grad.stride() == t.stride() for t in (q, k, v))


def test_compiled():
    x = inputs(Case("compiled", 2, (8, 8), (300, 300), (64, 64), torch.bfloat16), "cuda")
    results = []
    for call in (F.scaled_dot_product_attention, torch.compile(F.scaled_dot_product_attention, fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            call(*leaves, is_causal=True).backward(x.grad_out)
        results.append([t.grad for t in leaves])
    assert all((a - b).abs().max() <= 2**-7 * b.abs().max() for a, b in zip(*results))
