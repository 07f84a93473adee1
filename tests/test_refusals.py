"""Every reason for which a call stays with stock PyTorch: named by explain and by strict mode, and stock's own result."""

import pytest
import torch
import torch_flashsdpa
from oracle import generator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_flashsdpa import explain, sdpa_backend
from torch_flashsdpa._loader import binding


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator(str(shape))).to(dtype)


def qkv(*shape, dtype=torch.float32):
    return dict(query=normal(*shape, dtype=dtype), key=normal(*shape, dtype=dtype), value=normal(*shape, dtype=dtype))


FOUR = qkv(2, 4, 5, 8)
STRIDED_BATCH = torch.randn(2, 6, 3, 5, 8)[:, :3]  # two batch axes that are not one axis in memory

# name -> (arguments, a part of the reason, whether stock serves the call; None: it does, unchecked)
REASONS = {
    "dropout below 0": (dict(**FOUR, dropout_p=-0.3), "dropout_p is -0.3; give a probability from 0 to 1", False),
    "dropout above 1": (dict(**FOUR, dropout_p=1.25), "dropout_p is 1.25; give a probability from 0 to 1", False),
    "head_dim": (qkv(1, 1, 5, 257), "head_dim is 257; supported: 0 to 256", True),
    "value head_dim": (
        dict(qkv(1, 1, 5, 8), value=normal(1, 1, 5, 258)), "head_dim of value is 258; supported: 0 to 256", True),
    "float8": (
        qkv(1, 1, 5, 8, dtype=torch.float8_e4m3fn),
        "dtype is Float8_e4m3fn; supported on cpu: float32, bfloat16, float16, float64", False),
    "integer": ({n: v.long() for n, v in FOUR.items()}, "dtype is int64; supported on cpu", False),
    "mixed dtypes": (
        dict(FOUR, key=FOUR["key"].double()), "have dtypes float32, float64, float32; give one dtype", False),
    "devices": (dict(FOUR, key=FOUR["key"].to("meta")), "are on cpu, meta, cpu; give them on one device", False),
    "rank 1": (
        dict(query=normal(8), key=normal(8), value=normal(8)),
        "have 1, 1, 1 dimensions; give the same number, 2 or more", False),
    "ranks differ": (dict(FOUR, key=normal(4, 5, 8)), "have 4, 3, 4 dimensions; give the same number", None),
    "batch sizes": (
        dict(FOUR, key=normal(3, 4, 5, 8), value=normal(3, 4, 5, 8)),
        "have sizes 2, 3, 3 on batch axis 0; give equal sizes or 1", False),
    "batch strides": (
        dict(query=STRIDED_BATCH, key=STRIDED_BATCH, value=STRIDED_BATCH),
        "query has 5 dimensions whose leading strides are not one batch axis; make it contiguous", True),
    "heads without the flag": (
        dict(FOUR, key=normal(2, 2, 5, 8), value=normal(2, 2, 5, 8)),
        "query has 4 heads, key 2; without enable_gqa give equal counts", False),
    "heads not a multiple": (
        dict(FOUR, key=normal(2, 3, 5, 8), value=normal(2, 3, 5, 8), enable_gqa=True),
        "query heads must be a multiple of key heads", False),
    "kv heads differ": (
        dict(FOUR, value=normal(2, 2, 5, 8), enable_gqa=True), "key and value heads differ", None),
    "head_dims differ": (dict(FOUR, key=normal(2, 4, 5, 7)), "query and key head_dim differ", False),
    "kv lengths differ": (dict(FOUR, value=normal(2, 4, 6, 8)), "key and value lengths differ", None),
    "mask dtype": (
        dict(FOUR, attn_mask=torch.ones(5, 5, dtype=torch.float64)),
        "attn_mask has dtype float64; supported: bool, float32, or the query's float32", False),
    "mask rank": (
        dict(FOUR, attn_mask=torch.ones(1, 1, 1, 5, 5)),
        "attn_mask has 5 dimensions, query 4; give at most the query's", False),
    "mask shape": (
        dict(FOUR, attn_mask=torch.ones(5, 4)), "attn_mask (1, 1, 5, 4) does not broadcast to (2, 4, 5, 5)", False),
    "mask device": (dict(FOUR, attn_mask=torch.ones(5, 5).to("meta")), "attn_mask is on meta, query on cpu", None),
    "partly broadcast batch": (
        dict(**qkv(2, 3, 4, 5, 8), attn_mask=torch.ones(2, 1, 1, 5, 5)),
        "attn_mask broadcasts over some of the 2 batch axes", True),
    "nested": (None, "query is nested or has layout", True),
    "sparse": ({n: v.to_sparse() for n, v in FOUR.items()}, "query is nested or has layout Sparse", False),
    "meta": ({n: v.to("meta") for n, v in FOUR.items()}, "device is meta; supported: cpu, cuda", True),
}


def arguments_of(name):
    arguments = REASONS[name][0]
    if arguments is None:
        nested = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])  # jagged ones never reach the dispatcher
        arguments = dict(query=nested, key=nested, value=nested)
    return arguments


def outcome(arguments):
    """The result of stock's call, or its error."""
    torch.manual_seed(5)
    try:
        return sdpa(**arguments)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", REASONS)
def test_strict_mode_names_the_reason(name):
    with sdpa_backend("flashsdpa", strict=True), pytest.raises(RuntimeError) as error:
        sdpa(**arguments_of(name))
    text = str(error.value)
    assert "strict=True forbids the fallback to stock" in text and REASONS[name][1] in text, text


@pytest.mark.parametrize("name", [n for n in REASONS if n not in ("nested", "sparse", "meta")])
def test_explain_names_the_reason(name):
    before = torch_flashsdpa.routed_calls()
    explanation = explain(**arguments_of(name), backend="flashsdpa")
    assert explanation.chosen == "stock" and torch_flashsdpa.routed_calls() == before
    assert any(REASONS[name][1] in reason for reason in explanation.reasons), explanation.reasons


@pytest.mark.parametrize("name", REASONS)
def test_stock_serves_with_its_own_result_or_error(name, routed):
    """Result, error type, error text and layout are PyTorch's own."""
    arguments, _, served = arguments_of(name), *REASONS[name][1:]
    want = outcome(arguments)
    with sdpa_backend("flashsdpa"):
        assert routed(outcome, arguments) == 0
        got = outcome(arguments)
    if served is None:
        return
    assert isinstance(want, torch.Tensor) == served, want
    if served and want.is_nested:
        assert all(torch.equal(a, b) for a, b in zip(got.unbind(), want.unbind()))
    elif served:
        assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
        assert want.is_meta or torch.equal(got, want)
    else:
        assert got == want


@pytest.mark.parametrize("name", REASONS)
def test_the_record_shows_the_reason(name):
    arguments = arguments_of(name)
    with sdpa_backend("flashsdpa"), torch_flashsdpa.record_dispatch() as record:
        outcome(arguments)
    rows = [row for row in record.rows if row["kind"] == "decision"]
    assert len(rows) == 1 and rows[0]["kernel"] == "stock" and rows[0]["count"] == 1
    assert any(REASONS[name][1] in reason for reason in rows[0]["reasons"]), rows


def test_all_reasons_are_listed_at_once():
    arguments = dict(qkv(1, 1, 5, 300), dropout_p=1.5)
    reasons = explain(**arguments, backend="flashsdpa").reasons
    assert len(reasons) >= 2
    with sdpa_backend("flashsdpa", strict=True), pytest.raises(RuntimeError) as error:
        sdpa(**arguments)
    assert all(reason in str(error.value) for reason in reasons)


def test_torchs_choice_of_backends_is_a_reason():
    with sdpa_backend("flashsdpa"), sdpa_kernel(SDPBackend.MATH):
        explanation = explain(**FOUR)
    assert explanation.chosen == "stock" and explanation.reasons


def test_the_selection_is_a_reason():
    assert explain(**FOUR, backend="stock").reasons == ["the selection is stock"]


def test_auto_says_why_it_prefers_stock():
    binding().set_auto_table([])
    try:
        explanation = explain(**FOUR, backend="auto")
        assert explanation.chosen == "stock" and len(explanation.reasons) == 1, explanation.reasons
    finally:
        from torch_flashsdpa import auto_table

        binding().set_auto_table(auto_table.rows())


def test_torch_func_and_forward_mode_are_no_reasons(routed):
    seen = []

    def probe(q):
        seen.append(explain(q, FOUR["key"], FOUR["value"], backend="flashsdpa"))
        return sdpa(q, FOUR["key"], FOUR["value"]).sum()

    with sdpa_backend("flashsdpa", strict=True), torch.autograd.forward_ad.dual_level():
        assert routed(torch.func.grad(probe), FOUR["query"]) == 1
        assert routed(torch.func.vmap(probe), FOUR["query"][None]) == 1
        assert routed(probe, torch.autograd.forward_ad.make_dual(FOUR["query"], torch.ones_like(FOUR["query"]))) == 1
    assert [e.reasons for e in seen] == [[], [], []] and "stock" not in {e.chosen for e in seen}


@pytest.mark.parametrize("feature", ("kCausal", "kBand", "kBoolMask", "kBias", "kBiasGrad", "kGqa", "kSoftcap", "kAlibi", "kSinks"))
def test_every_cpu_kernel_has_every_feature_that_could_be_a_reason(feature):
    """check_entry() names a missing feature; on the CPU no kernel lacks one, and this is where it would show."""
    words = {"kCausal": "causal", "kBand": "band", "kBoolMask": "bool", "kBias": "bias", "kBiasGrad": "bias", "kGqa": "gqa",
             "kSoftcap": "softcap", "kAlibi": "alibi", "kSinks": "sinks"}
    for entry in binding().kernel_table():
        if entry["device"] == "cpu" and entry["pass"] in ("forward", "backward"):
            assert any(words[feature] in name.lower() for name in entry["features"]), (entry["name"], entry["features"])


def test_strict_mode_serves_what_it_can(routed):
    with sdpa_backend("flashsdpa", strict=True):
        assert routed(sdpa, **FOUR) == 1
        assert routed(sdpa, **FOUR, is_causal=True, attn_mask=torch.ones(5, 5, dtype=torch.bool)) == 1
