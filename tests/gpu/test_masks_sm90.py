"""The Hopper forward with a mask: both oracles over kinds, broadcasts, strides, bands, heads, lengths; size, capture, streams."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES, Case, inputs, make_mask, placed
from hopper import needs_hopper, on_the_gpu  # noqa: F401
from oracle import INF, Call, Inputs, check, check_counting, generator, ops, reference
from test_compile import banded

import torch_flashsdpa

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def make(mask, name, shape, dtype):
    with torch.device("cpu"):
        return placed(make_mask(mask, name, shape, dtype), "cuda")


def hold(name, mask, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", batch=1):
    case = Case(f"{name}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, call=BANDS[band], grad="")
    x = inputs(case, "cuda")
    x.mask = make(mask, str(case), (batch, heads[0], *lengths), dtype)
    check(x, case.call)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_kinds(kind, dtype):
    hold("kinds", kind, dtype=dtype)
    hold("kinds", kind, dtype=dtype, lengths=(700, 1100), dims=(128, 128))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims):
    for mask, band in itertools.product(("document", "bias_inf"), ("full", "causal")):
        hold("dims", mask, dims=dims, band=band)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_layouts(axes, strides):
    for kind in ("granules", "bias_inf"):
        hold("layouts", f"{kind}:{axes or '-'}:{strides}", batch=2, lengths=(130, 300))


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for mask in ("granules", "window", "rows_false"):
        hold("bands", mask, lengths=(300, 200), band=band)


@pytest.mark.parametrize("seq_q", (1, 5, 63, 64, 65, 129, 1000))
def test_lengths(seq_q):
    for seq_k, mask in itertools.product((1, 63, 64, 65, 129, 1021), ("random", "causal", "bias", "padding:bk")):
        hold("lengths", mask, heads=(8, 2), lengths=(seq_q, seq_k), batch=2)


@pytest.mark.parametrize("seq_q", (1, 4, 16, 64))
@pytest.mark.parametrize("mask", ("padding:bk", "random", "bias", "random:bqk"))
def test_few_queries_on_long_keys(mask, seq_q):
    """Keys are split, and heads packed where one mask is for all."""
    for dim, batch in ((64, 1), (128, 4), (256, 1)):
        hold("few", mask, heads=(8, 2), lengths=(seq_q, 3000), dims=(dim, dim), batch=batch)


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("kind", ("random", "granules", "document", "causal", "one_key", "checkerboard", "single_true"))
def test_counting(kind, dim):
    for seq_q, seq_k in ((65, 129), (193, 385), (500, 320)):
        mask = make(kind, f"counting{dim}", (2, 2, seq_q, seq_k), torch.bfloat16)
        for call in (Call(), Call(is_causal=True)):
            for given in (mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
                check_counting(2, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=given, call=call, backward=False)


def test_bad_numbers_of_removed_keys():
    x = inputs(Case("bad", 1, (2, 2), (130, 260), (64, 64), torch.bfloat16, grad=""), "cuda")
    keep = torch.ones(1, 1, 130, 260, dtype=torch.bool)
    keep[..., 64:140] = False
    keep[..., 200] = False
    bias = torch.randn(1, 1, 130, 260).bfloat16().masked_fill_(~keep, -INF)
    bad = x.k.clone()
    bad[:, :, 64:140], bad[:, :, 200] = float("nan"), INF
    for mask in (keep, bias):
        want, got = (ops().forward(x.q, k, x.v, attn_mask=mask) for k in (x.k, bad))
        # Not bit for bit: a row's bad numbers may make it take another reference.
        assert all((a.float() - b.float()).abs().max() <= 2**-7 for a, b in zip(got, want))


def test_a_changed_mask_is_seen():
    """In place, in a graph's static input, and as another slice of one tensor."""
    g = generator("changed")
    q, k, v = (torch.randn(1, 2, 300, 64, generator=g, device="cpu").bfloat16().cuda() for _ in range(3))
    masks = (torch.rand(4, 1, 300, 300, generator=g, device="cpu") < 0.5).cuda()

    def want(mask):
        with torch_flashsdpa.sdpa_backend("stock"):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)

    static = masks[0].clone()
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        for mask in masks:
            static.copy_(mask)
            for given in (static, mask):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
                assert (out.float() - want(mask)).abs().max() < 0.03
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=static)
        for mask in masks:
            F.scaled_dot_product_attention(q, k, v, attn_mask=masks[0])  # eager work in between
            static.copy_(mask)
            graph.replay()
            assert (out.float() - want(mask)).abs().max() < 0.03


def qkv(name, seq=300):
    g = generator(name)
    return [torch.randn(1, 2, seq, 64, generator=g, device="cpu").bfloat16().cuda() for _ in range(3)]


def sees(q, k, v, mask):
    """The unchanged call gives what the mask says now."""
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert (out.double() - reference(Inputs(q, k, v, mask), Call()).out).abs().max() < 0.03


@pytest.mark.parametrize("additive", (False, True), ids=("bool", "additive"))
def test_a_mask_changed_in_inference_mode_is_seen(additive):
    q, k, v = qkv("inference")
    masks = [make("document", f"inference{turn}", (1, 2, 300, 300), torch.bfloat16) for turn in range(3)]
    if additive:
        masks = [torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF) for mask in masks]
    with torch.inference_mode():
        mask = masks[0].clone()
        for new in masks:
            mask.copy_(new)
            sees(q, k, v, mask)


def test_another_tensor_in_the_memory_of_an_old_mask():
    """The same address, sizes, strides and version, as an allocator gives them; other contents."""
    q, k, v = qkv("memory")
    memory, seen = torch.empty(1, 1, 300, 300, dtype=torch.bool), set()
    for kind in ("causal", "random", "document"):
        memory.copy_(make(kind, "memory", (1, 1, 300, 300), torch.bfloat16))
        mask = torch.empty(0, dtype=torch.bool).set_(memory.untyped_storage(), 0, memory.shape, memory.stride())
        seen.add((mask.data_ptr(), mask._version))
        sees(q, k, v, mask)
    assert len(seen) == 1


def test_an_eager_call_between_capture_and_first_replay():
    """On the very mask of the graph: what the capture recorded has not run yet, and what it will write is the graph's own."""
    q, k, v = qkv("between")
    masks = [make("random", f"between{turn}", (1, 1, 300, 300), torch.bfloat16) for turn in range(3)]
    static = masks[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True), torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=static)
    for mask in masks:
        sees(q, k, v, static)
        static.copy_(mask)
        graph.replay()
        assert (out.double() - reference(Inputs(q, k, v, mask), Call()).out).abs().max() < 0.03


def test_masks_in_a_buffer_that_inductor_reuses():
    x = qkv("reused")[0]
    compiled = torch.compile(banded, fullgraph=True)
    for widths in ((3, 100, 30), (300, 1, 64), (30, 3, 100)):
        widths = [torch.tensor(n) for n in widths]
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            out = compiled(x, widths)
        with torch_flashsdpa.sdpa_backend("stock"):
            want = banded(x.float(), widths)
        assert (out.float() - want).abs().max() < 0.05


def test_masks_of_a_producer_that_is_replayed_from_a_graph():
    """Compiled with "reduce-overhead": every mask lies at one address, and no version counts its changes."""
    q, k, v = qkv("producer")

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def producer(width):
        positions = torch.arange(300, device=width.device)
        return (positions[:, None] - positions).abs() < width

    addresses = []
    for n in (3, 100, 30, 1, 64, 300):
        torch.compiler.cudagraph_mark_step_begin()
        mask = producer(torch.tensor(n))
        addresses.append(mask.data_ptr())
        sees(q, k, v, mask)
    assert len(set(addresses)) < len(addresses)


def test_nan_and_infinity_in_the_mask_or_the_query():
    """A NaN at an allowed score, or a bias of +inf, spoils its row, and no other."""
    for dtype in HALVES:
        x = inputs(Case("nan", 1, (2, 2), (200, 300), (64, 64), dtype, grad=""), "cuda")
        x.mask = make("bias:qk", "nan", (1, 2, 200, 300), dtype)
        x.mask[..., 3, 2] = float("nan")
        x.mask[..., 4, :] = -INF
        x.mask[..., 5, 1] = INF
        x.q[:, :, 7] = float("nan")
        out = ops().forward(x.q, x.k, x.v, attn_mask=x.mask)[0]
        assert out.isnan().any(-1)[0, 0].nonzero().flatten().tolist() == [3, 5, 7] and (out[:, :, 4] == 0).all()


def test_blocks_that_the_plan_rules_out_are_not_read():
    q, k, v = qkv("skipped", 1536)
    mask = torch.ones(1, 1, 1536, 1536, dtype=torch.bool)
    mask[..., 512:1024] = False
    for given in (mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
        want = ops().forward(q, k, v, attn_mask=given)
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, 640:896], bad_v[:, :, 640:896] = float("nan"), float("nan")
        assert all(torch.equal(a, b) for a, b in zip(ops().forward(q, bad_k, bad_v, attn_mask=given), want))


@pytest.mark.parametrize("axes", ("qk", "bk", "bqk", "q"))
@pytest.mark.parametrize("expanded", (False, True), ids=("size 1", "stride 0"))
def test_memory_beyond_the_mask_is_a_bit_for_each_element_as_given(axes, expanded):
    """Broadcast axes are not expanded, written as size 1 or as stride 0; nothing is unpadded either."""
    batch, heads, seq = 2, 16, 2048
    q, k, v = (torch.randn(batch, heads, seq, 64, dtype=torch.bfloat16) for _ in range(3))
    given = make(f"document:{axes}", "memory", (batch, heads, seq, seq), torch.bfloat16)
    mask = given.expand(batch, heads, seq, seq) if expanded else given
    bits = given.numel() // 8 * (128 if given.size(3) == 1 else 1)  # one key takes the 16 bytes of two granules
    lists = 8 * given[..., 0, 0].numel() * (seq // 64 + 1) ** 2
    results = 2 * q.numel() + 4 * q.numel() // 64
    for call in (F.scaled_dot_product_attention, torch_flashsdpa.attention):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            call(q, k, v, attn_mask=mask)
        assert torch.cuda.max_memory_allocated() - before <= results + bits + lists + (1 << 16)


def test_exported():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = qkv("exported")
    for kind in ("document:qk", "bias_inf"):
        mask = make(kind, "exported", (1, 2, 300, 300), torch.bfloat16)
        torch_flashsdpa.enable("flashsdpa")
        with torch_flashsdpa.route_in_export():
            program = torch.export.export(Attend(), (q, k, v, mask)).run_decompositions()
        torch_flashsdpa.disable()
        assert "flashsdpa.forward" in str(program.graph)
        want = reference(Inputs(q, k, v, mask), Call()).out
        assert (program.module()(q, k, v, mask).double() - want).abs().max() < 0.03


def test_plans_of_the_user():
    """By plan_mask beside its mask, and from a predicate alone."""
    q, k, v = qkv("user")
    mask = make("document:qk", "user", (1, 2, 300, 300), torch.bfloat16)
    plan = torch_flashsdpa.plan_mask(mask)
    want = torch_flashsdpa.attention(q, k, v, attn_mask=mask)
    for given in (mask, None):
        assert torch.equal(torch_flashsdpa.attention(q, k, v, attn_mask=given, mask_plan=plan), want)
    window = torch_flashsdpa.plan_mask_fn(lambda b, h, q, k: (q - k).abs() < 40, 1, 1, 300, 300, device="cuda")
    positions = torch.arange(300)
    out = torch_flashsdpa.attention(q, k, v, mask_plan=window)
    assert torch.equal(out, torch_flashsdpa.attention(q, k, v, attn_mask=(positions[:, None] - positions).abs() < 40))


def test_explain_tells_shares_and_cost_of_the_plan():
    q, k, v = qkv("explain", 1024)
    mask = torch.ones(1024, 1024, dtype=torch.bool).tril()
    shares = torch_flashsdpa.explain(q, k, v, mask, backend="flashsdpa").plan()
    assert shares.counts == {"empty": 120, "full": 120, "mixed": 16}
    assert 0 < shares.seconds < 1 and shares.bytes >= mask.numel() / 8


def test_a_bias_of_five_axes():
    """Rows of an alignment as a second batch axis: a pair bias for all rows by head, a padding for each row, both."""
    q, k, v = (torch.randn(1, 5, 2, 130, 64, dtype=torch.bfloat16) for _ in range(3))
    for shape in ((1, 1, 2, 130, 130), (1, 5, 1, 1, 130), (1, 5, 2, 130, 130)):
        bias = torch.randn(shape, dtype=torch.bfloat16)
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        want = reference(Inputs(q[0], k[0], v[0], bias.expand(1, 5, 2, 130, 130)[0]), Call()).out
        assert (out[0].double() - want).abs().max() < 0.03


def test_a_mask_of_more_than_2_to_the_31_elements():
    seq = 49152
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).tril_()
    assert mask.numel() > 2**31
    q, k, v = (torch.randn(1, 1, seq, 64).bfloat16() for _ in range(3))
    out, lse = ops().forward(q, k, v, attn_mask=mask)
    want, want_lse = ops().forward(q, k, v, is_causal=True)
    assert (out.float() - want.float()).abs().max() < 0.02 and (lse - want_lse).abs().max() < 1e-4


def test_the_profiler_names_both_kernels():
    q, k, v = (torch.randn(1, 2, 256, 64).bfloat16() for _ in range(3))
    mask = torch.rand(1, 1, 256, 256) < 0.5
    ops().forward(q, k, v, attn_mask=mask)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops().forward(q, k, v, attn_mask=mask)
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profile.events())
    assert "flashsdpa_mask_plan_sm90" in names and "flashsdpa_fwd_sm90" in names
