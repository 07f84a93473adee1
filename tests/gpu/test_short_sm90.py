"""Short sequences on Hopper, forward and backward: both oracles over dims, lengths, masks, strides; no plan is made; capture."""

import itertools

import pytest
import torch
from cases import BANDS, BROADCASTS, MASK_KINDS, MASK_STRIDES
from hopper import capture, needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import Call, check, check_counting, ops, run_op
from test_mask_gradient_sm90 import biased
from test_masked_backward_sm90 import masked

from torch_flashsdpa.profiler import kernels_run

pytestmark = needs_hopper
HALVES = (torch.bfloat16, torch.float16)
DIMS = ((32, 32), (1, 7), (20, 32), (33, 40), (64, 64), (64, 8))
LENGTHS = ((49, 49), (64, 64), (1, 1), (1, 64), (64, 1), (17, 33), (16, 48))
SHORT = {"heads": (3, 3), "lengths": (49, 49), "dims": (32, 32)}


def hold(make, *args, **options):
    x, call = make(*args, **(SHORT | options))
    check(x, call, run_op)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims, dtype):
    for lengths, band in itertools.product(LENGTHS, BANDS):
        hold(masked, "dims", "random", lengths=lengths, dims=dims, dtype=dtype, band=band, lse_grad=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_mask_kinds(kind, dtype):
    for dim, band in ((32, "full"), (64, "causal")):
        hold(masked, "kinds", kind, batch=3, dims=(dim, dim), dtype=dtype, band=band)


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_masks_of_any_layout(axes, strides):
    for kind in ("random", "bias_inf", "bias32"):
        hold(masked, "layouts", f"{kind}:{axes or '-'}:{strides}", batch=2, lengths=(40, 50))


@pytest.mark.parametrize("kind", ("bias", "bias32", "bias_inf", "all_inf"))
@pytest.mark.parametrize("axes", ("bhqk", "hqk", "bqk", "qk", "k"))
def test_gradient_of_a_mask(axes, kind):
    for lengths, batch, dim in (((49, 49), 700, 32), ((64, 33), 3, 64), ((7, 64), 1, 32)):
        hold(biased, "gradient", f"{kind}:{axes}", lengths=lengths, batch=batch, dims=(dim, dim), lse_grad=True)


@pytest.mark.parametrize("layout", ("offset", "bsh", "packed"))
def test_layouts(layout):
    for dim, grad in itertools.product((32, 40, 33), ("sum", "columns", "dense")):
        hold(masked, "layouts", "random", dims=(dim, dim), layout=(layout, "bhs", layout), grad=grad)


def test_grouped_heads():
    for heads in ((4, 2), (3, 1)):
        hold(masked, "groups", "bias", heads=heads)
        hold(biased, "groups", "bias:hqk", heads=heads)


@pytest.mark.parametrize("dim", (32, 64))
def test_counting(dim):
    for dtype, causal in itertools.product(HALVES, (False, True)):
        check_counting(3, 4, 4, 49, 60, dim, dtype, call=Call(is_causal=causal))


def test_many_windows_and_no_plan():
    """More blocks than processors at a time; one kernel for each pass and, where the mask's gradient is in parts, their sum."""
    x, call = biased("windows", "bias:hqk", **(SHORT | {"batch": 2000, "heads": (4, 4)}))
    with kernels_run() as kernels:
        check(x, call, run_op)
    assert set(kernels) == {
        "flashsdpa_fwd_short_sm90", "flashsdpa_bwd_short_sm90", "flashsdpa_bwd_short_mask_sm90"}  # fmt: skip


def test_capture():
    x, _ = biased("capture", "bias:hqk", **SHORT)
    mask = x.mask.detach().requires_grad_()
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]

    def step():
        out, _ = ops().forward(*leaves, attn_mask=mask)
        return (out, *torch.autograd.grad(out, (*leaves, mask), x.grad_out))

    captured, replay = capture(step)
    with torch.no_grad():
        mask.mul_(2)
        leaves[0].neg_()
    replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))
