"""Reports from the field, one test each, named after the report: masks, bands, large numbers, log-sum-exps.

The right value is the float64 oracle's. Sizes are cut to what a CPU does in a moment; tile edges and ratios are kept.
"""

import pytest
import torch
import torch_flashsdpa
from cases import Case, inputs, make_mask
from oracle import (INF, Call, Inputs, bytes_allocated, check, check_counting, generator, ops, reference, run_op, run_sdpa,
                    virtual)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

CAUSAL, CAUSAL_BR = Call(is_causal=True), Call(is_causal=True, bottom_right=True)
HALVES = (torch.bfloat16, torch.float16)


def normal(name, *shapes, dtype=torch.float32):
    g = generator(name)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def test_up_001_boolean_mask_all_false_rows():
    (t,) = normal("up001", (1, 1, 8, 8))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4:], mask[:, 4:] = False, False
    for run, m in ((run_op, mask[None, None]), (run_sdpa, mask)):
        got = run(Inputs(t, t, t, m, grad_out=torch.ones(1, 1, 8, 8)), Call())
        assert (got.out[..., 4:, :] == 0).all()
        first = t[:, :, :4]
        want = reference(Inputs(first, first, first, grad_out=torch.ones(1, 1, 4, 8)), Call())
        assert (got.out[:, :, :4] - want.out).abs().max() < 1e-6
        for name in ("dq", "dk", "dv"):
            assert (got.grads[name][..., 4:, :] == 0).all() and (got.grads[name][:, :, :4] - want.grads[name]).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_up_003_first_key_tile_masked_by_the_lowest_finite_number(dtype):
    (t, grad) = normal("up003", (2, 3, 441, 64), (2, 3, 441, 64), dtype=dtype)
    lowest = torch.finfo(dtype).min
    mask = torch.zeros(1, 1, 441, 441, dtype=dtype)
    mask[..., :128] = lowest
    got = check(Inputs(t, t, t, mask, grad_out=grad))
    live = t[:, :, 128:]
    want = reference(Inputs(t, live, live), Call())
    assert (got.out - want.out).abs().max() < max(4 * torch.finfo(dtype).eps, 2e-5)
    mask[..., 5, :] = lowest  # a whole row of it: finite, so the plain mean wherever q k is lost in it
    got = check(Inputs(t, t, t, mask, grad_out=grad))
    assert all(g.isfinite().all() for g in got.grads.values())
    if dtype == torch.float32:
        assert (got.out[:, :, 5] - t.mean(2)).abs().max() < 1e-5


@pytest.mark.parametrize("flip", (False, True), ids=("forward", "reversed"))
@pytest.mark.parametrize("sign", (-1, 1))
def test_up_004_strongly_negative_logits_after_a_masked_block(sign, flip):
    q, k, v, grad = normal("up004", (1, 14, 88, 64), (1, 2, 448, 64), (1, 2, 448, 64), (1, 14, 88, 64))
    q[..., 0], k[..., 0] = 30 * sign, -30  # every scaled logit near sign * -112
    call = CAUSAL_BR
    if flip:  # the mirrored band: the masked block is met from the other side
        q, k, v, grad = (t.flip(2).contiguous() for t in (q, k, v, grad))
        mask = CAUSAL_BR.visible(88, 448).flip(0, 1)[None, None].contiguous()
        check(Inputs(q, k, v, mask, grad_out=grad))
        check(Inputs(q, k, v, mask, planned=True, grad_out=grad))
    else:
        check(Inputs(q, k, v, grad_out=grad), call)


def test_up_006_lse_of_rows_without_a_key():
    q, k, v = normal("up006", (1, 2, 7, 16), (1, 2, 3, 16), (1, 2, 3, 16))
    got = check(Inputs(q, k, v, grad_out=torch.ones(1, 2, 7, 16)), CAUSAL_BR)
    assert (got.out[:, :, :4] == 0).all() and (got.lse[:, :, :4] == -INF).all() and got.lse[:, :, 4:].isfinite().all()
    real = run_op(Inputs(q, k, v), Call())
    empty = torch.zeros_like(real.out), torch.full_like(real.lse, -INF)
    for pair in ((empty, (real.out, real.lse)), ((real.out, real.lse), empty)):
        out, lse = torch_flashsdpa.merge_partials(*pair[0], *pair[1])
        assert torch.equal(out, real.out) and torch.equal(lse, real.lse)


@pytest.mark.parametrize("kind", ("causal", "padding", "window", "custom", "custom planned", "additive", "additive planned"))
def test_up_007_masked_scores_have_no_weight(kind):
    seq_q, seq_k = 200, 130
    call, mask = Call(), None
    if kind == "causal":
        call = CAUSAL_BR
    elif kind == "window":
        call = Call(window=(5, 0))  # queries beyond 135 see nothing
    elif kind == "padding":
        mask = torch.zeros(1, 1, 1, seq_k, dtype=torch.bool)
    else:
        mask = torch.ones(1, 1, seq_q, seq_k, dtype=torch.bool)
        mask[..., 3:9, :], mask[..., 64:128, :] = False, False
        if kind.startswith("additive"):
            mask = torch.zeros(mask.shape).masked_fill_(~mask, -INF)
    planned = kind.endswith("planned")
    check_counting(1, 2, 2, seq_q, seq_k, 128, torch.float32, mask, call, planned=planned)
    q, k, v, grad = normal("up007", *[(1, 2, s, 16) for s in (seq_q, seq_k, seq_k, seq_q)])
    check(Inputs(-9 * q.abs(), 9 * k.abs(), v, mask, planned=planned, grad_out=grad), call)  # every logit negative


@pytest.mark.parametrize("dim, seq_k", ((8, 5), (64, 64), (128, 300)))
@pytest.mark.parametrize("removal, where", [(r, w) for r in ("additive", "bool") for w in
                                            ("query", "allowed key", "removed key", "mask") if (r, w) != ("bool", "mask")])
def test_up_009_nan_is_not_taken_for_masked(where, removal, dim, seq_k):
    q, k, v = normal("up009", (1, 1, 3, dim), (1, 1, seq_k, dim), (1, 1, seq_k, dim))
    keep = torch.zeros(1, 1, 3, seq_k, dtype=torch.bool)
    keep[..., 1, : seq_k // 2 + 1], keep[..., 2, :2] = True, True  # row 0 has no key
    nan = float("nan")
    mask = keep if removal == "bool" else torch.zeros(keep.shape).masked_fill_(~keep, -INF)
    if where == "query":
        q[..., 1, 0] = nan
    elif where == "allowed key":
        k[..., seq_k // 2, 0] = nan
    elif where == "mask":
        mask[..., 1, seq_k // 2] = nan
    else:
        k[..., seq_k - 1, 0] = nan
    for planned in (False, True):
        got = check(Inputs(q, k, v, mask, planned=planned))
        assert (got.out[..., 0, :] == 0).all()
        assert got.out[..., 1, :].isnan().all() == (where != "removed key") and got.out[..., 2, :].isfinite().all()


def test_up_010_very_large_bfloat16_with_one_or_two_keys():
    for keys in (1, 2):
        t = torch.full((1, 1, keys, 64), 133120.0, dtype=torch.bfloat16)
        got = run_op(Inputs(t[:, :, :1], t, t, grad_out=torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)), Call())
        assert torch.equal(got.out, t[:, :, :1]) and all(g.isfinite().all() for g in got.grads.values())


@pytest.mark.parametrize("queries", (76, 34, 146))
def test_up_012_causal_segment_where_queries_outnumber_keys(queries):
    """Each segment of the packed batch alone, since there is no packed entry yet."""
    q, k, v, grad = normal("up012", *[(1, 1, s, 32) for s in (queries, 1, 1, queries)], dtype=torch.float16)
    got = check(Inputs(q, k, v, grad_out=grad), CAUSAL_BR)
    assert (got.out[:, :, :-1] == 0).all() and (got.grads["dq"][:, :, :-1] == 0).all() and torch.equal(got.out[:, :, -1:], v)


@pytest.mark.parametrize("level", (-200, -120, 0, 200))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_up_013_strongly_negative_lse_and_a_partial_last_tile(dtype, level):
    for length in (64, 192, 1, 31, 65, 100, 127, 129, 160, 255):
        q, k, v, grad = (t.mul_(0.1) for t in normal(f"up013{length}", *[(1, 1, length, 64)] * 4, dtype=dtype))
        q[..., 0], k[..., 0] = abs(level) ** 0.5 * 8**0.5, (level / 1) / max(abs(level) ** 0.5, 1) * 8**0.5
        full = torch.ones(1, 1, length, length, dtype=torch.bool)
        check(Inputs(q, k, v, full, grad_out=grad))
        by_mask = check(Inputs(q, k, v, full.tril(), grad_out=grad))
        by_flag = check(Inputs(q, k, v, grad_out=grad), CAUSAL)
        dq, want = by_mask.grads["dq"], by_flag.grads["dq"]
        assert (dq - want).abs().max() <= 4 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_up_016_float32_mask_with_half_precision(dtype):
    q, k, v = normal("up016", *[(2, 4, 32, 16)] * 3, dtype=dtype)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(32)
    x = Inputs(q, k, v, mask.expand(1, 1, 32, 32), grad_out=q)
    check(x), check(x, run=run_sdpa)
    with torch_flashsdpa.sdpa_backend("flashsdpa"):
        assert torch.equal(sdpa(q, k, v, attn_mask=mask), run_op(x, Call()).out)


def test_up_024_one_query_with_is_causal():
    q, k, v = normal("up024", (1, 2, 1, 16), (1, 2, 9, 16), (1, 2, 9, 16))
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        out = sdpa(q, k, v, is_causal=True)
    assert (out - v[:, :, :1]).abs().max() < 1e-6  # top-left: key 0 alone
    all_keys = reference(Inputs(q, k, v), Call()).out
    assert (torch_flashsdpa.attention(q, k, v, is_causal=True, bottom_right=True) - all_keys).abs().max() < 1e-6
    bias = causal_lower_right(1, 9)
    with torch_flashsdpa.sdpa_backend("flashsdpa"):
        assert (sdpa(q, k, v, attn_mask=bias) - all_keys).abs().max() < 1e-6


def test_up_025_static_cache_longer_than_the_prefix():
    q, k, v = normal("up025", (1, 2, 7, 32), (1, 2, 64, 32), (1, 2, 64, 32))
    k[:, :, 7:], v[:, :, 7:] = 3e4, -3e4
    got = check(Inputs(q, k, v, grad_out=torch.ones(1, 2, 7, 32)), CAUSAL)
    want = reference(Inputs(q, k[:, :, :7], v[:, :, :7]), CAUSAL)
    assert (got.out - want.out).abs().max() < 1e-6
    assert (got.grads["dv"][:, :, 7:] == 0).all() and (got.grads["dk"][:, :, 7:] == 0).all()


@pytest.mark.parametrize("width", (1, 2, 3, 64, 65))
def test_up_027_window_of_w_tokens(width):
    """W tokens, self included, are (W - 1, 0): min(i + 1, W) keys in row i."""
    call = Call(window=(width - 1, 0))
    check_counting(1, 1, 1, 150, 150, 150, torch.float32, None, call)
    q = torch.zeros(1, 1, 150, 8)
    lse = torch_flashsdpa.attention(q, q, q, window=(width - 1, 0), return_lse=True)[1]
    assert torch.equal(lse.exp().round().int()[0, 0], (torch.arange(150) + 1).clamp(max=width).int())


@pytest.mark.parametrize("window", ((1, 0), (2, 0), (3, 0), (256, 0), (0, 0), (2, 3)), ids=str)
def test_up_028_left_bound_is_inclusive_on_every_path(window):
    """Band, bool mask and additive mask of one window, in half precision, decoding too."""
    for seq_q, seq_k in ((520, 520), (1, 520), (300, 520)):
        call = Call(window=window, bottom_right=True)
        q, k, v = normal(f"up028{window}", (1, 2, seq_q, 64), (1, 2, seq_k, 64), (1, 2, seq_k, 64), dtype=torch.float16)
        mask = call.visible(seq_q, seq_k)[None, None]
        results = [check(Inputs(q, k, v), call).out, check(Inputs(q, k, v, mask)).out,
                   check(Inputs(q, k, v, torch.zeros(mask.shape).masked_fill_(~mask, -INF), planned=True)).out]
        assert all((r - results[0]).abs().max() < 4e-3 for r in results)


@pytest.mark.parametrize("window", ((-1, -3), (-2, 0), (-5, 5)), ids=str)
def test_up_030_negative_bounds_are_refused(window):
    """Only -1 means open; a band that excludes the diagonal is not served, and says so."""
    q, k, v = normal("up030", *[(1, 1, 8, 8)] * 3)
    with pytest.raises(RuntimeError, match="window_(left|right) is -[235]"):
        torch_flashsdpa.attention(q, k, v, window=window)


def test_up_031_zero_width_window_is_never_an_empty_mask():
    """A configured width W becomes (W - 1, 0): W = 0 is then the open window, and (0, 0) sees itself."""
    q, k, v = normal("up031", *[(1, 1, 70, 8)] * 3)
    assert (torch_flashsdpa.attention(q, k, v, window=(0, 0)) - v).abs().max() < 1e-6
    open_left = torch_flashsdpa.attention(q, k, v, window=(0 - 1, 0))
    assert (open_left - reference(Inputs(q, k, v), CAUSAL).out).abs().max() < 1e-6


@pytest.mark.parametrize("seq", (73728, 98304))
def test_up_034_row_offsets_in_the_mask_beyond_32_bits(seq):
    """The last rows of a (S, S) mask in memory that is only reserved: offsets above 2^31 and 2^32."""
    rows, keys = 96, 192
    mask = virtual(seq * seq, torch.bool).view(seq, seq)[seq - rows :, :keys][None, None]
    mask.copy_(make_mask("document", f"up034{seq}", (1, 1, rows, keys), torch.float32))
    q, k, v, grad = normal("up034", *[(1, 1, s, 16) for s in (rows, keys, keys, rows)], dtype=torch.bfloat16)
    for planned in (False, True):
        check(Inputs(q, k, v, mask, planned=planned, grad_out=grad))


@pytest.mark.parametrize("row_stride", (2**31 // 64 - 1, 2**31 // 64 + 1, 2**32 // 64 + 1))
def test_up_036_up_037_backward_with_mask_offsets_around_32_bits(row_stride):
    """No threshold at sqrt(2^31) keys: rows on both sides of it, all True equals unmasked."""
    mask = virtual(66 * row_stride, torch.bool).as_strided((1, 1, 66, 130), (0, 0, row_stride, 1))
    mask.fill_(True)
    q, k, v = normal("up036", (1, 2, 66, 16), (1, 2, 130, 16), (1, 2, 130, 16))
    x = Inputs(q, k, v, mask, grad_out=torch.ones(()).expand(1, 2, 66, 16))
    got, plain = check(x), check(Inputs(q, k, v, grad_out=x.grad_out))
    assert all((got.grads[n] - plain.grads[n]).abs().max() < 1e-5 for n in got.grads)
    mask[..., 64:, :100] = False  # the rows past the threshold are really read
    check(x)


def test_up_039_block_diagonal_mask_equals_separate_calls():
    q, k, v = normal("up039", *[(1, 2, 600, 80)] * 3, dtype=torch.bfloat16)
    mask = torch.zeros(1, 1, 600, 600, dtype=torch.bool)
    segments = [slice(0, 128), slice(128, 256), slice(256, 384), slice(543, 600)]
    for s in segments:
        mask[..., s, s] = True
    for planned in (False, True):
        got = check(Inputs(q, k, v, mask, planned=planned))
        for s in segments:
            alone = check(Inputs(q[:, :, s], k[:, :, s], v[:, :, s]))
            assert (got.out[:, :, s] - alone.out).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps
        assert (got.out[:, :, 384:543] == 0).all()


def test_up_040_low_rank_mask_over_five_axes():
    q, k, v = normal("up040", (3, 2, 4, 7, 16), (3, 2, 4, 5, 16), (3, 2, 4, 5, 32))
    mask = torch.tensor([True, False, True, True, False])[None, None]
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        out = sdpa(q, k, v, attn_mask=mask)
    want = reference(Inputs(*(t.flatten(0, 1) for t in (q, k, v)), mask[None]), Call()).out
    assert out.shape == (3, 2, 4, 7, 32) and (out.flatten(0, 1) - want).abs().max() < 1e-6


@pytest.mark.parametrize("run", (run_op, run_sdpa))
def test_up_042_only_the_mask_needs_a_gradient(run):
    x = inputs(Case("up042", seq=(64, 64), dim=(16, 16), heads=(1, 1), mask="bias"))
    want = inputs(Case("up042", seq=(64, 64), dim=(16, 16), heads=(1, 1), mask="bias"))
    want.mask_grad = True
    mask = x.mask.clone().requires_grad_()
    if run is run_op:
        out, _ = ops().forward(x.q, x.k, x.v, attn_mask=mask)
    else:
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            out = sdpa(x.q, x.k, x.v, attn_mask=mask)
    out.backward(x.grad_out)
    assert (mask.grad - reference(want, Call()).grads["dmask"]).abs().max() < 1e-6


@pytest.mark.parametrize("axes", ("hqk", "bqk", "qk", "bk", "bhqk"))
@pytest.mark.parametrize("kind", ("bias", "bias32"))
def test_up_043_gradient_of_a_broadcast_bias(axes, kind):
    case = Case(f"up043{axes}", batch=4, heads=(3, 3), seq=(70, 66), dim=(80, 80), dtype=torch.float16, mask=f"{kind}:{axes}",
                mask_grad=True)
    for run in (run_op, run_sdpa):
        got = check(inputs(case), run=run)
        assert got.grads["dmask"].shape == inputs(case).mask.shape


def test_up_045_an_all_false_mask_is_applied_or_the_call_goes_to_stock():
    q, k, v = normal("up045", *[(1, 8, 10, 64)] * 3, dtype=torch.bfloat16)
    mask = torch.zeros(1, 1, 10, 10, dtype=torch.bool)
    for backend, strict in (("flashsdpa", True), ("auto", False)):
        with torch_flashsdpa.sdpa_backend(backend, strict=strict):
            assert (sdpa(q, k, v, attn_mask=mask) == 0).all() and (sdpa(q, k, v) != 0).any()


def test_up_046_broadcast_mask_is_not_copied_per_head():
    """Everything allocated in the call, forward and backward, stays below one copy of the mask per head."""
    heads, seq = 12, 512
    q, k, v = (t.requires_grad_() for t in normal("up046", *[(1, heads, seq, 8)] * 3))
    mask = torch.randn(1, 1, seq, seq).expand(1, heads, seq, seq)

    def step():
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            sdpa(q, k, v, attn_mask=mask).sum().backward()

    assert 4 * q.numel() * 4 <= bytes_allocated(step) < heads * seq * seq * 4 / 2
    check(Inputs(q.detach(), k.detach(), v.detach(), mask))


@pytest.mark.parametrize("masked", (False, True))
def test_up_126_large_norms_in_float16_stay_finite(masked):
    q, k, v, grad = normal("up126", *[(1, 2, 70, 64)] * 4, dtype=torch.float16)
    mask = make_mask("random", "up126", (1, 2, 70, 70), torch.float16) if masked else None
    x = Inputs(q * 60, k * 60, v, mask, grad_out=grad)  # scores to 2e5: beyond float16
    got = check(x)
    assert got.out.isfinite().all() and all(g.isfinite().all() for g in got.grads.values())


def test_up_127_constant_huge_activations():
    """A layer fed with the constant 1000 for a few steps: our gradients are finite wherever float64's are."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 64, dropout=0.0, batch_first=True)
    twin = torch.nn.TransformerEncoderLayer(128, 4, 64, dropout=0.0, batch_first=True).double()
    twin.load_state_dict(layer.state_dict())
    for step in range(3):
        with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
            layer(torch.full((2, 70, 128), 1000.0)).square().sum().backward()
        twin(torch.full((2, 70, 128), 1000.0, dtype=torch.float64)).square().sum().backward()
        for ours, want in zip(layer.parameters(), twin.parameters()):
            assert torch.equal(ours.grad.isfinite(), want.grad.isfinite())
        for module in (layer, twin):
            torch.optim.SGD(module.parameters(), lr=1e-3).step()


def test_up_115_merging_partials_of_very_different_weight():
    g = generator("up115")
    out1, out2 = torch.randn(2, 3, 5, 8, generator=g), torch.randn(2, 3, 5, 8, generator=g)
    for a, b in ((0.0, -91.0), (0.0, 500.0), (3e4, -3e4), (-1e4, -1e4 + 1), (-INF, 2.0), (-INF, -INF)):
        lse1, lse2 = torch.full((2, 3, 5), a), torch.full((2, 3, 5), b)
        out, lse = torch_flashsdpa.merge_partials(out1, lse1, out2, lse2)
        swapped = torch_flashsdpa.merge_partials(out2, lse2, out1, lse1)
        want_lse = torch.logaddexp(lse1.double(), lse2.double())
        weights = torch.stack([lse1, lse2]).double().sub(want_lse).exp().nan_to_num(0.0).unsqueeze(-1)
        assert (out - (weights[0] * out1 + weights[1] * out2)).abs().max() < 1e-6
        assert torch.equal(lse.isinf(), want_lse.isinf()) and (lse - want_lse).nan_to_num(0.0).abs().max() <= 2e-3
        assert torch.allclose(out, swapped[0], atol=1e-7) and torch.equal(lse, swapped[1])
