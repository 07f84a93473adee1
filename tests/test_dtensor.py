"""DTensors over two processes that really communicate (gloo): shards of batch and heads are served where they are."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("torch.distributed.tensor")
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

PRELUDE = """
import sys
import torch
import torch.distributed as dist
import torch_flashsdpa
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch_flashsdpa import routed_calls, sdpa_backend

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = dist.init_device_mesh("cpu", (2,))
torch.manual_seed(0)
"""


@pytest.fixture
def on_two_ranks(tmp_path, package_root):
    """on_two_ranks(code): runs it after PRELUDE in two processes; their standard outputs."""

    def run(code):
        environment = {**os.environ, "PYTHONPATH": str(package_root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PRELUDE + code + "\ndist.destroy_process_group()\n"]
        ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, text=True, cwd=tmp_path,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
        try:
            ends = [process.communicate(timeout=240) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        for process, (out, error) in zip(ranks, ends):
            assert process.returncode == 0, f"{out}\n{error}"
        return [out.strip() for out, _ in ends]

    return run


def test_shards_of_batch_and_heads_are_served_without_a_collective(on_two_ranks):
    """Also where other gradients are wanted than in the call that DTensor remembers."""
    outputs = on_two_ranks("""
for heads_kv in (4, 2):
    q, k = torch.randn(2, 4, 70, 16), torch.randn(2, heads_kv, 90, 16)
    v, grad_out = torch.randn(2, heads_kv, 90, 8), torch.randn(2, 4, 70, 8)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    want = sdpa(*whole, is_causal=True, enable_gqa=True)
    want.backward(grad_out)
    for place in (Shard(0), Shard(1), Replicate()):
        for wanted in ((0,), (1, 2), (0, 1, 2)):
            leaves = [distribute_tensor(t, mesh, [place]) for t in (q, k, v)]
            for i in wanted:
                leaves[i].requires_grad_()
            grad = distribute_tensor(grad_out, mesh, [place])
            before = routed_calls()
            with sdpa_backend("flashsdpa", strict=True), CommDebugMode() as communication:
                out = sdpa(*leaves, is_causal=True, enable_gqa=True)
                out.backward(grad)
            assert routed_calls() == before + 1 and communication.get_total_counts() == 0
            assert out.placements == (place,)
            torch.testing.assert_close(out.full_tensor(), want)
            for i in wanted:
                assert leaves[i].grad.placements == (place,)
                torch.testing.assert_close(leaves[i].grad.full_tensor(), whole[i].grad, rtol=1e-4, atol=1e-5)
print("right")
""")
    assert outputs == ["right", "right"]


REFUSALS = {
    "length": ("[place(t, Shard(2)) for t in (q, k, v)]", "{}", "query is a DTensor placed as (S(2))"),
    "head dim": ("[place(t, Shard(3)) for t in (q, k, v)]", "{}", "query is a DTensor placed as (S(3))"),
    "partial": ("[DTensor.from_local(t, mesh, [Partial()]) for t in (q, k, v)]", "{}", "query is a DTensor placed as (P(sum))"),
    "unequal": ("[place(q, Shard(1)), place(k, Shard(0)), place(v, Shard(1))]", "{}", "key is a DTensor placed as (S(0))"),
    "mask": ("[place(t, Shard(1)) for t in (q, k, v)]", "dict(attn_mask=place(mask, Replicate()))", "attn_mask is given"),
    "odd heads": ("[place(t[:, :3], Shard(1)) for t in (q, k, v)]", "{}", "query has 3 on axis 1, unequal shards"),
    "rank 3": ("[place(t[0], Shard(0)) for t in (q, k, v)]", "{}", "other than 4 dimensions"),
    "one key head": ("[place(q, Shard(0)), place(k[:1], Replicate()), place(v, Shard(0))]", "{}", "key is a DTensor placed as"),
}


def test_other_placements_say_why_and_are_stocks(on_two_ranks):
    """Under torch's math path, whose rules are quickly found, where stock takes the call at all."""
    code = """
from torch.distributed.tensor import Partial
from torch.nn.attention import SDPBackend, sdpa_kernel

q, k, v, mask = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16), torch.randn(8, 8)

def place(t, placement):
    return distribute_tensor(t, mesh, [placement])

def outcome(inputs, options):
    try:
        return sdpa(*inputs, **options).full_tensor()
    except Exception as error:
        return type(error)
"""
    for inputs, options, reason in REFUSALS.values():
        code += f"""
inputs, options = {inputs}, {options}
try:
    with sdpa_backend("flashsdpa", strict=True):
        sdpa(*inputs, **options)
    raise SystemExit("served: " + {reason!r})
except RuntimeError as error:
    assert {reason!r} in str(error), str(error)
"""
    code += """
for inputs, options in (([place(t, Shard(2)) for t in (q, k, v)], {}),
                        ([place(t, Shard(1)) for t in (q, k, v)], dict(attn_mask=place(mask, Replicate())))):
    before = routed_calls()
    with sdpa_kernel(SDPBackend.MATH):
        want = outcome(inputs, options)
        with sdpa_backend("flashsdpa"):
            got = outcome(inputs, options)
    assert routed_calls() == before
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got is want, (got, want)
print("right")
"""
    assert on_two_ranks(code) == ["right", "right"]
