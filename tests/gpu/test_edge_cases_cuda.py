"""Faults that users of other stacks met, on the GPU: each test is named after the id of its case. Forward, no masks."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import Case, inputs
from hopper import needs_hopper, on_the_gpu  # noqa: F401
from oracle import INF, Call, Inputs, attention64, check, generator, ops

import torch_flashsdpa

pytestmark = needs_hopper


def normal(name, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator(name), device="cpu").to("cuda", dtype)


def strict():
    return torch_flashsdpa.sdpa_backend("flashsdpa", strict=True)


def served(q, k, v, **options):
    """Through the unchanged call, where nothing but our kernel may serve it."""
    with strict():
        return F.scaled_dot_product_attention(q, k, v, **options)


def close(out, q, k, v, keep=None, scale=None):
    keep = torch.ones(q.size(2), k.size(2), dtype=torch.bool) if keep is None else keep
    want = attention64(q.double(), k.double(), v.double(), None, keep, scale or q.size(3) ** -0.5)[0]
    assert (out.double() - want).abs().max().item() < 2e-2 * want.abs().max().item()


def test_up_006_lse_of_empty_causal_rows():
    q, k, v = normal("q", 1, 2, 7, 64), normal("k", 1, 2, 3, 64), normal("v", 1, 2, 3, 64)
    out, lse = ops().forward(q, k, v, is_causal=True, bottom_right=True)
    assert (lse[:, :, :4] == -INF).all() and (out[:, :, :4] == 0).all()
    check(Inputs(q, k, v), Call(is_causal=True, bottom_right=True))


@pytest.mark.parametrize("keys", (1, 2))
def test_up_010_huge_magnitudes_and_one_key(keys):
    q = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    k = q.expand(1, 1, keys, 64)
    assert torch.equal(served(q, k, k), q)


def test_up_021_up_022_nothing_is_remembered_of_a_call_but_what_it_is():
    q, k, v = (normal(f"021{i}", 2, 4, 200, 64) for i in range(3))
    for scale in (0.1, 0.3, None, 0.1):
        close(served(q, k, v, scale=scale), q, k, v, scale=scale)
    spread = torch.empty(2, 4, 400, 64, dtype=torch.bfloat16)[:, :, ::2].copy_(k)
    assert torch.equal(served(q, spread, v), served(q, k, v))
    close(served(q.half(), k.half(), v.half()), q, k, v)


def test_up_024_one_query_and_is_causal_sees_the_first_key():
    q, k, v = normal("024", 2, 4, 1, 64), normal("024k", 2, 4, 300, 64), normal("024v", 2, 4, 300, 64)
    assert torch.equal(served(q, k, v, is_causal=True), v[:, :, :1])


@pytest.mark.parametrize("batch", (65535, 65536))
def test_up_048_batch_of_65536(batch):
    q, k, v = (torch.randn(batch, 8, 4, 64, dtype=torch.float16) for _ in range(3))
    out = served(q, k, v)
    half = batch // 2
    assert torch.equal(out, torch.cat([served(q[:half], k[:half], v[:half]), served(q[half:], k[half:], v[half:])]))
    close(out[-2:], q[-2:], k[-2:], v[-2:])


@pytest.mark.parametrize("shape", ((1, 65536, 10, 16), (1, 1, 64 * 65535 + 1, 16)), ids=str)
def test_up_049_more_heads_or_queries_than_a_grid_axis(shape):
    q, k = torch.randn(shape, dtype=torch.bfloat16), normal("049", 1, shape[1], 10, 16)
    out = served(q, k, k)
    rows = slice(shape[2] - 10, shape[2])
    close(out[:, -2:, rows], q[:, -2:, rows], k[:, -2:], k[:, -2:])


def test_up_051_swapped_axes_work():
    q = normal("051", 1, 3, 71280, 128)
    k = q[:, :, :64]
    close(served(q, k, k)[:, :, -100:], q[:, :, -100:], k, k)


def test_up_057_up_058_heads_without_the_flag():
    q, k = normal("057", 2, 8, 128, 64), normal("057k", 2, 1, 128, 64)
    close(served(q, k, k), q, k, k)
    with pytest.raises(RuntimeError):
        served(normal("058", 1, 32, 64, 64), normal("058k", 1, 8, 64, 64), normal("058v", 1, 8, 64, 64))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_up_060_grouped_heads_just_past_128_tokens(dtype):
    q, k, v = normal("060", 1, 16, 129, 256, dtype=dtype), *(normal(f"060{i}", 1, 2, 129, 256, dtype=dtype) for i in "kv")
    first = served(q, k, v, is_causal=True, enable_gqa=True)
    assert first.isfinite().all()
    for _ in range(100):
        assert torch.equal(served(q, k, v, is_causal=True, enable_gqa=True), first)


@pytest.mark.parametrize("ratio", (1, 2, 4, 6, 7, 8, 16))
def test_up_061_every_row_of_grouped_causal_heads(ratio):
    for seq in (300, 700):
        case = Case(f"061-{ratio}", 1, (2 * ratio, 2), (seq, seq), (64, 64), torch.bfloat16, call=Call(is_causal=True), grad="")
        check(inputs(case, "cuda"), case.call)


@pytest.mark.parametrize("heads", ((16, 16), (16, 4)), ids=str)
def test_up_063_query_dim_192_value_dim_128(heads):
    case = Case("063", 1, heads, (700, 700), (192, 128), torch.bfloat16, call=Call(is_causal=True), grad="")
    assert check(inputs(case, "cuda"), case.call).out.shape[-1] == 128


def test_up_064_up_069_up_070_single_and_missing_axes():
    q = normal("064", 1, 1, 2, 1)
    k = normal("064k", 1, 1, 1, 1)
    for query in (q, q.transpose(2, 3).contiguous().transpose(2, 3)):
        assert torch.equal(served(query, k, k), k.expand(1, 1, 2, 1))
    v = normal("069", 1, 16, 16, 1)
    empty = torch.empty(1, 16, 16, 0, dtype=torch.bfloat16)
    assert (served(empty, empty, v, scale=1.0).float() - v.float().mean(2, keepdim=True)).abs().max() < 1e-2
    for causal in (False, True):
        out, lse = ops().forward(normal("070", 2, 3, 5, 64), torch.empty(2, 3, 0, 64, dtype=torch.bfloat16),
                                 torch.empty(2, 3, 0, 32, dtype=torch.bfloat16), is_causal=causal)
        assert out.shape == (2, 3, 5, 32) and (out == 0).all() and (lse == -INF).all()


def test_up_067_up_121_layers_and_models_side_by_side():
    for dim, heads in ((256, (8, 4)), (128, (8, 2)), (256, (8, 4)), (64, (6, 6))):
        q = normal(f"067{dim}", 1, heads[0], 200, dim)
        k = normal(f"067k{dim}", 1, heads[1], 200, dim)
        close(served(q, k, k, enable_gqa=True), q, k, k)
    with torch_flashsdpa.sdpa_backend("flashsdpa"), torch_flashsdpa.record_dispatch() as recorder:
        q = normal("067wide", 1, 2, 64, 512)
        F.scaled_dot_product_attention(q, q, q)
    assert "512" in str(recorder)


def test_up_073_a_compiled_graph_meets_an_empty_batch():
    compiled = torch.compile(lambda t: F.scaled_dot_product_attention(t, t, t), dynamic=True, fullgraph=True)
    with strict():
        for batch in (3, 2, 0):
            assert compiled(normal("073", batch, 4, 100, 64)).shape == (batch, 4, 100, 64)


@pytest.mark.parametrize("seq_k", (33, 65, 97, 129, 34, 66))
def test_up_075_expanded_and_materialised_keys_agree(seq_k):
    q, k = normal("075", 1, 8, 70, 128), normal("075k", 1, 1, seq_k, 128).expand(1, 8, seq_k, 128)
    assert torch.equal(served(q, k, k), served(q, k.contiguous(), k.contiguous()))


def test_up_076_up_081_the_output_follows_the_query():
    q = normal("076", 2, 49, 4, 32).transpose(1, 2)
    out = served(q, q, q)
    assert out.stride() == q.stride() and out.transpose(1, 2).is_contiguous()
    assert out.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("spread", [tuple(bool(n >> i & 1) for i in range(3)) for n in range(8)], ids=str)
def test_up_078_all_combinations_of_strided_and_dense(spread):
    for seq_k in (33, 900):
        tensors = [normal(f"078{i}", 1, 4, s, 64) for i, s in enumerate((150, seq_k, seq_k))]
        views = [torch.full((*t.shape[:3], 128), float("nan"), dtype=t.dtype)[..., 64:].copy_(t) if wide else t
                 for t, wide in zip(tensors, spread)]
        assert torch.equal(served(*views), served(*tensors))


def test_up_096_the_current_stream_between_a_producer_and_a_consumer():
    q, k, v = (normal(f"096{i}", 1, 4, 300, 64) for i in range(3))
    want, stream = served(q, k, v) * 2, torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(200):
            torch.cuda._sleep(20_000)
            produced = q * 1
            consumed = served(produced, k, v) * 2
            produced.fill_(float("nan"))
            assert torch.equal(consumed, want)


def test_up_099_a_scope_is_the_threads_own():
    q = normal("099", 1, 2, 100, 64)
    ran = []

    def other():
        with torch.no_grad(), torch_flashsdpa.record_dispatch() as recorder:
            F.scaled_dot_product_attention(q, q, q)
            ran.append(str(recorder))

    with strict():
        served(q, q, q)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "flashsdpa_fwd_sm90" not in ran[0]


def test_up_100_autocast_casts_all_three():
    q, k, v = normal("100", 1, 2, 100, 64).float(), normal("100k", 1, 2, 100, 64).float(), normal("100v", 1, 2, 100, 64)
    with torch.autocast("cuda", torch.bfloat16):
        assert served(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("options", (
    dict(softcap=2.0), dict(dropout_p=0.25), dict(alibi_slopes=torch.ones(2) / 8), dict(sinks=torch.ones(2)), dict(batch_invariant=True),
), ids=lambda options: next(iter(options)))  # fmt: skip
def test_up_124_the_cpu_gives_the_same(options):
    """Dropout too: the same state drops the same weights on both."""
    q = normal("124", 1, 2, 100, 64)
    state = torch.tensor([3, -5], device="cpu")
    results = {}
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        on_device = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        leaf = q.to(device, dtype)
        results[device] = ops().forward(leaf, leaf, leaf, rng_state=state.to(device), **on_device)
    for got, want in zip(results["cuda"], results["cpu"]):
        assert (got.cpu().float() - want).abs().max() < 0.03


def test_up_114_the_batch_does_not_matter():
    """Not promised without batch_invariant, but this kernel gives it: a tile's work does not depend on the others."""
    q, k, v = (normal(f"114{i}", 64, 4, 333, 64) for i in range(3))
    out = served(q, k, v, is_causal=True)
    for batch in (1, 2, 5):
        assert torch.equal(served(q[:batch], k[:batch], v[:batch], is_causal=True), out[:batch])
