"""profile(): which calls it sees, what it says of them, and the command that runs a program under it."""

import json
import re
import threading

import pytest
import torch
import torch.nn.functional as F

import torch_flashsdpa
from torch_flashsdpa import cli, enable, sdpa_backend
from torch_flashsdpa._loader import binding
from torch_flashsdpa.profiling import html, output, replay
from torch_flashsdpa.profiling.calls import Layout

MASK = torch.ones(130, 130, dtype=torch.bool).tril()


def make(*shape, grad=False):
    return [torch.randn(*(shape or (1, 2, 130, 16)), requires_grad=grad) for _ in range(3)]


def watched(function, **how):
    """The profile of function()."""
    with torch_flashsdpa.profile(**how) as profile:
        function()
    return profile


# --- what is seen -----------------------------------------------------------------------------------------------------


def test_distinct_calls_are_counted_with_kernel_and_reason():
    q, k, v = make()
    wide = v.repeat(1, 1, 1, 20)

    def program():
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        F.scaled_dot_product_attention(q, k, wide)
        F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))

    enable("flashsdpa")
    rows = watched(program, replay_seconds=0).rows
    counts = {(row["is_causal"], row["gqa"], row["dropout_p"], row["shapes"][0], row["shapes"][2][-1]): row["count"] for row in rows}
    shape = (1, 2, 130, 16)
    assert counts == {(False, False, 0.0, shape, 16): 3, (True, False, 0.0, shape, 16): 1, (False, True, 0.0, shape, 16): 1,
                      (False, False, 0.1, shape, 16): 1, (False, False, 0.0, shape, 320): 1,
                      (False, False, 0.0, (2, 1, 130, 16), 16): 1}  # fmt: skip
    for row in rows:
        assert row["source"] == "eager" and row["backend"] == "flashsdpa"
        if row["shapes"][2][-1] == 320:
            assert row["kernel"] == "stock" and row["reasons"] == ["head_dim of value is 320; supported: 0 to 256"]
        else:
            assert row["kernel"].startswith("flashsdpa_fwd_cpu") and not row["reasons"]
        assert "used up" in row["note"]


def test_stock_is_seen_too_and_leaves_no_router_behind(run_python):
    code = """
import torch, torch_flashsdpa as t
x = torch.randn(1, 1, 40, 8)
with t.profile(replay_seconds=0) as p:
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(p.rows[0]["kernel"], p.rows[0]["reasons"], t.status()["router"])
"""
    assert run_python(code) == "stock ['the selection is stock'] False"


@pytest.mark.parametrize(
    "mask, kind",
    [(None, "none"), (MASK, "bool, empty 33.3%, full 33.3%, mixed 33.3%"),
     (torch.zeros(130, 130).masked_fill(~MASK, -torch.inf), "additive float32, empty 33.3%, full 33.3%, mixed 33.3%")],
    ids=("none", "bool", "additive"))  # fmt: skip
def test_mask_kinds(mask, kind):
    q, k, v = make()
    (row,) = watched(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), replay_seconds=0).rows
    assert row["mask"] == kind
    flop = 4 * 2 * 16 * (130 * 130 if mask is None else 130 * 131 / 2)
    (call, entry), = watched(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))._calls.rows()
    assert replay.flop(call, entry.mask) == pytest.approx(flop)


def test_gradients_are_those_of_the_calling_code():
    q, k, v = make(grad=True)
    enable("flashsdpa")

    def program():
        F.scaled_dot_product_attention(q, k, v).sum().backward()
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v)

    rows = watched(program, replay_seconds=0).rows
    assert sorted((row["needs_grad"], row["count"]) for row in rows) == [(False, 1), (True, 1)]


def test_two_threads():
    inputs = make()
    enable("flashsdpa")

    def program():
        work = lambda: [F.scaled_dot_product_attention(*inputs) for _ in range(5)]  # noqa: E731
        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    profile = watched(program, replay_seconds=0)
    assert [(row["count"], row["kernel"] != "stock") for row in profile.rows] == [(10, True)]
    assert profile.summary["threads"] == 2 and "10 calls, 1 distinct, on 2 threads" in str(profile)


def test_compiled_functions():
    """What they give to ours is counted at each run; what they leave to stock is seen while it is traced, and said so."""
    q, k, v = make(grad=True)
    ours = torch.compile(lambda q: F.scaled_dot_product_attention(q, k, v), backend="aot_eager")
    wide = v.detach().repeat(1, 1, 1, 20)
    left = torch.compile(lambda q: F.scaled_dot_product_attention(q, k, wide), backend="aot_eager")
    enable("flashsdpa")

    def program():
        for _ in range(3):
            ours(q).sum().backward()
        left(q), left(q)

    profile = watched(program)
    rows = {row["source"]: row for row in profile.rows}
    assert set(rows) == {"graph", "traced"}
    assert rows["graph"]["count"] == 3 and rows["graph"]["needs_grad"] and rows["graph"]["speedup"] > 0
    assert rows["traced"]["kernel"] == "stock" and "executions are not seen" in rows["traced"]["note"]
    assert profile.summary["calls"] == 3 and "executions are not seen" in str(profile)


def test_the_explicit_function_is_seen_and_only_repeated_where_stock_can():
    q, k, v = make()
    attend = torch_flashsdpa.attention
    rows = watched(lambda: (attend(q, k, v), attend(q, k, v, softcap=2.0, window=(5, 0)))).rows
    assert [row["count"] for row in rows] == [1, 1] and rows[0]["speedup"] > 0
    assert rows[1]["note"] == "not run again: torch_flashsdpa.attention() with window, softcap, which stock does not have"


def test_no_call():
    profile = watched(lambda: torch.ones(3).sum())
    assert profile.rows == [] and profile.summary["calls"] == 0
    assert "no call of scaled_dot_product_attention was seen" in str(profile)


def test_a_block_that_raises_keeps_its_profile():
    inputs = make()
    with pytest.raises(KeyError), torch_flashsdpa.profile(replay_seconds=0) as profile:
        F.scaled_dot_product_attention(*inputs)
        raise KeyError
    F.scaled_dot_product_attention(*inputs)  # after: not seen
    assert [row["count"] for row in profile.rows] == [1] and profile.seconds > 0


# --- what is said of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_replay_times_and_checks_both(grad):
    q, k, v = make(2, 4, 70, 16, grad=grad)
    enable("flashsdpa")
    profile = watched(lambda: [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3) for _ in range(2)])
    (row,) = profile.rows
    assert row["stock_ms"] > 0 and row["ours_ms"] > 0 and row["speedup"] == pytest.approx(row["stock_ms"] / row["ours_ms"])
    assert 0 < row["stock_error"] < 1e-5 and 0 < row["our_error"] < 1e-5
    assert row["our_kernel"].startswith("flashsdpa_fwd_cpu") and row["stock_kernel"]
    assert row["seconds"] == pytest.approx(2 * row["ours_ms"] / 1e3)
    assert row["share"] == pytest.approx(row["seconds"] / profile.seconds) and profile.summary["share"] == row["share"]
    pairs = 70 * 71 / 2
    assert row["flop"] == pytest.approx(2 * 4 * 2 * 4 * 16 * pairs * (3.5 if grad else 1))
    peak = profile.summary["peaks"]["float32 cpu"]
    assert profile.summary["utilisation"] == pytest.approx(row["flop"] / row["seconds"] / peak)


def test_errors_are_measured_not_assumed(monkeypatch):
    q, k, v = make()
    right = replay.run
    monkeypatch.setattr(replay, "run", lambda arguments, grad: right(arguments, grad) + 0.25 * binding().router_installed())
    enable("flashsdpa")
    (row,) = watched(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK)).rows
    assert row["stock_error"] < 1e-5 and row["our_error"] == pytest.approx(0.25, abs=1e-4)


def test_a_call_that_ours_refuses_is_timed_on_stock():
    q, k, v = make(1, 2, 40, 300)
    enable("flashsdpa")
    (row,) = watched(lambda: F.scaled_dot_product_attention(q, k, v)).rows
    assert row["ours_ms"] is None and row["speedup"] is None and row["stock_ms"] > 0 and row["our_error"] is None
    assert row["seconds"] == pytest.approx(row["stock_ms"] / 1e3) and "head_dim is 300" in row["reasons"][0]


def test_fresh_inputs_have_the_layout_and_the_mask_its_values():
    base = torch.randn(2, 50, 3, 4, 8)
    q, k, v = base.permute(2, 0, 3, 1, 4)  # strided views, as of one projection
    mask = torch.zeros(1, 1, 1, 50).masked_fill(torch.arange(50) > 30, -torch.inf).expand(2, 4, 50, 50)
    ((call, entry),) = watched(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))._calls.rows()
    arguments = replay.inputs_of(call, entry.mask)
    assert Layout.of(arguments["query"]) == Layout.of(q) and not torch.equal(arguments["query"], q)
    assert arguments["query"].abs().max() > 1
    assert torch.equal(arguments["attn_mask"], mask) and arguments["attn_mask"].stride() == mask.stride()
    mask.untyped_storage().fill_(0)  # the program goes on and reuses its memory
    assert entry.mask[..., 31:].max() == -torch.inf


def test_profiling_leaves_the_random_numbers_alone():
    inputs = make()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    str(watched(lambda: F.scaled_dot_product_attention(*inputs)))
    assert torch.equal(torch.rand(3), expected)


def test_flop_of_the_program():
    q, k, v = make()
    a = torch.randn(64, 64)
    enable("flashsdpa")
    profile = watched(lambda: (F.scaled_dot_product_attention(q, k, v), a @ a), flops=True)
    assert profile.summary["program_flop"] == 4 * 2 * 130 * 130 * 16 + 2 * 64**3
    assert profile.summary["program_utilisation"] > 0 and "model FLOP utilisation" in str(profile)


# --- the pages --------------------------------------------------------------------------------------------------------


def row(**more):
    return {"call": "q (1, 2)", "count": 2, "mask": "none", "kernel": "flashsdpa_fwd_cpu_avx2", "reasons": [], "backend": "auto",
            "source": "eager", "stock_ms": 4.0, "ours_ms": 2.0, "speedup": 2.0, "stock_error": 1e-6, "our_error": 2e-6,
            "share": 0.25, "seconds": 0.004} | more  # fmt: skip


def test_a_busy_machine_is_named(monkeypatch):
    inputs = make()
    said = []
    for load in (0.1, 100.0):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        said.append("busy" in str(watched(lambda: F.scaled_dot_product_attention(*inputs))))
    assert said == [False, True]


def test_text_of_a_row():
    assert output.cells(row()) == ("2", "q (1, 2)", "none", "flashsdpa_fwd_cpu_avx2", "4 ms", "2 ms", "2.00x", "1.0e-06", "2.0e-06",
                                   "25.0%", "selection auto")  # fmt: skip
    assert output.cells(row(kernel="stock", reasons=["a", "b"], ours_ms=None, speedup=None, our_error=None))[5:] == (
        "-", "-", "1.0e-06", "-", "25.0%", "a; b")  # fmt: skip


def test_long_tables_are_cut_in_the_terminal_alone():
    q, k, v = make(1, 1, 40, 8)
    with torch_flashsdpa.profile(replay_seconds=0) as profile:
        [F.scaled_dot_product_attention(q[:, :, :n], k, v) for n in range(1, 41)]
    assert len(profile.rows) == 40 and str(profile).endswith("and 10 more")
    assert html.page(profile.rows, profile.summary, "x").count("<tr>") == 41


def test_html_stands_alone_and_draws_to_scale(tmp_path):
    inputs = make()
    enable("flashsdpa")
    profile = watched(lambda: F.scaled_dot_product_attention(*inputs, attn_mask=MASK))
    text = profile.write_html(tmp_path / "report.html", "<title>").read_text()
    assert "&lt;title&gt;" in text and not re.search(r"<script|src=|href=|url\(|http", text)
    assert text.count("<svg") == 2 and "flashsdpa_fwd_cpu" in text
    stock, ours = profile.rows[0]["stock_ms"], profile.rows[0]["ours_ms"]
    widths = [float(w) for w in re.findall(r'<rect x="430.0" y="[^"]+" width="([\d.]+)" height="11" fill="[^"]+"><title>q', text)]
    assert len(widths) == 2 and widths[0] / widths[1] == pytest.approx(stock / ours, rel=0.05)


# --- the command ------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
import helper_beside_the_script
x = torch.randn(1, 2, 40, 8)
torch.nn.functional.scaled_dot_product_attention(x, x, x)
print("arguments", sys.argv[1:], __name__)
{end}
"""


@pytest.fixture
def script(tmp_path):
    def write(end=""):
        (tmp_path / "helper_beside_the_script.py").write_text("")
        path = tmp_path / "program.py"
        path.write_text(SCRIPT.format(end=end))
        return str(path)

    return write


@pytest.mark.parametrize("end, code, said", [("", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit()", 0, ""), ("sys.exit('bye')", 1, "bye"),
                                             ("raise ValueError('broken')", 1, "ValueError: broken"),
                                             ("raise KeyboardInterrupt", 130, "KeyboardInterrupt")])  # fmt: skip
def test_command_reports_and_keeps_the_exit_code(script, capsys, tmp_path, end, code, said):
    record, page = tmp_path / "p.json", tmp_path / "p.html"
    arguments = ["profile", "--backend", "flashsdpa", "--json", str(record), "--html", str(page), script(end), "--json", "-x"]
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert "arguments ['--json', '-x'] __main__" in out and said in err
    assert "1 calls, 1 distinct, on 1 thread" in out and "flashsdpa_fwd_cpu" in out
    assert (f"ended with exit code {code}" in out) == (code != 0)
    (seen,) = json.loads(record.read_text())["rows"]
    assert seen["count"] == 1 and seen["speedup"] > 0 and page.read_text().startswith("<!DOCTYPE html>")
    assert not torch_flashsdpa.is_enabled()


def test_command_selects_and_restores(script, capsys):
    with sdpa_backend("stock"):
        pass
    assert cli.main(["profile", "--seconds", "0", "--backend", "stock", script()]) == 0
    assert "the selection is stock" in capsys.readouterr().out


def test_command_without_a_program(capsys):
    assert cli.main(["profile", "no_such_file.py"]) == 2
    assert "there is no file no_such_file.py" in capsys.readouterr().err
