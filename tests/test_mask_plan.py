"""flashsdpa::mask_plan against the plan written in plain torch, and what a plan changes: only the work, not the result."""

import pytest
import torch
from cases import BROADCASTS, FLOATS, MASK_KINDS, MASK_STRIDES, Case, inputs, make_mask
from oracle import INF, Call, Result, bytes_allocated, check, generator, ops, run_op
from reference_plan import BITS, EMPTY, FULL, MIXED, granule_classes, reference_plan

import torch_flashsdpa

SIZES = (2, 3, 130, 257)


def same(mask):
    plan, want = ops().mask_plan(mask), reference_plan(mask)
    assert plan.dtype == torch.int32 and plan.is_contiguous()
    assert plan.shape == want.shape
    assert torch.equal(plan, want), f"first of {int((plan != want).sum())}: {(plan != want).nonzero()[0].tolist()}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_kinds(kind, dtype):
    same(make_mask(kind, "plan", SIZES, dtype))


@pytest.mark.parametrize("kind", ("granules", "bias_inf"))
@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
def test_layouts(axes, strides, kind):
    same(make_mask(f"{kind}:{axes or '-'}:{strides}", "plan", SIZES, torch.bfloat16))


@pytest.mark.parametrize("seq_q", (0, 1, 63, 64, 65, 128, 129))
@pytest.mark.parametrize("seq_k", (0, 1, 63, 64, 65, 128, 129))
def test_sizes(seq_q, seq_k):
    for kind in ("random", "all_true", "all_false", "bias_inf"):
        same(make_mask(kind, "plan", (1, 2, seq_q, seq_k), torch.float32))


@pytest.mark.parametrize("value, want", [
    (0.0, FULL), (-0.0, FULL), (-INF, EMPTY), (1e-45, MIXED), (-1e30, MIXED), (torch.finfo(torch.float32).min, MIXED),
    (INF, MIXED), (float("nan"), MIXED)], ids=str)
def test_classes_of_values(value, want):
    """Only 0 of either sign is nothing to do, only -inf removes. A subnormal and the lowest finite number are arithmetic."""
    mask = torch.full((1, 1, 65, 64), value)
    assert (granule_classes(mask) == want).all()
    same(mask)
    mask[0, 0, 64, 63] = 0.0 if want != FULL else -INF  # the only other element of its granule
    same(mask)


@pytest.mark.parametrize("seq_q", (129, 130))
@pytest.mark.parametrize("position", ((0, 0), (63, 63), (64, 0), (0, 64), (128, 256), (128, 192), (128, 255)), ids=str)
def test_one_element_makes_a_granule_mixed(position, seq_q):
    """One False among True, one True among False, at corners and in partial granules, those of one row or one column
    too: the element is not missed."""
    for fill in (True, False):
        mask = torch.full((1, 1, seq_q, 257), fill)
        mask[(0, 0, *position)] = not fill
        same(mask)
        classes = granule_classes(mask)[0, 0]
        assert (classes != (FULL if fill else EMPTY)).sum() == 1


def test_header_counts():
    mask = torch.zeros(1, 1, 128, 192, dtype=torch.bool)
    mask[..., :64, :64] = True  # full
    mask[..., 64, 130] = True  # mixed
    words = ops().mask_plan(mask)[0, 0].tolist()
    assert words[:4] == [2, 4, 1, 1]
    assert words[4:8] == [1, 0 << 2 | FULL, 0, 0] and words[8:12] == [1, 2 << 2 | BITS, 0, 0]  # by query granule
    assert words[12:15] == [1, 0 << 2 | FULL, 0] and words[15:18] == [0, 0, 0]  # by key granule
    assert words[18:21] == [1, 1 << 2 | BITS, 0] and words[21:24] == [0, 0, 0]
    rows = [words[24 + 8 * row : 32 + 8 * row] for row in range(128)]  # three granules of keys and one for evenness
    assert rows == [[-1, -1] + 6 * [0]] * 64 + [4 * [0] + [1 << 2, 0, 0, 0]] + [8 * [0]] * 63 and len(words) == 24 + 128 * 8


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_a_plan_changes_no_result(kind):
    """With its plan or without: within the same bound, and the same rows exactly 0."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(kind, seq=(140, 270), dim=(16, 16), dtype=dtype, mask=kind, mask_grad=dtype != torch.bfloat16)
        x = inputs(case)
        if x.mask.dtype == torch.bool:
            x.mask_grad = False
        x.planned = False
        check(x, Call())
        x.planned = True
        check(x, Call())


def test_a_skipped_granule_is_not_read():
    """NaN in K and V of granules that the plan rules out cannot reach the result: the work is really left out."""
    g = generator("skipped")
    q, k, v = (torch.randn(1, 2, 192, 16, generator=g) for _ in range(3))
    mask = torch.ones(1, 1, 192, 192, dtype=torch.bool)
    mask[..., 64:128] = False
    want = ops().forward(q, k, v, attn_mask=mask, mask_plan=ops().mask_plan(mask))
    k[:, :, 64:128], v[:, :, 64:128] = float("nan"), float("nan")
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    got = ops().forward(q, k, v, attn_mask=mask, mask_plan=ops().mask_plan(mask))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    grads = torch.autograd.grad(got[0].sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[1][:, :, 64:128] == 0).all() and (grads[2][:, :, 64:128] == 0).all()


def test_two_masks_of_one_shape_and_storage():
    """A mask changed in place gets a new plan: through attention and SDPA nothing stale is used."""
    import torch_flashsdpa

    x = inputs(Case("stale", seq=(130, 130), mask="causal"))
    for step in range(3):
        x.mask.copy_(make_mask(("causal", "random", "padding")[step], f"stale{step}", (1, 2, 130, 130), torch.float32))
        x.grad_out = None
        want = check(x, Call())
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            out = torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=x.mask)
        assert torch.allclose(out, want.out, atol=1e-6)
        assert torch.allclose(torch_flashsdpa.attention(x.q, x.k, x.v, attn_mask=x.mask), want.out, atol=1e-6)


@pytest.mark.parametrize("spoil", [
    lambda plan: plan.long(), lambda plan: plan[..., :-1], lambda plan: plan.expand(2, -1, -1),
    lambda plan: plan[0], lambda plan: torch.stack([plan, plan], -1)[..., 0]],
    ids=("dtype", "words", "batch", "rank", "strides"))
def test_a_plan_that_does_not_fit_is_refused(spoil):
    x = inputs(Case("spoil", seq=(130, 130), mask="causal:qk"))
    plan = spoil(ops().mask_plan(x.mask))
    with pytest.raises(RuntimeError, match="mask_plan is .*give flashsdpa::mask_plan"):
        ops().forward(x.q, x.k, x.v, attn_mask=x.mask, mask_plan=plan)


@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda a: a or "none")
@pytest.mark.parametrize("kind", ("random", "granules", "rows_false", "padding"))
def test_a_plan_alone_says_all_of_a_bool_mask(kind, axes):
    for lengths in ((130, 200), (3, 400)):
        x = inputs(Case("alone", 2, (4, 2), lengths, (16, 16), mask=f"{kind}:{axes or '-'}"))
        leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
        plan = ops().mask_plan(x.mask)
        for options in ({}, {"is_causal": True}):
            want = ops().forward(*leaves, attn_mask=x.mask, mask_plan=plan, **options)
            got = ops().forward(*leaves, mask_plan=plan, **options)
            assert all(torch.equal(a, b) for a, b in zip(got, want))
            grads = [torch.autograd.grad(out, leaves, x.grad_out) for out in (got[0], want[0])]
            assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_a_plan_alone_of_other_sizes_is_refused():
    x = inputs(Case("alone", seq=(130, 130), mask="causal:qk"))
    for mask in (x.mask[..., :100], x.mask.expand(1, 3, 130, 130), x.mask.expand(2, 1, 130, 130)):
        with pytest.raises(RuntimeError, match="mask_plan is .*give the plan of a mask that broadcasts"):
            ops().forward(x.q, x.k, x.v, mask_plan=ops().mask_plan(mask))


def test_a_plan_of_another_version_is_refused():
    """The first word is the version: a plan stored by another release is not misread."""
    x = inputs(Case("version", seq=(130, 130), mask="causal:qk"))
    plan = ops().mask_plan(x.mask)
    plan[..., 0] += 1
    with pytest.raises(RuntimeError, match="version"):
        ops().forward(x.q, x.k, x.v, attn_mask=x.mask, mask_plan=plan)


def test_a_plan_with_a_count_that_its_list_cannot_have_is_refused():
    """In any plane and row: the kernels would read past the list, and past the plan. With its mask or alone."""
    x = inputs(Case("counts", 2, (2, 2), (130, 200), (8, 8), mask="random:bhqk"))
    for batch, head, row, count in ((0, 0, 0, 5), (1, 1, 2, -1), (1, 0, 1, 2**31 - 1), (0, 1, 2, -(2**31))):
        plan = ops().mask_plan(x.mask)
        plan[batch, head, 4 + row * 5] = count
        for mask in (x.mask, None):
            with pytest.raises(RuntimeError, match=f"mask_plan counts {count} granules in row {row}, where there are 0 to 4"):
                ops().forward(x.q, x.k, x.v, attn_mask=mask, mask_plan=plan)


def test_a_plan_of_nonsense_within_its_lists_ends():
    """What the lists and the bits say is taken on trust, but nothing outside the plan is read, whatever it is."""
    x = inputs(Case("nonsense", 1, (2, 2), (130, 200), (8, 8), mask="random:hqk"))
    true = ops().mask_plan(x.mask)
    leaves = [tensor.requires_grad_() for tensor in (x.q, x.k, x.v)]
    g = generator("nonsense")
    for _ in range(20):
        plan = torch.randint(-(2**31), 2**31, true.shape, dtype=torch.int32, generator=g)
        plan[..., 0] = true[..., 0]
        plan[..., 4:19:5] = torch.randint(0, 5, (1, 2, 3), dtype=torch.int32, generator=g)
        for mask in (x.mask, None):
            out, _ = ops().forward(*leaves, attn_mask=mask, mask_plan=plan)
            torch.autograd.grad(out.sum(), leaves)
            assert out.isfinite().all()


@pytest.mark.parametrize("mask, match", [
    (torch.ones(4, 4, dtype=torch.bool), "attn_mask has 2 dimensions; give 4"),
    (torch.ones(1, 1, 4, 4, dtype=torch.int64), "attn_mask is int64.*supported: bool"),
    (torch.ones(1, 1, 4, 4, dtype=torch.complex64), "attn_mask is .*supported: bool")], ids=("rank", "int64", "complex"))
def test_masks_that_cannot_be_planned(mask, match):
    with pytest.raises(RuntimeError, match=match):
        ops().mask_plan(mask)


def test_plan_of_the_public_function():
    import torch_flashsdpa

    x = inputs(Case("public", seq=(130, 200), mask="granules:hqk"))
    plan = torch_flashsdpa.plan_mask(x.mask[0])
    assert torch.equal(plan, reference_plan(x.mask))
    got = torch_flashsdpa.attention(x.q, x.k, x.v, attn_mask=x.mask, mask_plan=plan)
    assert torch.equal(got, run_op(x, Call()).out)


@pytest.mark.parametrize("expanded", (False, True), ids=("size 1", "stride 0"))
@pytest.mark.parametrize("kind", ("granules:bqk", "bias_inf:qk", "padding_left:bk"))
def test_one_plan_for_many_calls_with_their_gradients(kind, expanded):
    """plan_mask() once, then layers of attention(), the mask of size 1 or expanded; a bias gets its gradient too."""
    case = Case(f"layers{kind}", 2, (4, 2), (140, 270), (16, 16), mask=kind)
    x = inputs(case)
    x.mask = x.mask.expand(2, 4, 140, 270).detach() if expanded else x.mask
    x.mask_grad = x.mask.dtype != torch.bool
    plan = torch_flashsdpa.plan_mask(x.mask)

    def attend(x, call):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        mask = x.mask.detach().requires_grad_(x.mask_grad)
        out, lse = torch_flashsdpa.attention(*leaves, mask, enable_gqa=True, mask_plan=plan, return_lse=True)
        wanted = leaves + [mask] * x.mask_grad
        return Result(out.detach(), lse.detach(), dict(zip(x.names(), torch.autograd.grad(out, wanted, x.grad_out))))

    for turn in range(2):
        check(x, Call(), run=attend)
        x.q = x.q * -0.5


PREDICATES = {
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (q - k).abs() < 40,
    "everything": lambda b, h, q, k: (q >= 0) & (k >= 0),
    "nothing": lambda b, h, q, k: (q < 0) & (k < 0),
    "by head": lambda b, h, q, k: k <= q + 50 * h - 30 * b,
}


@pytest.mark.parametrize("compile", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("name", PREDICATES)
def test_a_plan_from_a_predicate(name, compile):
    fn = PREDICATES[name]
    for seq_q, seq_k in ((1, 1), (64, 128), (130, 200), (200, 333)):
        b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(3, 1, 1)
        mask = fn(b, h, torch.arange(seq_q)[:, None], torch.arange(seq_k)).expand(2, 3, seq_q, seq_k)
        plan = torch_flashsdpa.plan_mask_fn(fn, 2, 3, seq_q, seq_k, compile=compile)
        assert torch.equal(plan, ops().mask_plan(mask.contiguous()))


@pytest.mark.parametrize("sizes", ((0, 4), (4, 0), (0, 0), (0, 200)), ids=str)
def test_a_plan_of_nothing_from_a_predicate(sizes):
    plan = torch_flashsdpa.plan_mask_fn(PREDICATES["causal"], 2, None, *sizes, compile=False)
    assert torch.equal(plan, ops().mask_plan(torch.ones(2, 1, *sizes, dtype=torch.bool)))


def test_a_predicate_that_looks_up_documents():
    documents = torch.bucketize(torch.arange(500), torch.tensor([100, 130, 400]), right=True)
    plan = torch_flashsdpa.plan_mask_fn(lambda b, h, q, k: documents[q] == documents[k], None, None, 500, 500)
    mask = documents[:, None] == documents
    assert torch.equal(plan, torch_flashsdpa.plan_mask(mask))
    x = inputs(Case("documents", 2, (4, 2), (500, 500), (16, 16)))
    out = torch_flashsdpa.attention(x.q, x.k, x.v, enable_gqa=True, mask_plan=plan)
    assert torch.equal(out, torch_flashsdpa.attention(x.q, x.k, x.v, attn_mask=mask, enable_gqa=True))


def test_a_predicate_makes_no_tensor_of_the_scores():
    """16384 x 16384: 33.5 MB of bits; the mask would be 268 MB."""
    compiled = torch_flashsdpa.plan_mask_fn(PREDICATES["causal"], 1, 1, 16384, 16384)
    used = bytes_allocated(lambda: torch_flashsdpa.plan_mask_fn(PREDICATES["causal"], 1, 1, 16384, 16384))
    assert used < 4 * compiled.numel() * compiled.element_size()
