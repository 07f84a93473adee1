"""Memory layouts: any strides go in, the documented strides come out, real and fake alike, without a copy where none is
needed."""

import pytest
import torch
from cases import FLOATS, LAYOUTS, PERMUTATIONS, Case, inputs, layout_cases
from oracle import Call, check, generator, ops, run_op, run_sdpa
from torch._subclasses.fake_tensor import FakeTensorMode


def dense_in_order(sizes, order):
    """The strides of a dense (B, H, S, D) tensor whose axes lie in memory as `order` ("bsh": head innermost of the three)."""
    strides, step = [0, 0, 0, 1], sizes[3]
    for letter in reversed(order):
        axis = "bhs".index(letter)
        strides[axis], step = step, step * sizes[axis]
    return tuple(strides)


@pytest.mark.parametrize("case", layout_cases(), ids=str)
def test_values(case):
    check(inputs(case), case.call)


@pytest.mark.parametrize("case", layout_cases()[::4], ids=str)
def test_values_through_sdpa(case):
    x = inputs(case)
    x.grad_lse = None
    check(x, case.call, run=run_sdpa)


@pytest.mark.parametrize("run", (run_op, run_sdpa))
@pytest.mark.parametrize("order", PERMUTATIONS)
def test_out_and_gradients_lie_as_their_input(order, run):
    """All six permutations of q, with k and v in two others; D != Dv."""
    orders = (order, PERMUTATIONS[(PERMUTATIONS.index(order) + 2) % 6], PERMUTATIONS[(PERMUTATIONS.index(order) + 3) % 6])
    case = Case(f"order_{order}", batch=2, heads=(3, 3), seq=(5, 7), dim=(16, 24), layout=orders)
    x = inputs(case)
    got = run(x, Call())
    assert got.out.stride() == dense_in_order((2, 3, 5, 24), order)
    for name, t, lies in zip(("dq", "dk", "dv"), (x.q, x.k, x.v), orders):
        assert got.grads[name].stride() == dense_in_order(t.shape, lies), name


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in PERMUTATIONS])
def test_odd_layouts_give_dense_results(name):
    case = Case(f"odd_{name}", batch=2, heads=(2, 2), seq=(5, 7), dim=(8, 8), layout=(name,) * 3)
    got = run_op(inputs(case), Call())
    for t in (got.out, *got.grads.values()):
        inner_first = sorted(range(4), key=t.stride)
        assert inner_first[0] == 3 and t.permute(inner_first[::-1]).is_contiguous()
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size(), "not dense"


SIZES = dict(
    usual=(2, (4, 2), (65, 70), (16, 24)), one_query=(2, (4, 2), (1, 70), (16, 24)), one_head=(2, (1, 1), (5, 7), (8, 8)),
    one_batch=(1, (2, 2), (5, 7), (8, 8)), one_key=(2, (2, 2), (5, 1), (8, 8)), dim_one=(2, (2, 2), (5, 7), (1, 1)),
    no_batch=(0, (2, 2), (5, 7), (8, 8)), no_query=(2, (2, 2), (0, 7), (8, 8)), no_key=(2, (2, 2), (5, 0), (8, 8)),
    no_dim=(2, (2, 2), (5, 7), (0, 8)), no_dim_v=(2, (2, 2), (5, 7), (8, 0)), all_ones=(1, (1, 1), (1, 1), (1, 1)))


def metadata(tensors):
    return [None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.storage_offset()) for t in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_fake_strides_are_the_real_ones(size, layout):
    """Sizes, strides, dtype and offset of out, lse and every gradient, on every branch."""
    batch, heads, seq, dim = SIZES[size]
    names = (layout, "bhs", layout)
    for dtype, masked in ((torch.float32, True), (torch.bfloat16, False)):
        x = inputs(Case(f"fake_{size}", batch, heads, seq, dim, dtype, "bias:hqk" if masked else "", masked, layout=names))

        def results(q, k, v, mask, grad):
            leaves = [t.detach().requires_grad_() for t in (q, k, v) + ((mask,) if masked else ())]
            out, lse = ops().forward(*leaves[:3], attn_mask=leaves[3] if masked else None)
            return metadata([out, lse, *torch.autograd.grad(out, leaves, grad)])

        real = results(x.q, x.k, x.v, x.mask, x.grad_out)
        with FakeTensorMode() as mode:
            fake = results(*(None if t is None else mode.from_tensor(t) for t in (x.q, x.k, x.v, x.mask, x.grad_out)))
        assert fake == real


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided_and_dense_inputs_agree_bit_for_bit(dtype):
    """The same values, rows spread in memory: the same kernel, the same numbers."""
    x = inputs(Case("agree", batch=2, heads=(4, 2), seq=(66, 130), dim=(40, 40), dtype=dtype, mask="random"))
    want = run_op(x, Call())
    for name in ("packed", "offset", "bsh", "every_second_row", "last_stride_2", "columns"):
        x.q, x.k, x.v = (LAYOUTS[name](t.contiguous()) for t in (x.q, x.k, x.v))
        got = run_op(x, Call())
        assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse), name
        assert all(torch.equal(got.grads[n], want.grads[n]) for n in want.grads), name


def test_inputs_are_left_alone():
    x = inputs(Case("untouched", seq=(65, 66), mask="bias", mask_grad=True, lse_grad=True, layout=("packed",) * 3))
    tensors = (x.q, x.k, x.v, x.mask, x.grad_out, x.grad_lse)
    before = [t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    run_op(x, Call())
    assert all(torch.equal(a, b) for a, b in zip(tensors, before)) and versions == [t._version for t in tensors]


@pytest.mark.parametrize("shape", ((7, 16), (3, 7, 16), (2, 3, 7, 16), (2, 2, 3, 7, 16), (2, 1, 2, 3, 7, 16)), ids=str)
def test_ranks(shape):
    """SDPA takes any number of leading axes, none too; the result has them all."""
    import torch_flashsdpa

    g = generator(str(shape))
    q, k, v, weight = (torch.randn(shape, generator=g) for _ in range(4))
    k, v = k[..., :5, :], v[..., :5, :]
    flat = [t.reshape(-1, *((3,) if len(shape) > 2 else (1,)), *t.shape[-2:]) for t in (q, k, v)]
    want = run_op(inputs_like(flat), Call(is_causal=True)).out.reshape(shape)
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        out = torch.nn.functional.scaled_dot_product_attention(q, k.contiguous(), v.contiguous(), is_causal=True)
    assert out.shape == weight.shape and torch.equal(out, want)
    assert torch.equal(torch_flashsdpa.attention(q, k, v, is_causal=True), want)
    lse = torch_flashsdpa.attention(q, k, v, is_causal=True, return_lse=True)[1]
    assert lse.shape == shape[:-1]


@pytest.mark.parametrize("shape", ((7, 16), (3, 7, 16), (2, 2, 3, 7, 16)), ids=str)
def test_what_no_grad_made_may_be_edited_outside(shape):
    """Of a view made under no_grad() torch forbids that; stock's results of any rank are none. With gradients it is one, so
    that an edit of what the backward reads is noticed."""
    import torch_flashsdpa

    q = torch.randn(shape, requires_grad=True)
    factor = torch.full((), 2.0, requires_grad=True)
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        with torch.no_grad():
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        recorded = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with torch.no_grad():
        own, lse = torch_flashsdpa.attention(q, q, q, return_lse=True)
    want = out.sum() + own.sum() + lse.sum()
    for t in (out, own, lse):
        t.mul_(factor)
    (out.sum() + own.sum() + lse.sum()).backward()
    assert torch.allclose(factor.grad, want)
    recorded.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recorded.sum().backward()


def inputs_like(tensors):
    from oracle import Inputs

    return Inputs(*tensors)
