"""Calls that the router left to stock are known again, and only they: whatever else the decision reads, one change asks it anew."""

import threading

import pytest
import torch
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import torch_flashsdpa
from torch_flashsdpa import auto_table, enable, explain, record_dispatch, sdpa_backend
from torch_flashsdpa._loader import binding

SIZES = (2, 4, 20, 16)


def make(dtype=torch.float32, sizes=SIZES):
    return [torch.randn(sizes, dtype=dtype) for _ in range(3)]


@pytest.fixture(autouse=True)
def slower_on_one_kind_of_call():
    """"auto", by whose table stock is faster where nothing but query, key and value of SIZES is given, and slower elsewhere."""
    isa = {dtype: explain(*make(dtype), backend="flashsdpa").config["isa"] for dtype in (torch.float32, torch.float64)}
    row = {"device": "cpu", "dim": SIZES[3], "seq_q": SIZES[2], "seq_k": SIZES[2], "ratio": 2.0}
    rows = [row | {"isa": isa[dtype], "dtype": str(dtype).removeprefix("torch."), "kind": kind, "grad": grad}
            for dtype in isa for kind in ("full", "causal", "mask", "dropout") for grad in (False, True)]  # fmt: skip
    rows[0]["ratio"] = 0.5
    rows += [rows[0] | {"seq_q": 300, "seq_k": 300, "ratio": 2.0}]
    binding().set_auto_table(rows)
    enable("auto")
    yield
    binding().set_auto_table(auto_table.rows())


def refused():
    return sdpa(*make())


def without_gradients(function):
    with torch.no_grad():
        return function(*[t.requires_grad_() for t in make()])


def scoped(*arguments, **options):
    with sdpa_backend(*arguments, **options):
        return refused()


# name -> a call that differs from refused() in that alone, and is served
SERVED = {
    "causal": lambda: sdpa(*make(), is_causal=True),
    "a mask": lambda: sdpa(*make(), attn_mask=torch.ones(20, 20, dtype=torch.bool)),
    "dropout": lambda: sdpa(*make(), dropout_p=0.5),
    "a gradient": lambda: sdpa(*[t.requires_grad_() for t in make()]),
    "a gradient of the value": lambda: sdpa(*make()[:2], make()[2].requires_grad_()),
    "the dtype": lambda: sdpa(*make(torch.float64)),
    "lengths": lambda: sdpa(*make(sizes=(2, 4, 300, 16))),
    "batch invariance": lambda: scoped("auto", batch_invariant=True),
    "another selection": lambda: scoped("flashsdpa"),
}


@pytest.mark.parametrize("change", SERVED)
def test_a_call_that_differs_is_decided_anew(change, routed):
    for _ in range(2):
        assert [routed(refused), routed(refused)] == [0, 0]
        assert routed(SERVED[change]) == 1
    assert routed(refused) == 0


def test_grad_mode(routed):
    """Leaves refused under no_grad are served outside it."""
    leaves = [t.requires_grad_() for t in make()]
    for _ in range(2):
        with torch.no_grad():
            assert [routed(sdpa, *leaves), routed(sdpa, *leaves)] == [0, 0]
        assert routed(sdpa, *leaves) == 1


def test_torchs_own_backends(routed):
    enable("flashsdpa")
    for _ in range(2):
        with sdpa_kernel(SDPBackend.MATH):
            assert [routed(refused), routed(refused)] == [0, 0]
        assert routed(refused) == 1


def test_strides_and_the_flag_of_grouped_heads(routed):
    enable("flashsdpa")
    x = torch.randn(3, 2, 4, 20, 16)
    turned = torch.randn(2, 3, 4, 20, 16).transpose(0, 1)  # its two leading axes are not one in memory
    q, k = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 20, 16)
    for _ in range(2):
        assert [routed(sdpa, turned, turned, turned), routed(sdpa, x, x, turned)] == [0, 0]
        assert routed(sdpa, x, x, x) == 1
        with pytest.raises(RuntimeError):
            sdpa(q, k, k)
        assert routed(sdpa, q, k, k, enable_gqa=True) == 1


def test_the_table_of_auto(routed):
    """set_auto_table() is for tools; it holds from the next call on, on every thread."""
    assert [routed(refused), routed(refused)] == [0, 0]
    go, counts = threading.Event(), []

    def other():
        refused()
        asked.set()
        go.wait()
        counts.append(routed(refused))

    asked = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    asked.wait()
    isa = explain(*make(), backend="flashsdpa").config["isa"]
    binding().set_auto_table([{"isa": isa, "dtype": "float32", "kind": "full", "grad": False, "dim": 16, "seq_q": 20, "seq_k": 20,
                               "ratio": 2.0}])  # fmt: skip
    go.set()
    thread.join()
    assert counts == [1] and routed(refused) == 1


def test_more_calls_than_are_remembered(routed):
    shapes = [make(sizes=(1, 2, 20, dim)) for dim in range(14, 21)]
    for _ in range(3):
        assert [routed(sdpa, *tensors) for tensors in shapes] == [0] * len(shapes)


def test_a_remembered_call_is_seen_by_those_who_watch(routed):
    for _ in range(3):
        refused()
    with record_dispatch() as seen:
        refused()
    (row,) = seen.rows
    assert row["kernel"] == "stock" and "stock was faster" in row["reasons"][0]
    with pytest.raises(RuntimeError, match="strict=True forbids"), sdpa_backend("auto", strict=True):
        refused()


def test_traced_and_wrapped_calls_are_not_known_again(routed):
    """A graph of the call needs its guard on the selection; a transform's tensors may hide anything."""
    for _ in range(3):
        refused()
    tensors = make()
    compiled = torch.compile(lambda *t: sdpa(*t), backend="aot_eager", fullgraph=True)
    mapped = [torch.randn(3, *SIZES) for _ in range(3)]
    for name, calls in (("auto", 0), ("flashsdpa", 1), ("auto", 0), ("flashsdpa", 1)):
        enable(name)
        assert routed(compiled, *tensors) == routed(vmap(sdpa), *mapped) == routed(refused) == calls
    assert torch_flashsdpa.is_enabled()
