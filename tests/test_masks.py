"""Masks of every kind, broadcast and stride against the float64 oracle, and the two meanings of "removed"."""

import pytest
import torch
import torch_flashsdpa
from cases import Case, broadcast_cases, inputs, make_mask, mask_kind_cases, mask_stride_cases
from oracle import INF, Call, Inputs, bytes_allocated, check, generator, ops, reference, run_sdpa, virtual
from torch.nn.functional import scaled_dot_product_attention as sdpa


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
    """A NaN at an allowed score, or a bias of +inf, spoils its row, and no other."""
    for seq_k in (5, 300):
        x = inputs(Case(f"nan{seq_k}", seq=(66, seq_k), dtype=dtype, mask="bias:qk", grad=""))
        x.mask[..., 3, 2] = float("nan")
        x.mask[..., 4, :] = -INF
        x.mask[..., 5, 1] = INF  # inf - inf, as the formula has it
        x.q[:, :, 7] = float("nan")
        got = check(x, Call())
        spoilt = got.out.isnan().any(-1)[0, 0].nonzero().flatten().tolist()
        assert spoilt == [3, 5, 7] and (got.out[:, :, 4] == 0).all()


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


# --- a changed mask is seen ---------------------------------------------------------------------------------------------


def qkv(name, seq=150, heads=2):
    g = generator(name)
    return [torch.randn(1, heads, seq, 16, generator=g) for _ in range(3)]


def written(mask, additive):
    """A bool mask, or the same as 0 and -inf: either way its plan says all of it."""
    return torch.zeros(mask.shape).masked_fill_(~mask, -INF) if additive else mask


def sees(q, k, v, mask):
    """The unchanged call and attention() give what the mask says now."""
    want = reference(Inputs(q, k, v, mask), Call()).out
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        out = sdpa(q, k, v, attn_mask=mask)
    assert (out - want).abs().max() < 1e-5
    assert (torch_flashsdpa.attention(q, k, v, attn_mask=mask) - want).abs().max() < 1e-5


@pytest.mark.parametrize("additive", (False, True), ids=("bool", "additive"))
def test_a_mask_changed_in_inference_mode_is_seen(additive):
    """Inference tensors count no versions: nothing tells an old mask from a new one but its contents."""
    q, k, v = qkv("inference")
    with torch.inference_mode():
        masks = [written(make_mask("document", f"inference{turn}", (1, 2, 150, 150), torch.float32), additive) for turn in range(3)]
        mask = masks[0].clone()
        assert mask.is_inference()
        for new in masks:
            mask.copy_(new)
            sees(q, k, v, mask)


@pytest.mark.parametrize("seq", (30, 150), ids=("unplanned", "planned"))
def test_a_bool_mask_made_in_inference_mode_trains(seq):
    """As a model keeps one from its first evaluation. Torch saves no inference tensor; stock saves the mask as numbers."""
    with torch.inference_mode():
        mask = make_mask("document", "inference", (1, 2, seq, seq), torch.float32)
        plan, slopes = torch_flashsdpa.plan_mask(mask), torch.zeros(2)
        assert mask.is_inference() and plan.is_inference() and slopes.is_inference()
    q, k, v = (torch.randn(1, 2, seq, 16, requires_grad=True) for _ in range(3))
    gradients = []
    for backend in ("stock", "flashsdpa"):
        with torch_flashsdpa.sdpa_backend(backend, strict=True):
            gradients.append(torch.autograd.grad(sdpa(q, k, v, attn_mask=mask).square().sum(), (q, k, v)))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
    out = torch_flashsdpa.attention(q, k, v, mask_plan=plan, alibi_slopes=slopes)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients[1])


def test_another_tensor_in_the_memory_of_an_old_mask():
    """The same address, sizes, strides and version, as an allocator gives them; other contents."""
    q, k, v = qkv("memory")
    memory = torch.zeros(1, 1, 150, 150, dtype=torch.bool).numpy()
    for kind in ("causal", "random", "padding_left"):
        memory[...] = make_mask(kind, "memory", (1, 1, 150, 150), torch.float32).numpy()
        mask = torch.from_numpy(memory)
        assert mask._version == 0
        sees(q, k, v, mask)


@pytest.mark.parametrize("additive", (False, True), ids=("bool", "additive"))
def test_slices_of_one_mask_for_each_layer(additive):
    """One tensor (layers, B, H, Sq, Sk): its slices differ in their offset alone."""
    q, k, v = qkv("layers")
    masks = written(make_mask("random", "layers", (4, 2, 150, 150), torch.float32), additive)
    for _ in range(2):
        for layer in range(4):
            sees(q, k, v, masks[layer])
    x = q
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        for layer in range(4):
            x = sdpa(x, k, v, attn_mask=masks[layer])
    want = q.double()
    for layer in range(4):
        want = reference(Inputs(want, k.double(), v.double(), masks[layer]), Call()).out
    assert (x - want).abs().max() < 1e-5


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", ("qk", "bqk", "bk", "bq", "hqk", "-"))
@pytest.mark.parametrize("run", ("sdpa", "attention"))
@pytest.mark.parametrize("expanded", (False, True), ids=("size 1", "stride 0"))
def test_memory_beyond_the_mask_is_a_bit_for_each_element_as_given(axes, run, expanded):
    """Broadcast axes are not expanded, written as size 1 or as stride 0; nothing is unpadded either."""
    batch, heads, seq = 2, 6, 1024
    q, k, v = (torch.randn(batch, heads, seq, 8) for _ in range(3))
    given = make_mask(f"document:{axes}", "memory", (batch, heads, seq, seq), torch.float32)
    mask = given.expand(batch, heads, seq, seq) if expanded else given

    def step():
        if run == "attention":
            torch_flashsdpa.attention(q, k, v, attn_mask=mask)
        else:
            with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
                sdpa(q, k, v, attn_mask=mask)

    bits = given.numel() / 8 * (128 if given.size(3) == 1 else 1)  # one key takes the 16 bytes of two granules
    lists = 8 * given[..., 0, 0].numel() * (seq // 64 + 1) ** 2
    results = 4 * (q.numel() + q.numel() // 8)  # out and the log-sum-exp
    assert results + bits <= bytes_allocated(step) <= results + bits + lists + 4096


def test_a_mask_of_more_than_2_to_the_31_elements():
    """All False but in a few places, in memory that is only reserved: forward and backward find them."""
    side = 46400
    mask = virtual(side * side, torch.bool).view(side, side)
    assert mask.numel() > 2**31
    allowed = {0: [side - 1], 20000: [5, 46000], side - 1: [0, side - 70, side - 1]}
    for row, keys in allowed.items():
        mask[row, keys] = True
    q, k, v, grad = (torch.randn(1, 1, side, 8, generator=generator(f"huge{i}")) for i in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        out = sdpa(*leaves, attn_mask=mask)
    grads = torch.autograd.grad(out, leaves, grad)
    rows, keys = list(allowed), sorted({key for keys in allowed.values() for key in keys})
    small = Inputs(q[:, :, rows].detach(), k[:, :, keys].detach(), v[:, :, keys].detach(), mask[rows][:, keys][None, None],
                   grad_out=grad[:, :, rows])
    want = reference(small, Call())
    for got, name, where in ((out, "out", rows), (grads[0], "dq", rows), (grads[1], "dk", keys), (grads[2], "dv", keys)):
        expected = torch.zeros(1, 1, side, 8, dtype=torch.float64)
        expected[:, :, where] = want.out if name == "out" else want.grads[name]
        assert (got - expected).abs().max() < 1e-5, name


# --- five axes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ((1, 1, 2, 70, 70), (1, 5, 1, 1, 70), (1, 5, 2, 70, 70), (2, 70, 70)), ids=str)
def test_pair_bias_of_five_axes_with_its_gradient(shape, routed):
    """Rows of an alignment as a second batch axis: a bias for all rows by head, a padding for each row, both, as in AlphaFold."""
    g = generator(f"pair{shape}")
    q, k, v, grad = (torch.randn(1, 5, 2, 70, 16, generator=g) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v, torch.randn(shape, generator=g))]
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        assert routed(sdpa, *leaves) == 1
        grads = torch.autograd.grad(sdpa(*leaves), leaves, grad)
    mask = leaves[3].detach().double().requires_grad_()
    whole = mask.expand(1, 5, 2, 70, 70)[0]
    want = reference(Inputs(q[0].detach(), k[0].detach(), v[0].detach(), whole.detach(), True, grad_out=grad[0]), Call()).grads
    (dmask,) = torch.autograd.grad(whole, mask, want["dmask"])
    for got, expected in zip(grads, (want["dq"][None], want["dk"][None], want["dv"][None], dmask)):
        assert got.shape == expected.shape and (got - expected).abs().max() < 1e-4


def test_a_mask_that_broadcasts_over_some_batch_axes_goes_to_stock(routed):
    """One stride cannot say it. attention() copies such a mask, the unchanged call leaves it to stock, with the reason."""
    g = generator("some axes")
    q, k, v = (torch.randn(2, 3, 2, 70, 16, generator=g) for _ in range(3))
    for shape in ((2, 1, 2, 70, 70), (1, 3, 1, 1, 70)):
        mask = torch.randn(shape, generator=g)
        flat = [t.flatten(0, 1) for t in (q, k, v, mask.expand(2, 3, *shape[2:]))]
        want = reference(Inputs(*flat), Call()).out.view_as(q)
        with torch_flashsdpa.sdpa_backend("flashsdpa"):
            assert routed(sdpa, q, k, v, attn_mask=mask) == 0
            assert (sdpa(q, k, v, attn_mask=mask) - want).abs().max() < 1e-5
        assert "some of the 2 batch axes" in str(torch_flashsdpa.explain(q, k, v, mask, backend="flashsdpa"))
        assert (torch_flashsdpa.attention(q, k, v, attn_mask=mask) - want).abs().max() < 1e-5


@pytest.mark.parametrize("axes", ("-", "q", "k", "h"))
def test_a_mask_of_few_numbers_sums_the_gradients_of_many_scores(axes):
    """Sums of up to 2^20 equal terms: in float32, one after the other, they would be off by 1e-4 of the sum and more."""
    zeros = torch.zeros(1, 4, 512, 8)
    mask = torch.zeros([n if letter in axes else 1 for letter, n in zip("bhqk", (1, 4, 512, 509))], requires_grad=True)
    _, lse = ops().forward(zeros, zeros[:, :, :509], zeros[:, :, :509], attn_mask=mask)
    (grad,) = torch.autograd.grad(lse, mask, torch.ones_like(lse))
    want = 4 * 512 / mask.numel()  # the weights of a row sum to 1
    assert (grad / want - 1).abs().max() < 1e-6
