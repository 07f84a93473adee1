"""The forward against the float64 oracle, case list by case list."""

import pytest
import torch
from cases import (Case, band_cases, decode_cases, dim_cases, head_cases, inputs, length_cases, scale_cases)
from oracle import FLOAT32_EPS, INF, Call, Inputs, check, generator, ops, run_sdpa


def forward_only(case):
    x = inputs(case)
    x.grad_out = x.grad_lse = None
    return x


@pytest.mark.parametrize("case", length_cases(), ids=str)
def test_lengths(case):
    check(forward_only(case), case.call)


@pytest.mark.parametrize("case", decode_cases(), ids=str)
def test_decode(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", dim_cases()[::3] + scale_cases()[::3], ids=str)
def test_without_gradients(case):
    """Under no_grad the op is called below autograd: another entry, the same numbers."""
    with torch.no_grad():
        check(forward_only(case), case.call)


@pytest.mark.parametrize("case", [c for c in head_cases() + dim_cases()[::5]], ids=str)
def test_through_sdpa(case):
    """The same kernels through F.scaled_dot_product_attention in a strict scope."""
    if case.call.window != (-1, -1):
        case = Case(**{**vars(case), "call": Call(is_causal=True)})
    check(forward_only(case), case.call, run=run_sdpa)


def test_lse_is_the_natural_logarithm():
    q, k, v = (torch.zeros(1, 1, 1, 8) for _ in range(3))
    assert ops().forward(q, k, v)[1].item() == 0.0
    k2, v2 = (t.expand(1, 1, 1000, 8) for t in (k, v))
    lse = ops().forward(q, k2, v2)[1]
    assert lse.dtype == torch.float32 and lse.shape == (1, 1, 1) and lse.is_contiguous()
    assert abs(lse.item() - 6.907755278982137) < 1e-5
    assert ops().forward(*(t.double() for t in (q, k2, v2)))[1].dtype == torch.float64


@pytest.mark.parametrize("magnitude", (30.0, 300.0, 3e4), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_large_scores(magnitude, dtype):
    """Softmax of scores of many thousands: one key takes all, nothing overflows, also in base 2."""
    g = generator(f"large{magnitude}{dtype}")
    q, k, v = (torch.randn(1, 2, 100, 32, generator=g) for _ in range(3))
    x = Inputs((q * magnitude**0.5).to(dtype), (k * magnitude**0.5).to(dtype), v.to(dtype))
    got = check(x, Call(is_causal=True))
    assert got.out.isfinite().all() and got.lse.isfinite().all()


@pytest.mark.parametrize("rows", (4, 40))  # the decoding kernel, and the other
def test_running_maximum_rises_in_the_last_tile(rows):
    """Every tile holds a larger maximum than all before: each rescale of the partial sums counts."""
    seq = 520
    q = torch.ones(1, 1, rows, 16)
    k = torch.linspace(-4, 4, seq)[:, None].expand(seq, 16)[None, None].contiguous()
    v = torch.randn(1, 1, seq, 16, generator=generator("rising"))
    for scale in (1.0, -1.0):  # rising, and falling from the first tile
        check(Inputs(q, k, v), Call(scale=scale))


def test_a_long_row_is_accumulated_in_float32():
    """8192 equal weights on ones: half precision sums would stall long before."""
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = torch.zeros(1, 1, 65, 8), torch.zeros(1, 1, 8192, 8), torch.ones(1, 1, 8192, 8)
        out, lse = ops().forward(*(t.to(dtype) for t in (q, k, v)))
        assert (out == 1).all(), out.unique()
        assert (lse - 9.010913347279288).abs().max() < 20 * FLOAT32_EPS


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("rows", (1, 40))
@pytest.mark.parametrize("magnitude", (1.0, 133120.0, 1e15))
def test_equal_scores_of_any_magnitude_weigh_the_same(magnitude, rows, dtype):
    """Also where one more rounding of a score is more than exp can hold."""
    q, k = torch.full((1, 1, rows, 72), magnitude).to(dtype), torch.full((1, 1, 100, 72), magnitude).to(dtype)
    v = torch.randn(1, 1, 100, 72, generator=generator(f"equal{magnitude}{rows}{dtype}")).to(dtype).requires_grad_()
    out, _ = ops().forward(q, k, v)
    mean = v.double().mean(2, keepdim=True)
    assert (out.double() - mean).abs().max() < (1e-2 if dtype == torch.bfloat16 else 1e-5)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    assert (dv.double() - rows / 100).abs().max() < 2e-2 * rows / 100


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("rows", (2, 40))  # the decoding kernel, and the other
def test_half_precision_is_rounded_to_nearest(rows, dtype):
    """The mean of two rows and the sum of two rows are exact in float32, so that only the last rounding is left; the
    first oracle would let it be cut off."""
    g = generator(f"nearest{rows}{dtype}")
    v = torch.randn(1, 2, 2, 70, generator=g).to(dtype)
    q, k = torch.zeros(1, 2, rows, 70, dtype=dtype), torch.zeros(1, 2, 2, 70, dtype=dtype)
    out, _ = ops().forward(q, k, v)
    assert torch.equal(out, v.double().mean(2, keepdim=True).to(dtype).expand_as(out))
    one_key = v[:, :, :1].clone().requires_grad_()
    out, _ = ops().forward(q, k[:, :, :1], one_key)
    grad = torch.zeros_like(out)
    grad[:, :, -2:] = torch.randn(1, 2, 2, 70, generator=g).to(dtype)
    (dv,) = torch.autograd.grad(out, one_key, grad)
    assert torch.equal(dv, grad.double().sum(2, keepdim=True).to(dtype))


def test_many_batches():
    """batch x heads beyond 65535, forward against the same rows alone."""
    g = generator("many")
    q, k, v = (torch.randn(65537, 1, s, 4, generator=g) for s in (2, 3, 3))
    out, lse = ops().forward(q, k, v)
    check(Inputs(q, k, v), Call())
    assert torch.equal(out[-3:], ops().forward(q[-3:], k[-3:], v[-3:])[0]) and lse.shape == (65537, 1, 2)


def test_two_calls_with_the_same_shapes_keep_their_own_scale():
    q, k, v = (torch.randn(1, 2, 70, 16, generator=generator(n)) for n in "qkv")
    for scale in (0.1, 0.3, None, 0.1):
        check(Inputs(q, k, v), Call(scale=scale))


@pytest.mark.parametrize("case", band_cases()[:: 3], ids=str)
def test_repeats_are_bitwise_equal(case):
    x = forward_only(case)
    first = ops().forward(x.q, x.k, x.v, **case.call.op_arguments())
    for _ in range(3):
        again = ops().forward(x.q, x.k, x.v, **case.call.op_arguments())
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_batch_neighbours_do_not_matter():
    """A sequence full of NaN beside a good one in the batch, and another kv head full of inf."""
    g = generator("neighbours")
    q, k, v = (torch.randn(3, 4, 70, 16, generator=g) for _ in range(3))
    alone = ops().forward(q[1:2, 1:2], k[1:2, 1:2], v[1:2, 1:2])[0]
    for t in (q, k, v):
        t[0], t[2] = float("nan"), INF
        t[1, 0], t[1, 2:] = float("nan"), INF
    assert torch.equal(ops().forward(q, k, v)[0][1:2, 1:2], alone)
