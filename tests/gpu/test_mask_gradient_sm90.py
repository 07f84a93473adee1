"""The gradient of an additive mask on Hopper: float64 over broadcasts, strides, dtypes, bands, heads, lengths; the same bits twice;
only the mask needs it; capture; memory."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import BANDS, BROADCASTS, MASK_STRIDES, Case, inputs
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import Call, attention64, check, check_counting, keep_of, ops, run_op, run_sdpa
from test_masks_sm90 import make

import torch_flashsdpa

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
CLASSES = (64, 128, 256)
DIMS = ((64, 64), (33, 20), (96, 96), (128, 128), (192, 128), (256, 256))
KINDS = ("bias", "bias32", "bias_inf", "zeros", "all_inf", "lowest")


def biased(name, mask, heads=(4, 2), lengths=(200, 333), dims=(64, 64), dtype=torch.bfloat16, band="full", batch=2, **options):
    """The inputs of a case, and its call. Masks are made on the CPU."""
    case = Case(f"{name}-{mask}-{dims}-{band}", batch, heads, lengths, dims, dtype, mask_grad=True, call=BANDS[band], **options)
    return replace(inputs(case, "cuda"), mask=make(mask, str(case), (batch, heads[0], *lengths), dtype), mask_grad=True), case.call


def hold(*args, run=run_op, **options):
    """Right, and exactly 0 where no score takes part."""
    x, call = biased(*args, **options)
    got = check(x, call, run)
    keep = keep_of(x, call).expand(x.q.size(0), x.q.size(1), -1, -1)
    assert (got.grads["dmask"][~(keep.long().sum_to_size(x.mask.shape) > 0)] == 0).all(), "a removed score has a gradient"


def mask_gradient(x, **options):
    mask = x.mask.detach().requires_grad_()
    out, _ = ops().forward(x.q, x.k, x.v, attn_mask=mask, **options)
    return torch.autograd.grad(out, mask, x.grad_out)[0]


@pytest.mark.parametrize("dim", CLASSES)
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_broadcasts(axes, dim):
    for band, lengths in itertools.product(("full", "causal"), ((130, 201), (700, 1100))):
        hold("broadcasts", f"bias_inf:{axes or '-'}", lengths=lengths, dims=(dim, dim), band=band)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, dtype):
    for axes, dim in itertools.product(("bhqk", "hqk", "qk", "bk", "q"), CLASSES):
        hold("kinds", f"{kind}:{axes}", dims=(dim, dim), dtype=dtype, lse_grad=dim == 128)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
def test_strides(strides):
    for axes, kind in (("hqk", "bias_inf"), ("bk", "bias32"), ("q", "bias"), ("bhqk", "bias")):
        hold("strides", f"{kind}:{axes}:{strides}", heads=(2, 1), lengths=(130, 200))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims):
    for axes, band in itertools.product(("hqk", "k"), ("full", "causal")):
        hold("dims", f"bias:{axes}", dims=dims, band=band)


@pytest.mark.parametrize("band", BANDS)
def test_bands(band):
    for axes, lengths in itertools.product(("qk", "k", "q", "h"), ((300, 200), (129, 500))):
        hold("bands", f"bias_inf:{axes}", lengths=lengths, band=band)


@pytest.mark.parametrize("seq_q", (1, 63, 65, 129, 1000))
def test_lengths(seq_q):
    dims, axes = itertools.cycle(CLASSES), itertools.cycle(("bhqk", "qk", "bhk", "q", "h"))
    for seq_k, kind in itertools.product((1, 63, 64, 65, 129, 1021), ("bias", "bias_inf")):
        dim = next(dims)
        hold("lengths", f"{kind}:{next(axes)}", heads=(8, 2), lengths=(seq_q, seq_k), dims=(dim, dim))


@pytest.mark.parametrize("axes", ("hqk", "qk", "bk", "hq", "bh"))
def test_through_sdpa(axes):
    for dim, band in itertools.product((64, 128, 192), ("full", "causal")):
        hold("sdpa", f"bias:{axes}", heads=(8, 8), lengths=(500, 500), dims=(dim, dim), band=band, run=run_sdpa)


@pytest.mark.parametrize("dim", (64, 70, 192))
def test_tensors_that_tma_cannot_reach(dim):
    for axes in ("hqk", "k"):
        hold("plain", f"bias:{axes}", lengths=(130, 200), dims=(dim, dim), layout=("offset", "bhs", "offset"))


@pytest.mark.parametrize("dim", CLASSES)
def test_counting(dim):
    for kind, (seq_q, seq_k) in (("random", (193, 385)), ("granules", (500, 320)), ("causal", (65, 129))):
        keep = make(kind, f"counting{dim}", (2, 2, seq_q, seq_k), torch.bfloat16)
        mask = torch.zeros_like(keep, dtype=torch.bfloat16).masked_fill_(~keep, -float("inf"))
        for call in (Call(), Call(is_causal=True)):
            check_counting(2, 2, 1, seq_q, seq_k, dim, torch.bfloat16, mask=mask, call=call)


@pytest.mark.parametrize("dim", CLASSES)
def test_many_tiles(dim):
    """More units than processors, several visits each: held against float64 on the GPU, one head at a time."""
    for axes in ("hqk", "qk", "k"):
        x, _ = biased("tiles", f"bias32:{axes}", heads=(16, 4), lengths=(2048, 2048), dims=(dim, dim))
        got = mask_gradient(x)
        wide = [t.double() for t in (x.q, x.k, x.v)]
        mask = x.mask.double().requires_grad_()
        want = torch.zeros_like(mask)
        for b, h in itertools.product(range(2), range(16)):
            part = mask[min(b, mask.size(0) - 1), min(h, mask.size(1) - 1)][None, None]
            q, k, v = wide[0][b, h], wide[1][b, h // 4], wide[2][b, h // 4]
            keep = torch.ones(1, 1, 2048, 2048, dtype=torch.bool)
            out, _, _ = attention64(*(t[None, None] for t in (q, k, v)), part, keep, dim**-0.5)
            want += torch.autograd.grad(out, mask, x.grad_out[b, h][None, None].double())[0]
        assert (got.double() - want).abs().max() <= 2**-8 * want.abs().max(), axes


@pytest.mark.parametrize("dim", CLASSES)
def test_the_same_bits_twice(dim):
    """Whether asked for or not; another stream keeps processors busy."""
    noise, other = torch.randn(4096, 4096, dtype=torch.bfloat16), torch.cuda.Stream()
    for mask, band in (("bias:hqk", "full"), ("bias_inf:qk", "causal"), ("bias:bk", "full"), ("bias32:q", "causal"), ("bias:-", "full")):
        x, call = biased("twice", mask, heads=(8, 4), lengths=(1000, 1100), dims=(dim, dim), band=band)
        first = mask_gradient(x, is_causal=call.is_causal)
        for turn in range(20):
            if turn % 2:
                with torch.cuda.stream(other):
                    noise @ noise
            again = mask_gradient(x, is_causal=call.is_causal, deterministic=turn % 3 == 0)
            assert torch.equal(again, first), f"{mask}, turn {turn}"
    torch.cuda.synchronize()


def test_only_the_mask_needs_a_gradient():
    x, _ = biased("only", "bias:hqk", heads=(8, 8), lengths=(300, 300))
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.mask)]
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves), leaves, x.grad_out)[3]
        mask = x.mask.detach().requires_grad_()
        with torch_flashsdpa.profiler.kernels_run() as kernels:
            F.scaled_dot_product_attention(x.q, x.k, x.v, mask).backward(x.grad_out)
            torch.cuda.synchronize()
    assert torch.equal(mask.grad, want)
    assert any("flashsdpa_bwd_mask_sm90" in kernel for kernel in kernels), kernels
    assert not any("flashsdpa_bwd_sm90" in kernel or "flashsdpa_bwd_post_sm90" in kernel for kernel in kernels), kernels


def test_captured_and_replayed_with_other_masks():
    for axes in ("hqk", "k"):
        x, _ = biased("capture", f"bias:{axes}", heads=(8, 8), lengths=(300, 300))
        out, lse = ops().forward(x.q, x.k, x.v, attn_mask=x.mask)

        def run():
            return ops().backward(x.grad_out, None, x.q, x.k, x.v, out, lse, attn_mask=x.mask,  # noqa: B023
                                  output_mask=[False] * 3 + [True, False])[3]  # fmt: skip

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for turn in range(3):
            x.mask.copy_(make(f"bias:{axes}", f"replay{turn}", (2, 8, 300, 300), torch.bfloat16))
            for t, new in zip((out, lse), ops().forward(x.q, x.k, x.v, attn_mask=x.mask)):
                t.copy_(new)
            graph.replay()
            assert torch.equal(captured, run())
            captured.fill_(float("nan"))


def test_a_bias_of_a_model_learns_as_with_stock():
    """A table of relative positions, gathered into a mask (1, H, S, S): the gradient of the table."""
    table = torch.randn(8, 2 * 128 - 1, dtype=torch.bfloat16)
    position = torch.arange(128)
    index = position[:, None] - position + 127
    q, k, v, grad = (torch.randn(2, 8, 128, 64, dtype=torch.bfloat16) for _ in range(4))
    q.requires_grad_()  # without it stock keeps no log-sum-exp, and its backward fails
    grads = []
    for strict in (True, None):
        leaf = table.clone().requires_grad_()
        with torch_flashsdpa.sdpa_backend("flashsdpa" if strict else "stock", strict=bool(strict)):
            F.scaled_dot_product_attention(q, k, v, attn_mask=leaf[:, index][None]).backward(grad)
        grads.append(leaf.grad.float())
    assert (grads[0] - grads[1]).abs().max() <= 2**-5 * grads[1].abs().max()


def test_memory_is_that_of_one_float32_copy_at_most():
    x, _ = biased("memory", "bias:qk", heads=(8, 8), lengths=(2048, 2048), batch=4)
    mask_gradient(x)
    out, lse = ops().forward(x.q, x.k, x.v, attn_mask=x.mask)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops().backward(x.grad_out, None, x.q, x.k, x.v, out, lse, attn_mask=x.mask, output_mask=[False] * 3 + [True, False])
    torch.cuda.synchronize()
    elements, rows = x.mask.numel(), x.q.numel() // 64
    plan = 4 * elements // 32 + elements // 256
    assert torch.cuda.max_memory_allocated() - before <= (2 + 4) * elements + 64 * rows + 2 * plan + (1 << 20)
