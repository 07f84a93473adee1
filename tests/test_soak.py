"""tools/soak in a few seconds, and that it notices what it is for: a wrong number, an exception, memory that grows."""

import importlib.machinery
import importlib.util
import json
import random
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch_flashsdpa
from torch.nn.functional import scaled_dot_product_attention as sdpa

TOOL = Path(__file__).resolve().parent.parent / "tools" / "soak"


@pytest.fixture(scope="module")
def soak():
    loader = importlib.machinery.SourceFileLoader("soak", str(TOOL))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("soak", loader))
    sys.modules["soak"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def test_short_run(soak, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(soak, "ALLOWANCE_MIB", 256)  # a few seconds are over before malloc has what calls of all sizes need
    assert soak.main(["--minutes", "0.07", "--seed", "3", "--eager", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["ok"] and report["failures"] == []
    assert report["counts"]["eager"] > 20 and report["counts"]["toggles"] > 10
    assert 0 < report["served by ours"] < report["counts"]["eager"]


def test_compiled_calls_are_checked_too(soak):
    run = soak.Soak(4)
    compiled = torch.compile(sdpa, backend="aot_eager", dynamic=True)
    call = soak.Call.draw(random.Random(4), **run._kept(random.Random(4)) | dict(mask="none", scope="flashsdpa"))
    before = torch_flashsdpa.routed_calls()
    run.check(call, compiled, "compiled")
    assert run.failures == [] and torch_flashsdpa.routed_calls() == before + 1
    run.check(call, lambda **x: compiled(**x) * 1.001, "compiled")
    assert run.failed == 1


def planted(fault):
    """attend() that goes wrong in every fifth call."""
    lock, calls, leaked = threading.Lock(), [0], []

    def attend(query, key, value, **options):
        with lock:
            calls[0] += 1
            turn = calls[0] % 5 == 0
        out = sdpa(query, key, value, **options)
        if fault == "leak":
            leaked.append(torch.ones(2**18))  # 1 MiB a call
        if turn and fault == "wrong":
            out = out * (1 + 64 * torch.finfo(out.dtype).eps)
        if turn and fault == "gradient":
            out = out + (query * 0.02).sum(-1, keepdim=True) - (query.detach() * 0.02).sum(-1, keepdim=True)
        if turn and fault == "error":
            raise RuntimeError("planted")
        return out

    return attend


@pytest.mark.parametrize("fault, told", (("wrong", "out is off by"), ("gradient", "gradient 1 is off by"), ("error", "planted")))
def test_planted_fault_is_found(soak, fault, told):
    report = soak.Soak(5, planted(fault)).run(2.0, compiled=False)
    assert not report["ok"] and report["failed"] > 0
    assert len(report["failures"]) <= soak.FAILURES_KEPT and any(told in failure["problem"] for failure in report["failures"])
    again = soak.Call(**{name: report["failures"][0][name] for name in soak.Call.__dataclass_fields__})
    assert soak.fault(again, sdpa) is None  # the call itself is sound


def test_planted_leak_is_found(soak, monkeypatch):
    monkeypatch.setattr(soak, "ALLOWANCE_MIB", 8)
    report = soak.Soak(6, planted("leak")).run(3.0, compiled=False)
    assert report["failed"] == 0 and report["memory growth MiB"] > 8 and not report["ok"]


def test_gradients_that_cancel_have_their_terms_errors(soak):
    """dV of two keys: 260 terms of both signs, whose errors come to 300 roundings of their sum."""
    call = soak.Call(seed=1960678116, dtype="float64", mask="bias gradient", scope="flashsdpa", grad=True, batch=1, heads=2,
                     heads_kv=1, seq_q=130, seq_k=2, dim=64)  # fmt: skip
    assert soak.fault(call, sdpa) is None
    arguments = call.make()
    exact, sizes = soak.results(soak.formula.attention, soak.in_float64(arguments)), soak.sums_of_sizes(arguments)
    assert all((one.abs() <= 1.001 * size).all() for one, size in zip(exact, sizes, strict=True))
    assert sizes[3].max() > 10 * exact[3].abs().max()


def test_rule_of_memory(soak):
    assert soak.growth_mib([900, 950, 100, 100, 101, 99, 103, 103]) == 3  # the first quarter is not looked at
    with pytest.raises(ValueError, match="3 samples"):
        soak.growth_mib([1, 2, 3])
