"""explain, record_dispatch, the log, the profiler's helper and doctor: what they say, and that it is what happened."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_flashsdpa
from torch_flashsdpa import _doctor, enable, explain, profiler, record_dispatch, report, sdpa_backend
from torch_flashsdpa._loader import binding


def make(*shape, grad=False, device="cpu"):
    return [torch.randn(*(shape or (1, 2, 130, 16)), requires_grad=grad, device=device) for _ in range(3)]


MASK = torch.ones(130, 130, dtype=torch.bool).tril()


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"attn_mask": MASK}, {"dropout_p": 0.3}, {"scale": 2.0}])
def test_explain_tells_what_then_runs(arguments):
    inputs = make()
    enable("flashsdpa")
    explanation = explain(*inputs, **arguments)
    with profiler.kernels_run() as kernels:
        F.scaled_dot_product_attention(*inputs, **arguments)
    if explanation.chosen == "stock":
        assert explanation.reasons and not kernels
    else:
        assert not explanation.reasons and kernels[explanation.chosen] == 1


def hopper_config(seq_q, seq_k, heads_kv=32, dim=128, mask=None, dtype=torch.bfloat16):
    """explain's config of a call with 32 heads on a Hopper GPU; without one its plan is for the usual number of processors."""
    if not any(entry["name"] == "flashsdpa_fwd_sm90" for entry in binding().kernel_table()):
        pytest.skip("a build without CUDA kernels")
    with FakeTensorMode():
        q, k = (torch.empty(1, h, s, dim, dtype=dtype, device="cuda") for h, s in ((32, seq_q), (heads_kv, seq_k)))
        mask = None if mask is None else torch.empty(mask, dtype=torch.bool, device="cuda")
        return dict(explain(q, k, k, mask, enable_gqa=True, backend="flashsdpa").config)


def test_explain_tells_packs_and_splits_of_a_hopper_call():
    decode = hopper_config(1, 8192, 8)
    assert decode["packed"].startswith("4 query heads") and int(decode["key_splits"].split(",")[0]) > 8
    assert decode["block_m"] == "16"  # queries of four heads in 64 rows
    prefill = hopper_config(4096, 4096, 8)
    assert "packed" not in prefill and "key_splits" not in prefill
    assert "TMA producer" in prefill["schedule"] and prefill["by TMA"] == "query, key, value, output"


def test_explain_tells_the_kernel_for_short_sequences():
    """Its own schedule; and the large one of as short a call, which has more columns."""
    short = hopper_config(49, 49, dim=32, mask=(1, 32, 49, 49))
    assert short["in the profiler"] == "flashsdpa_fwd_short_sm90" and "mma.sync" in short["schedule"]
    assert not {"stages", "by TMA", "not by TMA"} & set(short) and short["mask_plan"].startswith("none")
    wide = hopper_config(49, 49, dim=128, mask=(1, 32, 49, 49))
    assert "in the profiler" not in wide and "TMA producer" in wide["schedule"]
    assert wide["mask_plan"] == "(1, 32, 204) int32, granules of 64 x 64"


def test_explain_tells_the_float32_kernel_of_a_hopper_call():
    config = hopper_config(300, 300, dim=72, mask=(300, 300), dtype=torch.float32)
    assert config["schedule"] == "mma.sync, three TF32 products for each of float32" and config["order"] == "last rows first"
    assert not {"by TMA", "not by TMA"} & set(config) and config["mask_plan"].startswith("(1, 1, ")


@pytest.mark.parametrize("length", [64, 65])
def test_explain_tells_whether_the_mask_is_planned(length):
    inputs, mask = make(1, 2, length, 16), torch.ones(length, length, dtype=torch.bool)
    told = explain(*inputs, mask, backend="flashsdpa").config["mask_plan"]
    with sdpa_backend("flashsdpa"), profiler.kernels_run() as kernels:
        F.scaled_dot_product_attention(*inputs, mask)
    planned = any("mask_plan" in name for name in kernels)
    assert planned == (length > 64) == (not told.startswith("none"))
    assert explain(*(t.to("meta") for t in inputs), mask.to("meta"), backend="flashsdpa").config["mask_plan"] == told


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_explain_without_data(kind):
    enable("flashsdpa")
    expected = explain(*make()).chosen
    before = torch_flashsdpa.routed_calls()
    if kind == "meta":
        assert explain(*make(device="meta")).chosen == expected
    else:
        with FakeTensorMode():
            assert explain(*make()).chosen == expected
    assert torch_flashsdpa.routed_calls() == before


def test_explain_names_every_reason_and_every_kernel():
    q, k, v = make(1, 2, 5, 300)
    explanation = explain(q, k, v, dropout_p=-0.5, backend="flashsdpa")
    assert explanation.chosen == "stock"
    assert any("dropout_p is -0.5" in reason for reason in explanation.reasons)
    assert any("head_dim is 300" in reason for reason in explanation.reasons)
    from torch_flashsdpa._loader import binding

    table = {e["name"] for e in binding().kernel_table() if e["device"] == "cpu" and e["pass"] != "mask_plan"}
    assert {candidate["kernel"] for candidate in explanation.candidates} == table
    assert all(candidate["reasons"] for candidate in explanation.candidates)


def test_explain_follows_the_selection():
    inputs = make()
    assert explain(*inputs).chosen == "stock"
    assert explain(*inputs, backend="flashsdpa").chosen != "stock"
    with sdpa_backend("flashsdpa", strict=True):
        assert explain(*inputs).selection == "flashsdpa (strict), scope of this thread"
    with pytest.raises(ValueError, match="backend is 'fast'"):
        explain(*inputs, backend="fast")


def test_explain_sees_what_autocast_makes_of_the_inputs():
    """The router is asked behind autocast, which also brings dtypes together."""
    q, k, v = make()
    mask = torch.randn(130, 130)
    enable("flashsdpa")
    with torch.autocast("cpu", torch.bfloat16):
        explanation = explain(q, k, v.bfloat16(), mask)
        with record_dispatch() as recorder:
            F.scaled_dot_product_attention(q, k, v.bfloat16(), mask)
        assert "autocast" not in explain(*(t.double() for t in (q, k, v))).call
        nested = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
        assert "nested" in explain(nested, nested, nested).reasons[0]
    decision = next(row for row in recorder.rows if row["kind"] == "decision")
    assert (explanation.chosen, explanation.reasons) == (decision["kernel"], decision["reasons"])
    assert "bfloat16 cpu, mask bfloat16" in explanation.call and "cast by autocast" in explanation.call
    assert explanation.plan().mixed == 1.0  # of the mask as given
    assert "autocast" not in explain(q, k, v).call


def test_a_subclass_is_the_reason_and_not_the_selection():
    """In explain() and in the record alike; one without a __torch_dispatch__ of its own is as plain as any tensor."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Named(torch.Tensor):
        pass

    enable("flashsdpa")
    wrappers = [TwoTensor(t, t.clone()) for t in make()]
    with record_dispatch() as recorder:
        F.scaled_dot_product_attention(*wrappers)
    reasons = ["query is a TwoTensor; tensor subclasses are served by stock PyTorch"]
    explanation = explain(*wrappers)
    assert explanation.chosen == "stock" and explanation.reasons == reasons == recorder.rows[0]["reasons"]
    assert all(reasons[0] in candidate["reasons"] for candidate in explanation.candidates)
    named = [t.as_subclass(Named) for t in make(3, 1, 2, 70, 16)]
    assert explain(*(t[0] for t in named)).chosen != "stock"
    with sdpa_backend("flashsdpa", strict=True):
        torch.vmap(F.scaled_dot_product_attention)(*named)


@pytest.mark.parametrize("scale", (np.float32(0.5), torch.tensor(0.5), np.int64(2)), ids=("numpy float", "tensor", "numpy int"))
def test_numbers_of_other_libraries_are_numbers(scale):
    """As for SDPA; explain() takes what it takes."""
    q = torch.randn(1, 2, 9, 8)
    with torch_flashsdpa.sdpa_backend("flashsdpa", strict=True):
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=scale)
    assert torch.equal(torch_flashsdpa.attention(q, q, q, scale=scale), want)
    assert torch_flashsdpa.explain(q, q, q, scale=scale, dropout_p=np.float32(0.0), backend="flashsdpa").chosen != "stock"


def test_plan_counts_granules():
    explanation = explain(*make(), MASK, backend="flashsdpa")
    shares = explanation.plan()  # 3 x 3 granules, causal; the last one is a corner of 2 x 2 scores
    assert shares.counts == {"empty": 3, "full": 3, "mixed": 3}
    assert shares.classes() == [[2, 0, 0], [1, 2, 0], [1, 1, 2]]
    assert str(shares) == "empty 33.3%, full 33.3%, mixed 33.3%"


def test_plan_tells_its_cost():
    mask = torch.ones(1024, 1024, dtype=torch.bool).tril()
    small, large = (explain(*make(), m, backend="flashsdpa").plan() for m in (MASK, mask))
    assert 0 < small.seconds < 60 and 0 < large.seconds < 60
    assert 130 * 130 / 8 <= small.bytes < large.bytes and 1024 * 1024 / 8 <= large.bytes < 1.1 * 1024 * 1024 / 8
    assert large.cost.endswith(f" ms, {large.bytes:,} bytes")


@pytest.mark.parametrize("shape, counts", [((1, 1, 1, 130), (1, 1, 1)), ((2, 3, 4, 70, 130), (48, 48, 48)), ((130,), (1, 1, 1))],
                         ids=("padding", "five axes", "one axis"))
def test_plan_of_a_mask_of_any_rank(shape, counts):
    """Granules of the mask as given: what it broadcasts over is not counted."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., :64], mask[..., 128] = True, True  # full, empty, and one of two keys
    q = torch.randn(*(shape[:-2] if len(shape) == 5 else (1, 1)), 70, 16)
    k = torch.randn(*q.shape[:-2], 130, 16)
    shares = explain(q, k, k, mask, backend="flashsdpa").plan()
    assert tuple(shares.counts.values()) == counts


def test_plan_needs_values():
    with pytest.raises(ValueError, match="no attn_mask"):
        explain(*make()).plan()
    with pytest.raises(ValueError, match="attn_mask is a meta tensor without values"):
        explain(*make(device="meta"), MASK.to("meta")).plan()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = explain(*make(), MASK).plot(tmp_path / "plan.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_draws_the_plan(tmp_path, monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    explain(*make(), MASK).plot(tmp_path / "plan.png")
    (axes,) = drawn[0].axes
    assert axes.images[0].get_array().tolist() == [[2, 0, 0], [1, 2, 0], [1, 1, 2]]
    assert axes.get_title() == "empty 33.3%, full 33.3%, mixed 33.3%"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["empty", "full", "mixed"]


class Texts(TestCase):
    """The layout of the reports, on answers that do not depend on the machine."""

    def test_explanation_served(self):
        text = report.Explanation(
            chosen="flashsdpa_fwd_cpu_avx2",
            reasons=[],
            candidates=[
                {"kernel": "flashsdpa_fwd_cpu_avx2", "passes": ("forward",), "reasons": []},
                {"kernel": "flashsdpa_fwd_cpu_amx", "passes": ("forward",), "reasons": ["amx is not available on this machine"]},
                {"kernel": "flashsdpa_decode_cpu_avx2", "passes": ("decode",), "reasons": ["too many rows", "too wide"]},
            ],
            config={"isa": "avx2", "block_m": "64", "block_n": "128", "schedule": "online softmax", "copies": ["key"]},
            call="scaled_dot_product_attention  q (1, 2, 8, 16) k (1, 2, 8, 16) v (1, 2, 8, 16), float32 cpu, causal",
            selection="auto, default of the process",
        )
        self.assertExpectedInline(
            str(text),
            """\
scaled_dot_product_attention  q (1, 2, 8, 16) k (1, 2, 8, 16) v (1, 2, 8, 16), float32 cpu, causal
  selection   auto, default of the process
  chosen      flashsdpa_fwd_cpu_avx2
  tile        64 queries x 128 keys
  isa         avx2
  schedule    online softmax
  copies      key
  others
    flashsdpa_fwd_cpu_amx      amx is not available on this machine
    flashsdpa_decode_cpu_avx2  too many rows; too wide""",
        )

    def test_explanation_of_a_refusal(self):
        text = report.Explanation("stock", ["dropout_p is 0.1", "head_dim is 300"], [], {"copies": []}, "call", "auto")
        self.assertExpectedInline(
            str(text),
            """\
call
  selection   auto
  chosen      stock
  because     dropout_p is 0.1
              head_dim is 300""",
        )

    def test_diagnosis(self):
        text = _doctor.Diagnosis(
            version="1.2.3", facts={"torch": "2.13.0, CPU build", "binding": "not loaded"},
            problems=["no binding for torch2.13.0-cp311"], notes=["a note"], kernels=[], status={},
        )  # fmt: skip
        self.assertExpectedInline(
            str(text),
            """\
torch_flashsdpa 1.2.3
  torch        2.13.0, CPU build
  binding      not loaded

problems
  x no binding for torch2.13.0-cp311

notes
  - a note

attention stays stock until this is mended""",
        )

    def test_recorders_table(self):
        recorder = report.Recorder()
        self.assertExpectedInline(str(recorder), """no call of scaled_dot_product_attention was seen""")
        event = {
            "kind": "decision", "phase": "eager", "op": "sdpa", "kernel": "stock", "shape_q": (1, 2, 8, 16),
            "shape_k": (1, 2, 9, 16), "shape_v": (1, 2, 9, 16), "dtype": "float32", "device": "cpu", "mask": "(8, 9) bool",
            "is_causal": False, "reasons": ["dropout_p is 0.1"],
        }  # fmt: skip
        recorder(event)
        recorder(event)
        recorder(event | {"kind": "launch", "op": "forward", "kernel": "flashsdpa_fwd_cpu", "mask": None, "reasons": []})
        self.assertExpectedInline(
            str(recorder),
            """\
count  what            kernel             call                                                                            reasons
2      decision eager  stock              q (1, 2, 8, 16) k (1, 2, 9, 16) v (1, 2, 9, 16), float32 cpu, mask (8, 9) bool  dropout_p is 0.1
1      launch forward  flashsdpa_fwd_cpu  q (1, 2, 8, 16) k (1, 2, 9, 16) v (1, 2, 9, 16), float32 cpu""",
        )


# --- record_dispatch and the log --------------------------------------------------------------------------------------


def _decisions(recorder):
    return [(row["kernel"] == "stock", row["phase"], row["count"]) for row in recorder.rows if row["kind"] == "decision"]


def test_record_dispatch_counts_decisions_and_launches():
    inputs = make(grad=True)
    enable("flashsdpa")
    F.scaled_dot_product_attention(*inputs)  # before: not seen
    with record_dispatch() as outer:
        with record_dispatch() as inner:
            for _ in range(3):
                F.scaled_dot_product_attention(*inputs)
        F.scaled_dot_product_attention(*make(1, 2, 130, 300))
        F.scaled_dot_product_attention(*inputs).sum().backward()
    F.scaled_dot_product_attention(*inputs)  # after: not seen
    assert _decisions(inner) == [(False, "eager", 3)]
    assert sorted(_decisions(outer)) == [(False, "eager", 4), (True, "eager", 1)]
    launches = {row["op"]: row["count"] for row in outer.rows if row["kind"] == "launch"}
    assert sum(launches.values()) >= 5 and any("backward" in op for op in launches)
    refused = next(row for row in outer.rows if row["kernel"] == "stock")
    assert refused["reasons"] == [f"head_dim{of} is 300; supported: 0 to 256" for of in ("", " of value")]
    assert refused["shape_q"] == (1, 2, 130, 300) and refused["dtype"] == "float32" and refused["device"] == "cpu"
    assert "head_dim is 300" in outer.table()


def test_record_dispatch_of_compiled_code():
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager")
    x = torch.randn(1, 2, 8, 8)
    enable("flashsdpa")
    with record_dispatch() as seen:
        compiled(x)
        compiled(x)
    assert {phase for _, phase, _ in _decisions(seen)} == {"traced"}
    assert [row["count"] for row in seen.rows if row["kind"] == "launch"] == [2]


def test_record_dispatch_of_the_explicit_function():
    with record_dispatch() as seen:
        torch_flashsdpa.attention(*make())
    assert [(row["kind"], row["count"]) for row in seen.rows] == [("launch", 1)]


@pytest.fixture
def quiet_log():
    yield
    report.log("off")


@pytest.mark.parametrize("level, kinds", [("off", []), ("decisions", ["eager"]), ("launches", ["eager", "launch"])])
def test_log_levels(caplog, quiet_log, level, kinds):
    enable("flashsdpa")
    report.log(level)
    with caplog.at_level(logging.INFO, logger="torch_flashsdpa"):
        F.scaled_dot_product_attention(*make())
    assert [record.getMessage().split(maxsplit=1)[0].rstrip(":") for record in caplog.records] == kinds


def test_log_of_a_refusal(caplog, quiet_log):
    enable("flashsdpa")
    report.log("decisions")
    with caplog.at_level(logging.INFO, logger="torch_flashsdpa"):
        F.scaled_dot_product_attention(*make(1, 2, 130, 300))
    (message,) = (record.getMessage() for record in caplog.records)
    assert "-> stock (head_dim is 300; supported: 0 to 256;" in message


@pytest.mark.parametrize("value, expected", [("decisions", "-> flashsdpa_fwd"), ("loud", "log level is 'loud'")])
def test_log_from_the_environment(run_python, value, expected):
    run_python(
        "import torch, torch_flashsdpa as t; t.enable('flashsdpa'); x = torch.randn(1, 1, 40, 8)\n"
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)",
        env={"TORCH_FLASHSDPA_LOG": value},
    )
    assert expected in run_python.stderr


# --- profiler ---------------------------------------------------------------------------------------------------------


def test_assert_kernel():
    inputs = make(grad=True)
    with sdpa_backend("flashsdpa"):
        with profiler.assert_kernel("flashsdpa_fwd", times=2):
            outs = [F.scaled_dot_product_attention(*inputs) for _ in range(2)]
        with profiler.assert_kernel("flashsdpa_bwd"):
            outs[0].sum().backward()
        with pytest.raises(AssertionError, match=r"flashsdpa_fwd\* ran 1 times, expected 2 times"):
            with profiler.assert_kernel("flashsdpa_fwd", times=2):
                F.scaled_dot_product_attention(*inputs)
    with pytest.raises(AssertionError, match="kernels seen: none"), profiler.assert_kernel("flashsdpa_fwd"):
        F.scaled_dot_product_attention(*inputs)


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_is_content_with_a_working_installation():
    diagnosis = torch_flashsdpa.doctor()
    assert diagnosis.healthy, str(diagnosis)
    assert diagnosis["facts"]["self-test"] == "a small call agrees with float64"
    assert diagnosis["facts"]["selection"] == "stock, default of the process; router not installed" or diagnosis["status"]["router"]
    assert diagnosis["kernels"] and any("fast path" in note for note in diagnosis["notes"])


def test_doctor_notices_a_kernel_that_computes_wrongly(monkeypatch):
    import torch_flashsdpa._attention as module

    right = module.attention
    monkeypatch.setattr(module, "attention", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    diagnosis = torch_flashsdpa.doctor()
    assert not diagnosis.healthy
    assert "off by" in str(diagnosis)


def test_doctor_notes_a_restricted_torch():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert any("limited to math" in note for note in torch_flashsdpa.doctor()["notes"])


def test_doctor_notes_an_instruction_set_that_is_none(monkeypatch):
    monkeypatch.setenv("TORCH_FLASHSDPA_CPU_ISA", "avx1024")
    diagnosis = torch_flashsdpa.doctor()
    assert any("CPU_ISA=avx1024 is not known and is ignored; use portable, avx2" in note for note in diagnosis["notes"])
    assert "capped" not in str(diagnosis)


@pytest.mark.parametrize("first", ("record_dispatch().__enter__()", "log('launches')", "explain(q, q, q)", "routed_calls()"))
def test_any_report_may_be_the_first_use(run_python, first):
    code = f"import torch; from torch_flashsdpa import *; from torch_flashsdpa.report import log; q = torch.ones(1, 1, 4, 4); {first}"
    run_python(code + "; print('done')")


# --- merge_partials ---------------------------------------------------------------------------------------------------


def test_merge_partials_equals_attention_over_all_keys():
    q, k, v = make(2, 3, 9, 16)
    whole, lse = torch_flashsdpa.attention(q, k, v, return_lse=True)
    parts = [torch_flashsdpa.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(4), slice(4, None))]
    out, merged = torch_flashsdpa.merge_partials(*parts[0], *parts[1])
    torch.testing.assert_close((out, merged), (whole, lse))


def test_merging_an_empty_partial_changes_no_bit():
    q, k, v = make(2, 3, 9, 16)
    out, lse = torch_flashsdpa.attention(q, k, v, return_lse=True)
    nothing, no_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for arguments in ((out, lse, nothing, no_lse), (nothing, no_lse, out, lse)):
        merged_out, merged_lse = torch_flashsdpa.merge_partials(*arguments)
        assert torch.equal(merged_out, out) and torch.equal(merged_lse, lse)
    empty_out, empty_lse = torch_flashsdpa.merge_partials(nothing, no_lse, nothing, no_lse)
    assert torch.equal(empty_out, nothing) and torch.equal(empty_lse, no_lse)


def test_merging_two_empty_partials_has_gradients():
    """A row without a key in either part: no nan, neither in its own gradients nor in those of its keys."""
    q, k, v = make(1, 1, 4, 8, grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1], mask[2, :2], mask[3, 2:] = False, False, False
    parts = [torch_flashsdpa.attention(q, k[:, :, part], v[:, :, part], mask[:, part], return_lse=True)
             for part in (slice(2), slice(2, None))]  # fmt: skip
    out, lse = torch_flashsdpa.merge_partials(*parts[0], *parts[1])
    whole, whole_lse = torch_flashsdpa.attention(q, k, v, mask, return_lse=True)
    for got, want in ((out, whole), (lse, whole_lse)):
        gradients = (torch.autograd.grad(t, (q, k, v), torch.ones_like(t), retain_graph=True, allow_unused=True) for t in (got, want))
        torch.testing.assert_close(*gradients)


def test_merging_does_not_hide_nan():
    out, lse = torch.ones(1, 2, 4), torch.tensor([[torch.nan, 0.0]])
    merged, merged_lse = torch_flashsdpa.merge_partials(out, lse, out, torch.zeros(1, 2))
    assert merged[0, 0].isnan().all() and merged_lse[0, 0].isnan() and merged[0, 1].isfinite().all()
