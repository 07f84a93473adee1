"""The benchmarks of whole models, in their small form: ours serves every call of a model's attention and changes neither its
outputs nor its loss nor a gradient; and what the benchmark says of a model is so."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torch_flashsdpa

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))  # never first: the package under test is not there

from models import command, compare, counting, timing  # noqa: E402
from models.decoders import IGNORED, LLAMA, packed_inputs, prefill_inputs, training_inputs  # noqa: E402
from models.registry import CASES  # noqa: E402
from models.runs import Bench  # noqa: E402

BY_NAME = {case.name: case for case in CASES}
TRAINING = BY_NAME["llama-1b-train-2k-right-padded"]


@pytest.fixture(scope="module")
def bench():
    return Bench("cpu", torch.float32, "small", backend="flashsdpa", rounds=0)


def needs(case):
    if missing := case.model.missing():
        pytest.skip(f"needs {', '.join(missing)}")
    return case


@pytest.mark.parametrize("name", BY_NAME)
def test_model_computes_the_same(bench, name):
    stock, ours = bench.measure(needs(BY_NAME[name]), ["eager"])
    assert "note" not in stock and "note" not in ours
    assert stock["routed"] == 0 and ours["routed"] == ours["sdpa_calls"] > 0
    assert 0 <= ours["error"] < 5e-6 and ours["max_difference"] < 1e-4
    if BY_NAME[name].train:
        assert 0 < ours["gradient_error"] < 1e-5


@pytest.mark.parametrize("mode, name", [("compiled", TRAINING.name), ("compiled-whole", "llama-1b-prefill-2k-left-padded")])
def test_compiled_model_computes_the_same(mode, name):
    """As traced and guarded on the selection; Inductor's code, slow to make, is the next test's."""
    bench = Bench("cpu", torch.float32, "small", "flashsdpa", 0, compiler="aot_eager")
    stock, ours = bench.measure(BY_NAME[name], [mode])
    assert "note" not in stock and "note" not in ours
    assert stock["routed"] == 0 and ours["routed"] == ours["sdpa_calls"] == 2
    module, inputs, _ = bench.prepare(BY_NAME[name])
    assert all(block._compiled_call_impl is None for block in LLAMA.blocks_of(module)), "left compiled behind"


def test_inductor(bench):
    stock, ours = bench.measure(BY_NAME["unet-d40-infer"], ["compiled"])
    assert "note" not in stock and "note" not in ours
    assert stock["routed"] == 0 and ours["routed"] == ours["sdpa_calls"] == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-1b-train-2k-left-padded", "t5-base-train", "swin-b-infer"])
def test_model_computes_the_same_in_half_precision(name, dtype):
    stock, ours = Bench("cpu", dtype, "small", "flashsdpa", 0).measure(BY_NAME[name], ["eager"])
    assert "note" not in stock and "note" not in ours
    assert ours["routed"] == ours["sdpa_calls"] > 0 and 0 < ours["error"] < 0.02


FAULTS = {
    "no mask": lambda attend, q, k, v, mask, how: attend(q, k, v, **how),
    "scale": lambda attend, q, k, v, mask, how: attend(q * 1.001, k, v, attn_mask=mask, **how),
    "one key": lambda attend, q, k, v, mask, how: attend(q, k, v.index_fill(2, torch.tensor([3]), 0.0), attn_mask=mask, **how),
    "gradient": lambda attend, q, k, v, mask, how: attend(q, k.detach(), v, attn_mask=mask, **how),
    "not a number": lambda attend, q, k, v, mask, how: attend(q, k, v, attn_mask=mask, **how) * torch.nan,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_attention_has_no_time(fault, monkeypatch):
    bench = Bench("cpu", torch.float32, "small", backend="flashsdpa", rounds=1)
    attend = F.scaled_dot_product_attention

    def wrong(query, key, value, attn_mask=None, **how):
        if torch_flashsdpa.is_enabled():
            return FAULTS[fault](attend, query, key, value, attn_mask, how)
        return attend(query, key, value, attn_mask=attn_mask, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    stock, ours = bench.measure(TRAINING, ["eager"])
    assert "note" not in stock and "ms" not in ours and ours["note"].startswith("failed: ")


def test_a_model_that_fails_is_a_row(bench):
    def broken(module, **inputs):
        raise ValueError("no such\nlayer")

    (row,) = bench.measure(dataclasses.replace(TRAINING, result=broken), ["eager"])
    assert row["note"] == "failed: ValueError: no such" and row["case"] == TRAINING.name
    absent = dataclasses.replace(LLAMA, packages=("transformers", "no_such_package"))
    rows = bench.measure(dataclasses.replace(TRAINING, model=absent), ["eager", "compiled"])
    assert [row["note"] for row in rows] == ["not run: needs no_such_package"] * 2


EPS = torch.finfo(torch.bfloat16).eps
MOST = EPS ** (1 / 4)


@pytest.mark.parametrize("stock, ours, right", [
    ((0.01, 0.01, {"w": 0.01}), (0.02 + 3.9 * EPS,) * 2 + ({"w": 0.01},), True),
    ((0.01, 0.01, {"w": 0.01}), (0.02 + 4.1 * EPS, 0.01, {"w": 0.01}), False),
    ((0.01, 0.01, {"w": 0.01}), (0.01, 0.02 + 4.1 * EPS, {"w": 0.01}), False),
    ((torch.inf, 0.0, {"w": 0.0}), (1.01 * MOST, 0.0, {"w": 0.0}), False),
    ((0.01, 0.01, {"w": 0.01}), (torch.nan, 0.01, {"w": 0.01}), False),
    # The worst parameter of stock counts for all, but not one that it has computed badly.
    ((0.01, 0.01, {"w": 0.1, "q": 0.01}), (0.01, 0.01, {"w": 0.1, "q": 0.2}), True),
    ((0.01, 0.01, {"w": 0.1, "q": 1.2}), (0.01, 0.01, {"w": 0.3, "q": 1.1}), False),
    ((0.01, 0.01, {"w": 0.1, "q": 1.2}), (0.01, 0.01, {"w": 0.1, "q": 2.3}), True),
    ((0.01, 0.01, {"w": 0.1, "q": 1.2}), (0.01, 0.01, {"w": 0.1, "q": 2.5}), False),
    ((0.01, 0.01, {"w": 0.1, "q": torch.inf}), (0.01, 0.01, {"w": 0.1, "q": 0.3}), False),
])  # fmt: skip
def test_limits_are_of_the_stock_error(stock, ours, right):
    assert (compare.beyond(compare.Errors(*ours), compare.Errors(*stock), torch.bfloat16) is None) == right


def test_errors_of_gradients_leave_out_those_that_vanish():
    exact = {"weight": torch.randn(8, 8), "bias": torch.randn(8) * 1e-7}
    got = {"weight": exact["weight"].clone(), "bias": torch.randn(8) * 1e-7}
    assert compare.gradient_errors(got, exact) == {"weight": 0.0}
    got["weight"][3, 3] += 0.1
    expected = pytest.approx(0.1 / exact["weight"].norm().item(), rel=1e-4)
    assert compare.gradient_errors(got, exact) == {"weight": expected} and compare.total_error(got, exact) == expected
    assert compare.gradient_errors({"bias": got["bias"]}, exact) == {"weight": torch.inf}
    assert compare.total_error({"bias": got["bias"]}, exact) == torch.inf
    got["weight"][0, 0] = torch.nan
    assert compare.gradient_errors(got, exact) == {"weight": torch.inf} and compare.total_error(got, exact) == torch.inf


def test_batches_of_the_decoder():
    for padding in ("right", "left"):
        inputs = training_inputs("small", "2k", padding)
        real, labels = inputs["attention_mask"].bool(), inputs["labels"]
        assert real.sum(1).tolist() == [72, 48, 24] and real[1, 0 if padding == "right" else -1]
        kept = labels != IGNORED
        assert kept.sum(1).tolist() == [71, 47, 23] and not kept[~real].any(), "each token but a sequence's first is predicted"
        last = prefill_inputs("small", "2k", padding)["last"].tolist()
        assert last == ([71, 47, 23] if padding == "right" else [71] * 3)
    packed = packed_inputs("small", "8k-alone")
    starts = packed["position_ids"][0] == 0
    assert starts.sum() > 1 and (packed["labels"][0] == IGNORED).equal(starts)


def test_attention_is_counted_by_the_pairs_that_take_part(bench):
    """The rest of the model is the same whatever the mask, so differences are attention's."""
    flop = {}
    for name in ("prefill-2k", "prefill-2k-left-padded", "train-2k", "train-2k-left-padded"):
        module, inputs, _ = bench.prepare(BY_NAME[f"llama-1b-{name}"])
        flop[name], calls = counting.count(BY_NAME[f"llama-1b-{name}"], module, inputs)
        assert calls == 2
    triangle = lambda n: n * (n + 1) // 2  # noqa: E731
    skipped = sum(triangle(72) - triangle(n) for n in (72, 48, 24))
    layers, heads, dim = 2, 4, 16
    assert flop["prefill-2k"] - flop["prefill-2k-left-padded"] == pytest.approx(4 * layers * heads * dim * skipped)
    assert flop["train-2k"] - flop["train-2k-left-padded"] == pytest.approx(3 * 4 * layers * heads * dim * skipped)
    tokens, width, inner, vocabulary, kv = 3 * 72, 64, 128, 256, 32
    products = layers * (2 * width * width + 2 * width * kv + 3 * width * inner) * tokens
    attention = 4 * layers * heads * dim * 3 * triangle(72)
    assert flop["prefill-2k"] == pytest.approx(2 * (products + 3 * width * vocabulary) + attention)
    assert flop["train-2k"] == pytest.approx(3 * (2 * (products + tokens * width * vocabulary) + attention))


def test_a_step_of_training_leaves_the_weights(bench):
    module, inputs, _ = bench.prepare(TRAINING)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    timing.Step(TRAINING, module, inputs)()
    assert all(torch.equal(weight, before[name]) for name, weight in module.named_parameters())
    assert all(weight.grad is None for weight in module.parameters())


def test_command_and_its_record(capsys, tmp_path):
    given = "--device cpu --only unet-d40 --mode eager --rounds 2 --backend flashsdpa --out".split()
    assert command.main([*given, str(tmp_path)]) == 0
    text = capsys.readouterr().out
    (path,) = tmp_path.glob("*-cpu-models.json")
    product, *rows = json.loads(path.read_text())["rows"]
    assert product["impl"] == "product" and product["tflops"] > 0
    assert [(row["case"], row["impl"]) for row in rows] == [
        (f"unet-d40-{step}", impl) for step in ("train", "infer") for impl in ("stock", "flashsdpa")]  # fmt: skip
    for row in rows:
        mine = row["impl"] == "flashsdpa"
        assert row["group"] == "models" and row["dtype"] == "float32" and row["mode"] == "eager"
        assert row["pass"] == ("fwd+bwd" if row["case"].endswith("train") else "fwd")
        assert row["ms"] > 0 and row["tflops"] > 0 and row["mfu"] > 0 and 0 < row["attention_share"] < 1
        assert row["tflops"] / row["mfu"] == pytest.approx(product["tflops"], rel=1e-3)
        assert row["stock_backend"] == ("none" if mine else "flash_attention_for_cpu x4")
        assert ("flashsdpa_fwd_cpu" in row["kernels"]) == mine and row["case"] in text
        if mine:
            assert row["slowdown_upper_95"] == pytest.approx(1 / row["speedup_lower_95"] - 1, abs=1e-3) and row["pairs"] == 2


def test_command_on_parts(capsys, tmp_path):
    assert command.main(["--only", "no such model"]) == 1 and "no case holds" in capsys.readouterr().out
    assert command.main(["--list", "--only", "unet", "minilm"]) == 0
    assert len(capsys.readouterr().out.split()) == 7
    with pytest.raises(SystemExit):
        command.main(["--mode", "fast"])
    given = "--device cpu --mode eager --rounds 0 --only unet-d40 --budget 1e-9 --out".split()
    assert command.main([*given, str(tmp_path)]) == 1 and "the budget is spent" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_verdict_names_what_may_be_slower():
    row = {"impl": "flashsdpa", "case": "a", "mode": "eager", "ms": 1.0, "speedup": 0.99}
    assert not list(command.verdict([row | {"slowdown_upper_95": 0.029}, row | {"impl": "stock"}]))
    assert len(list(command.verdict([row | {"slowdown_upper_95": 0.031}]))) == 1
