"""bench --grid length: every rival, checked, and the curves that are drawn are the rows."""

import contextlib
import json
import re

import pytest
import torch

from torch_flashsdpa import cli
from torch_flashsdpa.bench import lengths, measure, output, turns
from torch_flashsdpa.bench.cases import Case


def case(mask="causal bool", n=128, grad=False, dtype="float32"):
    return Case("length", n, n, 16, dtype, 1, 2, 2, mask, grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", lengths.MASKS)
def test_rows_of_a_case(mask, grad):
    rows = {row["impl"]: row for row in lengths.measure_case(case(mask, 130, grad), "cpu", 0.01, flex=False)}
    assert set(rows) == {"stock", "flashsdpa", "math"}
    for row in rows.values():
        assert 0 < row["ms"] and 0 < row["error"] < 1e-5 and row["pass"] == ("fwd+bwd" if grad else "fwd")
        assert row["tflops"] == pytest.approx(case(mask, 130, grad).flop() / row["ms"] / 1e9)


def test_flex_attention_is_given_the_same_structure(monkeypatch):
    """Uncompiled here, for the time it takes: what is checked is its mask."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(lengths, "_flex", lambda: flex_attention)
    for mask in lengths.MASKS:
        rows = {row["impl"]: row for row in lengths.measure_case(case(mask, 384), "cpu", 0.001, flex=True)}
        assert rows["FlexAttention"]["error"] < 1e-5, rows["FlexAttention"]


def test_a_rival_that_fails_or_is_wrong_has_a_note_and_no_time(monkeypatch):
    right = lengths.rivals

    def broken(*arguments):
        found = right(*arguments)
        context, call = found["math"]
        return found | {"flash": (context, lambda: 1 / 0), "math": (contextlib.nullcontext, lambda: call() * 1.5)}

    monkeypatch.setattr(lengths, "rivals", broken)
    rows = {row["impl"]: row for row in lengths.measure_case(case(), "cpu", 0.01, flex=False)}
    assert rows["flash"]["note"] == "not here: division by zero" and "ms" not in rows["flash"]
    assert rows["math"]["note"].startswith("failed: off by") and "ms" not in rows["math"]
    assert "ms" in rows["flashsdpa"]


def test_turns_start_with_each_implementation_in_turn():
    entered = []

    def calls_of(name):
        return (lambda: contextlib.nullcontext(entered.append(name))), (lambda: None)

    samples = turns.time_in_turns({name: calls_of(name) for name in "ab"}, torch.device("cpu"), 10.0)
    assert {name: len(each) for name, each in samples.items()} == {"a": turns.MOST, "b": turns.MOST}
    assert "".join(entered).startswith("ab" + "abba" * 3)
    assert all(0 < sample < 1e-3 for each in samples.values() for sample in each)


def test_sampled_errors_see_every_argument():
    q = torch.randn(2, 4, 300, 16)
    k, v = torch.randn(2, 2, 290, 16), torch.randn(2, 2, 290, 24)
    mask = torch.randn(1, 4, 300, 290).masked_fill(torch.rand(1, 4, 300, 290) < 0.3, -torch.inf)
    for change in ({}, {"is_causal": True}, {"scale": 0.7}, {"attn_mask": mask}, {"attn_mask": mask > 0}):
        arguments = {"query": q, "key": k, "value": v, "attn_mask": None, "is_causal": False, "scale": None} | change
        out = turns.run(arguments | {"enable_gqa": True}, None)
        wrong = out.clone()
        wrong[1, 3, 299, 23] += 0.5
        errors = turns.sampled_errors({"right": out, "wrong": wrong}, arguments)
        assert errors["right"] < 1e-5 and errors["wrong"] == pytest.approx(0.5, abs=1e-4), change


def test_command_and_plot(capsys, tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    monkeypatch.setattr(lengths, "MASKS", ("full", "causal bool"))
    arguments = ["bench", "--grid", "length", "--longest", "256", "--no-flex", "--seconds", "0.001", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "D64 causal bool B1 H8 S256" in text and "plot    " in text
    (record,) = tmp_path.glob("*-length.json")
    rows = json.loads(record.read_text())["rows"]
    assert {row["length"] for row in rows} == {128, 256} and {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["no mask", "causal, as a bool mask", "", ""]
    for axes, (dtype, mask) in zip(figure.axes, [(d, m) for d in ("float32", "bfloat16") for m in ("full", "causal bool")]):
        curves = {line.get_color(): line.get_xydata().tolist() for line in axes.lines}
        for name in ("flashsdpa", "stock", "math"):
            expected = [[row["length"], row["tflops"]] for row in rows
                        if (row["impl"], row["dtype"], row["mask"]) == (name, dtype, mask)]  # fmt: skip
            got = curves[lengths.COLOURS[name]]
            factor = got[0][1] / expected[0][1]
            assert factor in (pytest.approx(1, rel=1e-3), pytest.approx(1e3, rel=1e-3))
            assert [n for n, _ in got] == [n for n, _ in expected]
            assert [y for _, y in got] == pytest.approx([y * factor for _, y in expected], rel=1e-3)
    assert list(tmp_path.glob("*-length.png"))


def test_command_without_a_match(capsys):
    assert cli.main(["bench", "--grid", "length", "--only", "no such cell"]) == 1
    assert "holds 'no such cell'" in capsys.readouterr().out


@pytest.mark.parametrize(("machine", "cudnn", "stem"), [
    ("NVIDIA H200", 91900, "2026-01-02-nvidia-h200-length"),
    ("some processor, 2 threads, avx2", None, "2026-01-02-.+-2t-avx2-cpu-length"),
])  # fmt: skip
def test_a_record_is_named_after_what_was_measured(machine, cudnn, stem):
    run = {"grid": "length", "date": "2026-01-02T03:04:05", "machine": machine, "cudnn": cudnn, "threads": 2, "isa": "avx2"}
    assert re.fullmatch(stem, output.file_stem(run))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_dropout_multiplies_weights_by(dtype):
    """Of the reference that results are held against: as precise as float64 asks for."""
    inputs = dict(query=torch.zeros(1, 1, 8, 16, dtype=getattr(torch, dtype)), dropout_p=0.1)
    factor = measure._dropout_factor({**inputs, "key": inputs["query"], "enable_gqa": False, "scale": None})
    assert factor.dtype == torch.float64 and set(factor.unique().tolist()) <= {0.0, 65536 / (65536 - round(0.1 * 65536))}
