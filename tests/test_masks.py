"""Masks of every kind, broadcast and stride against the float64 oracle, and the two meanings of "removed"."""

import pytest
import torch
from cases import Case, broadcast_cases, inputs, mask_kind_cases, mask_stride_cases
from oracle import INF, Call, check, generator, ops, run_sdpa


@pytest.mark.parametrize("case", mask_kind_cases(), ids=str)
def test_kinds(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", broadcast_cases(), ids=str)
def test_broadcasts(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", mask_stride_cases(), ids=str)
def test_strides(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", broadcast_cases()[::5] + mask_stride_cases()[::7], ids=str)
def test_through_sdpa(case):
    check(inputs(case), case.call, run=run_sdpa)


@pytest.mark.parametrize("shape", ((130,), (1,), (66, 130), (66, 1), (1, 130), (4, 66, 130), (1, 66, 1), (2, 1, 1, 130)), ids=str)
def test_masks_of_lower_rank_through_sdpa(shape):
    """A mask of rank 1 to 3 broadcasts from the right, as torch's rules say."""
    x = inputs(Case(f"rank{shape}", batch=2, heads=(4, 4), seq=(66, 130)))
    for mask in (torch.rand(shape, generator=generator("m")) < 0.6, torch.randn(shape, generator=generator("m"))):
        x.mask = mask
        full = inputs(Case(f"rank{shape}", batch=2, heads=(4, 4), seq=(66, 130)))
        full.mask = mask.expand(2, 4, 66, 130)
        got = run_sdpa(x, Call())
        want = check(full, Call())
        assert torch.allclose(got.out, want.out, atol=1e-6)
        assert all(torch.allclose(got.grads[n], want.grads[n], atol=1e-5) for n in want.grads)


@pytest.mark.parametrize("planned", (False, True), ids=("unplanned", "planned"))
@pytest.mark.parametrize("bad", (float("nan"), INF, -INF), ids=str)
@pytest.mark.parametrize("additive", (False, True), ids=("bool", "additive"))
@pytest.mark.parametrize("seq", ((1, 1, 8), (70, 70, 8), (70, 300, 64)), ids=str)
def test_bad_numbers_in_a_removed_key(seq, additive, bad, planned):
    """NaN and inf in the K of a removed key do not show; in an allowed key they do, in exactly the rows that see it."""
    seq_q, seq_k, dim = seq
    g = generator(f"bad{seq}{additive}{bad}")
    x = inputs(Case("bad", seq=(seq_q, seq_k), dim=(dim, dim), grad=""))
    removed = seq_k // 2
    keep = torch.rand(1, 1, seq_q, seq_k, generator=g) < 0.6
    keep[..., removed] = torch.rand(seq_q, generator=g) < 0.3  # some rows see the bad key
    x.k[:, :, removed] = bad
    x.mask = torch.zeros(keep.shape).masked_fill_(~keep, -INF) if additive else keep
    x.planned = planned
    got = check(x, Call())
    blind = ~keep[0, 0, :, removed]
    assert got.out[:, :, blind].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_nan_in_the_mask_or_the_query(dtype):
    """A NaN at an allowed score spoils its row, and no other."""
    for seq_k in (5, 300):
        x = inputs(Case(f"nan{seq_k}", seq=(66, seq_k), dtype=dtype, mask="bias:qk", grad=""))
        x.mask[..., 3, 2] = float("nan")
        x.mask[..., 4, :] = -INF
        x.q[:, :, 7] = float("nan")
        got = check(x, Call())
        spoilt = got.out.isnan().any(-1)[0, 0].nonzero().flatten().tolist()
        assert spoilt == [3, 7] and (got.out[:, :, 4] == 0).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_lowest_finite_rows_are_the_mean(dtype):
    """-inf is the only "masked": a row of lowest finite numbers is the mean of V, in base-2 arithmetic too."""
    x = inputs(Case("mean", seq=(70, 200), dtype=dtype, grad=""))
    x.q = torch.zeros_like(x.q)
    x.mask = torch.full((1, 1, 70, 200), torch.finfo(dtype).min, dtype=dtype)
    got = check(x, Call())
    mean = x.v.double().mean(2, keepdim=True)
    assert (got.out - mean).abs().max() <= torch.finfo(dtype).eps * 2


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_a_float32_mask_keeps_its_precision(dtype):
    """Differences far below a half-precision step at 100: rounding the mask to the query's dtype would lose them."""
    seq = 128
    q, k = torch.zeros(1, 1, 66, 8, dtype=dtype), torch.zeros(1, 1, seq, 8, dtype=dtype)
    v = torch.eye(seq, dtype=dtype)[None, None]
    mask = 100 + 0.01 * torch.randn(1, 1, 66, seq, generator=generator("precise"))
    out, lse = ops().forward(q, k, v, attn_mask=mask)
    want = mask.double().softmax(-1)
    step = torch.finfo(dtype).eps * 2**-7  # of numbers near 1/128
    assert (out - want).abs().max() <= step
    assert (want - 1 / seq).abs().max() > 2 * step  # the differences can be seen
    assert (lse.double() - mask.double().logsumexp(-1)).abs().max() < 4e-5


def test_the_gradient_of_a_broadcast_mask_is_summed_in_float32():
    """4096 contributions of one into a bfloat16 mask: a bfloat16 sum would stop at 256."""
    batch, seq = 64, 64
    q, k = (torch.zeros(batch, 1, seq, 8, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    _, lse = ops().forward(q, k, k, attn_mask=mask)
    (grad,) = torch.autograd.grad(lse, mask, torch.ones_like(lse))
    assert grad.dtype == torch.bfloat16 and abs(grad.item() - batch * seq) <= 16
