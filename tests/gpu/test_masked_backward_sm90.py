"""The Hopper backward with a mask: both oracles over kinds, broadcasts, strides, bands, heads, lengths; a fixed order, capture, size."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES, Case, inputs
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import INF, Call, Inputs, check, check_counting, ops, reference, run_sdpa
from test_masks_sm90 import make

import torch_flashsdpa
from torch_flashsdpa._loader import binding

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
CLASSES = (64, 128, 256)
DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def masked(name, mask, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", batch=1, **options):
    """The inputs of a case, and its call. Masks are made on the CPU."""
    case = Case(f"{name}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, call=BANDS[band], **options)
    return replace(inputs(case, "cuda"), mask=make(mask, str(case), (batch, heads[0], *lengths), dtype)), case.call


def hold(*args, **options):
    check(*masked(*args, **options))


def gradients(x, **options):
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out, _ = ops().forward(*leaves, attn_mask=x.mask, **options)
    return torch.autograd.grad(out, leaves, x.grad_out)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_kinds(kind, dtype):
    for dim in CLASSES:
        hold("kinds", kind, dtype=dtype, dims=(dim, dim), lse_grad=dim == 128)
        hold("kinds", kind, dtype=dtype, dims=(dim, dim), lengths=(700, 1100))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims):
    for mask, band in itertools.product(("document", "bias_inf"), ("full", "causal")):
        hold("dims", mask, dims=dims, band=band)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_layouts(axes, strides):
    for kind, dim in itertools.product(("granules", "bias_inf", "bias32"), CLASSES):
        hold("layouts", f"{kind}:{axes or '-'}:{strides}", batch=2, lengths=(130, 300), dims=(dim, dim))


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for mask, dim in itertools.product(("granules", "window", "rows_false", "bias32"), CLASSES):
        hold("bands", mask, lengths=(300, 200), band=band, dims=(dim, dim))


@pytest.mark.parametrize("seq_q", (1, 63, 64, 65, 129, 1000))
def test_lengths(seq_q):
    dims = itertools.cycle(CLASSES)
    for seq_k, mask in itertools.product((1, 63, 64, 65, 129, 1021), ("random", "causal", "bias", "padding:bk")):
        dim = next(dims)
        hold("lengths", mask, heads=(8, 2), lengths=(seq_q, seq_k), batch=2, dims=(dim, dim))


@pytest.mark.parametrize("dim", CLASSES)
@pytest.mark.parametrize("kind", ("random", "granules", "document", "causal", "one_key", "checkerboard", "single_true"))
def test_counting(kind, dim):
    for seq_q, seq_k in ((65, 129), (193, 385), (500, 320)):
        mask = make(kind, f"counting{dim}", (2, 2, seq_q, seq_k), torch.bfloat16)
        for call in (Call(), Call(is_causal=True)):
            for given in (mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
                check_counting(2, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=given, call=call, mask_grad=False)


@pytest.mark.parametrize("dim", CLASSES)
def test_many_tiles(dim):
    """More tiles than processors, and more blocks of queries than there are stages."""
    for mask in ("document:qk", "granules", "bias:qk"):
        hold("tiles", mask, batch=2, heads=(16, 4), lengths=(2048, 2048), dims=(dim, dim))


@pytest.mark.parametrize("dim", CLASSES)
def test_deterministic(dim):
    """The same bits, whichever block comes first: another stream keeps processors busy."""
    noise, other = torch.randn(4096, 4096, dtype=torch.bfloat16), torch.cuda.Stream()
    for mask, band in (("granules", "full"), ("document:qk", "full"), ("window:qk", "causal"), ("random:bk", "full"), ("bias:bq", "causal")):
        x, call = masked("fixed", mask, heads=(8, 4), lengths=(2048, 2048), dims=(dim, dim), band=band, batch=2)
        first = gradients(x, is_causal=call.is_causal, deterministic=True)
        for turn in range(20):
            if turn % 2:
                with torch.cuda.stream(other):
                    noise @ noise
            grads = gradients(x, is_causal=call.is_causal, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(grads, first)), f"{mask}, turn {turn}"
    torch.cuda.synchronize()


def test_repeats_beside_a_busy_stream():
    """dk and dv have one order of additions anyway; dq moves by rounding alone. Anything else is a race."""
    noise, other = torch.randn(4096, 4096, dtype=torch.bfloat16), torch.cuda.Stream()
    for dim, mask in itertools.product(CLASSES, ("granules", "bias_inf:qk", "document:qk")):
        x, _ = masked("repeat", mask, heads=(8, 8), lengths=(1000, 1100), dims=(dim, dim), batch=2)
        first = gradients(x)
        for turn in range(20):
            if turn % 2:
                with torch.cuda.stream(other):
                    noise @ noise
            dq, dk, dv = gradients(x)
            assert torch.equal(dk, first[1]) and torch.equal(dv, first[2]), f"{mask}, turn {turn}"
            assert (dq.float() - first[0].float()).abs().max() <= 2**-7 * first[0].float().abs().max(), f"{mask}, turn {turn}"
    torch.cuda.synchronize()


def test_captured_and_replayed_with_other_masks():
    for mask in ("random", "bias"):
        x, _ = masked("capture", mask, heads=(8, 8), lengths=(300, 300), batch=2)
        out, lse = ops().forward(x.q, x.k, x.v, attn_mask=x.mask)

        def run():
            return ops().backward(x.grad_out, None, x.q, x.k, x.v, out, lse, attn_mask=x.mask, deterministic=True,  # noqa: B023
                                  output_mask=[True] * 3 + [False] * 2)[:3]  # fmt: skip

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for turn in range(3):
            x.mask.copy_(make(mask, f"replay{turn}", x.mask.shape, torch.bfloat16))
            for t, new in zip((out, lse), ops().forward(x.q, x.k, x.v, attn_mask=x.mask)):
                t.copy_(new)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, run()))
            for t in captured:
                t.fill_(float("nan"))


def test_a_plan_alone_and_a_plan_made_before():
    x, _ = masked("plan", "granules", lengths=(300, 333))
    want = gradients(x, deterministic=True)
    plan = ops().mask_plan(x.mask)
    assert all(torch.equal(a, b) for a, b in zip(gradients(x, mask_plan=plan, deterministic=True), want))
    assert all(torch.equal(a, b) for a, b in zip(gradients(replace(x, mask=None), mask_plan=plan, deterministic=True), want))


@pytest.mark.parametrize("dim", (64, 128, 192))
def test_through_sdpa(dim):
    for mask in ("document:qk", "padding:bk", "bias:hqk", "rows_false"):
        x, call = masked("sdpa", mask, batch=2, dims=(dim, dim))
        check(x, call, run=run_sdpa)


def test_the_unchanged_call_runs_our_kernels():
    x, _ = masked("call", "document:qk", heads=(8, 8), lengths=(300, 300))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    with torch_flashsdpa.profiler.kernels_run() as kernels:
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            F.scaled_dot_product_attention(*leaves, attn_mask=x.mask).backward(x.grad_out)
        torch.cuda.synchronize()
    assert sum("flashsdpa_mask_plan_sm90" in kernel for kernel in kernels) >= 1, kernels
    for name in ("flashsdpa_fwd_sm90", "flashsdpa_bwd_pre_sm90", "flashsdpa_bwd_sm90", "flashsdpa_bwd_post_sm90"):
        assert any(name in kernel for kernel in kernels), kernels


def test_compiled():
    x, _ = masked("compiled", "document:qk", heads=(8, 8), lengths=(300, 300))
    results = []
    for call in (F.scaled_dot_product_attention, torch.compile(F.scaled_dot_product_attention, fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            call(*leaves, attn_mask=x.mask).backward(x.grad_out)
        results.append([t.grad for t in leaves])
    assert all((a - b).abs().max() <= 2**-7 * b.abs().max() for a, b in zip(*results))


def test_long_documents():
    """A mask with most granules empty, against our own backward of each document."""
    seq, documents = 8192, 8
    q, k, v, grad_out = (torch.randn(1, 4, seq, 128, dtype=torch.bfloat16) for _ in range(4))
    number = torch.arange(seq) // (seq // documents)
    x = replace(masked("long", "all_true:-")[0], q=q, k=k, v=v, grad_out=grad_out, mask=(number[:, None] == number)[None, None])
    whole = gradients(x, is_causal=True)
    for d in range(documents):
        rows = slice(d * seq // documents, (d + 1) * seq // documents)
        part = replace(x, q=q[:, :, rows], k=k[:, :, rows], v=v[:, :, rows], grad_out=grad_out[:, :, rows], mask=None)
        for got, want in zip(whole, gradients(part, is_causal=True)):
            assert (got[:, :, rows].float() - want.float()).abs().max() <= 2**-6 * want.float().abs().max()


def test_blocks_that_the_plan_rules_out_are_not_read():
    x, _ = masked("skipped", "all_true:-", heads=(2, 2), lengths=(1536, 1536))
    mask = torch.ones(1, 1, 1536, 1536, dtype=torch.bool)
    mask[..., 512:1024] = False
    for given in (mask, torch.zeros_like(mask, dtype=torch.bfloat16).masked_fill_(~mask, -INF)):
        want = gradients(replace(x, mask=given), deterministic=True)
        bad_k, bad_v = x.k.clone(), x.v.clone()
        bad_k[:, :, 640:896], bad_v[:, :, 640:896] = float("nan"), float("nan")
        got = gradients(replace(x, mask=given, k=bad_k, v=bad_v), deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        assert all((grad[:, :, 512:1024] == 0).all() for grad in got[1:])


def test_a_mask_of_more_than_2_to_the_31_elements():
    seq = 49152
    x, _ = masked("huge", "all_true:-", heads=(1, 1), lengths=(seq, seq))
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).tril_()
    assert mask.numel() > 2**31
    for got, want in zip(gradients(replace(x, mask=mask)), gradients(replace(x, mask=None), is_causal=True)):
        assert (got.float() - want.float()).abs().max() <= 2**-6 * want.float().abs().max()


@pytest.mark.parametrize("axes", ("qk", "bk"))
def test_memory_beyond_the_mask_is_one_plan(axes):
    """Forward and backward of the unchanged call, against those of a mask of one element: heads are not expanded."""
    batch, heads, seq = 2, 16, 2048
    x, _ = masked("memory", "all_true:-", heads=(heads, heads), lengths=(seq, seq), batch=batch)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]

    def peak(mask):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            torch.autograd.grad(F.scaled_dot_product_attention(*leaves, attn_mask=mask), leaves, x.grad_out)
        return torch.cuda.max_memory_allocated() - before

    given = make(f"document:{axes}", "memory", (batch, heads, seq, seq), torch.bfloat16)
    bits, lists = given.numel() // 8, 8 * given[..., 0, 0].numel() * (seq // 64 + 1) ** 2
    least = peak(x.mask)
    for mask in (given, given.expand(batch, heads, seq, seq)):
        assert peak(mask) - least <= bits + lists + (1 << 16)


def test_pair_bias_of_five_axes_with_its_gradient():
    """Rows of an alignment as a second batch axis, as in AlphaFold."""
    if not any(entry["name"].startswith("flashsdpa_bwd_mask") for entry in binding().kernel_table()):
        pytest.skip("a build whose masks have no gradient on CUDA")
    for shape in ((1, 1, 2, 130, 130), (1, 5, 1, 1, 130), (1, 5, 2, 130, 130)):
        q, k, v, grad = (torch.randn(1, 5, 2, 130, 64, dtype=torch.bfloat16) for _ in range(4))
        leaves = [t.requires_grad_() for t in (q, k, v, torch.randn(shape, dtype=torch.bfloat16))]
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            grads = torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, grad)
        mask = leaves[3].detach().double().requires_grad_()
        whole = mask.expand(1, 5, 2, 130, 130)[0]
        parts = [t[0].detach() for t in leaves[:3]]
        want = reference(Inputs(*parts, whole.detach(), True, grad_out=grad[0]), Call()).grads
        (dmask,) = torch.autograd.grad(whole, mask, want["dmask"])
        for got, expected in zip(grads, (want["dq"][None], want["dk"][None], want["dv"][None], dmask)):
            assert got.shape == expected.shape
            assert (got.double() - expected).abs().max() <= 2**-6 * expected.abs().max()
