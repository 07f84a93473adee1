"""Faults that users of other stacks met with masks, on the GPU: each test is named after the id of its case. Both directions."""

import pytest
import torch
import torch.nn.functional as F
from cases import make_mask
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import INF, Call, Inputs, check, check_counting, generator, ops, run_op, run_sdpa

import torch_flashsdpa

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
CAUSAL, CAUSAL_BR = Call(is_causal=True), Call(is_causal=True, bottom_right=True)


def normal(name, *shapes, dtype=torch.bfloat16):
    g = generator(name)
    return [torch.randn(shape, generator=g, device="cpu").to("cuda", dtype) for shape in shapes]


def additive(mask, dtype=torch.bfloat16):
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -INF)


def served(q, k, v, mask, **options):
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def gradients(q, k, v, mask, grad, **options):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(served(*leaves, mask, **options), leaves, grad)


def assert_close(got, want):
    for a, b in zip(got, want):
        assert a.isfinite().all() and (a.float() - b.float()).abs().max() <= 2**-6 * b.float().abs().max()


def test_up_001_boolean_mask_all_false_rows():
    (t,) = normal("up001", (1, 1, 8, 8))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:], mask[:, 4:] = False, False
    for run in (run_op, run_sdpa):
        got = check(Inputs(t, t, t, mask[None, None], grad_out=torch.ones_like(t)), run=run)
        assert all((got.grads[name][..., 4:, :] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("mask_dtype", ("the query's", torch.float32), ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_up_003_first_key_tile_masked_by_the_lowest_finite_number(dtype, mask_dtype):
    t, grad = normal("up003", *[(2, 3, 441, 64)] * 2, dtype=dtype)
    mask_dtype = dtype if mask_dtype == "the query's" else mask_dtype
    mask = torch.zeros(1, 1, 441, 441, dtype=mask_dtype)
    mask[..., :128] = torch.finfo(mask_dtype).min
    check(Inputs(t, t, t, mask, grad_out=grad))
    mask[..., 5, :] = torch.finfo(mask_dtype).min  # a whole row of it: finite, so the plain mean wherever q k is lost in it
    got = check(Inputs(t, t, t, mask, grad_out=grad))
    if torch.finfo(mask_dtype).max > 1e30:
        assert (got.out[:, :, 5].float() - t.float().mean(2)).abs().max() < 1e-2


@pytest.mark.parametrize("flip", (False, True), ids=("forward", "reversed"))
@pytest.mark.parametrize("sign", (-1, 1))
def test_up_004_strongly_negative_logits_after_a_masked_block(sign, flip):
    q, k, v, grad = normal("up004", (1, 14, 88, 64), (1, 2, 448, 64), (1, 2, 448, 64), (1, 14, 88, 64))
    q[..., 0], k[..., 0] = 30 * sign, -30  # every scaled logit near sign * -112
    mask = CAUSAL_BR.visible(88, 448)
    if flip:  # the mirrored band: the masked block is met from the other side
        q, k, v, grad = (t.flip(2).contiguous() for t in (q, k, v, grad))
        mask = mask.flip(0, 1).contiguous()
    else:
        check(Inputs(q, k, v, grad_out=grad), CAUSAL_BR)
    check(Inputs(q, k, v, mask[None, None], grad_out=grad))
    check(Inputs(q, k, v, additive(mask)[None, None], grad_out=grad))


@pytest.mark.parametrize("kind", ("causal", "padding", "custom", "additive"))
def test_up_007_masked_scores_have_no_weight(kind):
    call = CAUSAL_BR if kind == "causal" else Call()
    mask = None
    if kind == "padding":
        mask = torch.zeros(1, 1, 1, 130, dtype=torch.bool)
    elif kind != "causal":
        mask = torch.ones(1, 1, 200, 130, dtype=torch.bool)
        mask[..., 3:9, :], mask[..., 64:128, :] = False, False
        mask = additive(mask) if kind == "additive" else mask
    check_counting(1, 2, 2, 200, 130, 128, torch.bfloat16, mask, call, mask_grad=False)
    q, k, v, grad = normal("up007", *[(1, 2, s, 64) for s in (200, 130, 130, 200)])
    check(Inputs(-9 * q.abs(), 9 * k.abs(), v, mask, grad_out=grad), call)  # every logit negative


@pytest.mark.parametrize("removal, where", [(r, w) for r in ("additive", "bool") for w in
                                            ("query", "allowed key", "removed key", "mask") if (r, w) != ("bool", "mask")])
def test_up_009_nan_is_not_taken_for_masked(where, removal):
    for dim, seq_k in ((8, 5), (64, 64), (128, 300)):
        q, k, v = normal("up009", (1, 1, 3, dim), (1, 1, seq_k, dim), (1, 1, seq_k, dim))
        keep = torch.zeros(1, 1, 3, seq_k, dtype=torch.bool)
        keep[..., 1, : seq_k // 2 + 1], keep[..., 2, :2] = True, True  # row 0 has no key
        mask = keep if removal == "bool" else additive(keep)
        if where == "query":
            q[..., 1, 0] = float("nan")
        elif where == "mask":
            mask[..., 1, seq_k // 2] = float("nan")
        else:
            k[..., seq_k // 2 if where == "allowed key" else seq_k - 1, 0] = float("nan")
        got = check(Inputs(q, k, v, mask))
        assert (got.out[..., 0, :] == 0).all()
        assert got.out[..., 1, :].isnan().all() == (where != "removed key") and got.out[..., 2, :].isfinite().all()


@pytest.mark.parametrize("level", (-200, -120, 0, 200))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_up_013_strongly_negative_lse_and_a_partial_last_tile(dtype, level):
    for length in (64, 192, 704, 1, 65, 127, 160):
        q, k, v, grad = (t.mul_(0.1) for t in normal(f"up013{length}", *[(1, 1, length, 64)] * 4, dtype=dtype))
        q[..., 0], k[..., 0] = abs(level) ** 0.5 * 8**0.5, level / max(abs(level) ** 0.5, 1) * 8**0.5
        full = torch.ones(1, 1, length, length, dtype=torch.bool)
        check(Inputs(q, k, v, full, grad_out=grad))
        by_mask = check(Inputs(q, k, v, full.tril(), grad_out=grad)).grads["dq"]
        by_flag = check(Inputs(q, k, v, grad_out=grad), CAUSAL).grads["dq"]
        assert (by_mask - by_flag).abs().max() <= 4 * torch.finfo(dtype).eps * by_flag.abs().max()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_up_016_float32_mask_with_half_precision(dtype):
    q, k, v = normal("up016", *[(2, 4, 32, 16)] * 3, dtype=dtype)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(32, device="cuda", dtype=torch.float32)[None, None]
    check(Inputs(q, k, v, mask, grad_out=q), run=run_sdpa)


@pytest.mark.parametrize("seq", (73728, 90000, 98304))
def test_up_034_row_offsets_in_the_mask_beyond_32_bits(seq):
    """Every document of a (S, S) mask by itself: rows beyond 2^32 / S too."""
    q, k, v = normal("up034", *[(1, 1, seq, 64)] * 3)
    documents = torch.arange(seq, dtype=torch.int32) // 6000
    out = served(q, k, v, documents[:, None] == documents)
    for start in range(0, seq, 6000):
        rows = slice(start, min(start + 6000, seq))
        alone = served(q[:, :, rows], k[:, :, rows], v[:, :, rows], None)
        assert (out[:, :, rows].float() - alone.float()).abs().max() < 0.02


@pytest.mark.parametrize("heads, seq, dim", ((8, 49999, 64), (3, 46344, 128), (3, 46345, 128), (3, 53936, 128)))
def test_up_036_up_037_backward_with_masks_around_2_to_the_31(heads, seq, dim):
    """No threshold at sqrt(2^31): an all-True mask equals no mask, a causal one is_causal."""
    q, k, v, grad = normal(f"up036{seq}", *[(1, heads, seq, dim)] * 4)
    mask = torch.ones(seq, seq, dtype=torch.bool)
    assert_close(gradients(q, k, v, mask, grad), gradients(q, k, v, None, grad))
    assert_close(gradients(q, k, v, mask.tril_(), grad), gradients(q, k, v, None, grad, is_causal=True))


def test_up_039_block_diagonal_mask_equals_separate_calls():
    q, k, v, grad = normal("up039", *[(1, 2, 600, 80)] * 4)
    mask = torch.zeros(1, 1, 600, 600, dtype=torch.bool)
    segments = [slice(0, 128), slice(128, 256), slice(256, 384), slice(543, 600)]
    for s in segments:
        mask[..., s, s] = True
    got = check(Inputs(q, k, v, mask, grad_out=grad), run=run_sdpa)
    for s in segments:
        alone = check(Inputs(q[:, :, s], k[:, :, s], v[:, :, s], grad_out=grad[:, :, s]))
        assert (got.out[:, :, s] - alone.out).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps
        assert_close((got.grads[n][:, :, s] for n in ("dq", "dk", "dv")), (alone.grads[n] for n in ("dq", "dk", "dv")))
    assert (got.out[:, :, 384:543] == 0).all()


def test_up_045_an_all_false_mask_is_applied_or_the_call_goes_to_stock():
    q, k, v = normal("up045", *[(1, 8, 10, 64)] * 3)
    mask = torch.zeros(1, 1, 10, 10, dtype=torch.bool)
    for backend, is_strict in (("flashsdpa", True), ("auto", False)):
        with torch_flashsdpa.sdpa_backend(backend, strict=is_strict):
            assert (F.scaled_dot_product_attention(q, k, v, mask) == 0).all()
            assert (F.scaled_dot_product_attention(q, k, v) != 0).any()


def test_up_046_broadcast_mask_is_not_copied_per_head():
    """Forward and backward stay below one copy of the mask."""
    heads, seq = 12, 13622
    q, k, v, grad = normal("up046", *[(1, heads, seq, 64)] * 4)
    one = torch.randn(1, 1, seq, seq, dtype=torch.bfloat16)
    for mask in (one, one.expand(1, heads, seq, seq)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients(q, k, v, mask, grad)
        assert torch.cuda.max_memory_allocated() - before < one.numel() * one.element_size()


@pytest.mark.parametrize("seq_k", (33, 65, 97, 129, 34, 66))
def test_up_075_expanded_and_materialised_keys_agree(seq_k):
    for dim in (64, 128, 256):
        q, k, v = normal(f"up075{dim}", (1, 8, 70, dim), (1, 1, seq_k, dim), (1, 1, seq_k, dim))
        with torch.device("cpu"):
            mask = make_mask("rows_false", "up075", (1, 8, 70, seq_k), torch.bfloat16)
        mask = mask.cuda()
        expanded = check(Inputs(q, k.expand(1, 8, -1, -1), v.expand(1, 8, -1, -1), mask, grad_out=q))
        dense = check(Inputs(q, k.repeat(1, 8, 1, 1), v.repeat(1, 8, 1, 1), mask, grad_out=q))
        assert torch.equal(expanded.out, dense.out) and torch.equal(expanded.lse, dense.lse)


def test_up_126_large_norms_in_float16_stay_finite():
    q, k, v, grad = normal("up126", *[(1, 2, 70, 64)] * 4, dtype=torch.float16)
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril_()
    got = check(Inputs(q * 60, k * 60, v, mask, grad_out=grad))  # scores to 2e5: beyond float16
    assert got.out.isfinite().all() and all(g.isfinite().all() for g in got.grads.values())


def test_up_132_masked_cross_attention_of_one_query():
    q, k, v, grad = normal("up132", (32, 4, 1, 64), (32, 4, 77, 64), (32, 4, 77, 64), (32, 4, 1, 64))
    mask = torch.randn(32, 1, 1, 77, dtype=torch.bfloat16)
    mask[:, :, :, 70:] = -INF
    check(Inputs(q, k, v, mask, grad_out=grad), run=run_sdpa)
    assert torch.equal(ops().forward(q, k, v, attn_mask=mask)[0], served(q, k, v, mask))
