"""Every instruction set that this machine can run, each in a process of its own: the choice is made once per process."""

import json
from pathlib import Path

import pytest

PROGRAM = """
import json, sys, torch
sys.path.insert(0, {tests!r})
from torch_flashsdpa._loader import binding
_C = binding()
from cases import *
from oracle import check, check_counting, Call
import torch_flashsdpa

for case in (dim_cases() + mask_kind_cases()[::3] + band_cases()[::6] + decode_cases()[::3] + layout_cases()[::5]
             + head_cases()[::4]):
    try:
        check(inputs(case), case.call)
    except AssertionError as error:
        raise AssertionError(case) from error
for dtype in FLOATS:
    check_counting(1, 2, 1, 130, 200, 72, dtype, make_mask("granules", "isa", (1, 2, 130, 200), dtype), planned=True)
    check_counting(1, 1, 1, 70, 129, 256, dtype, None, Call(is_causal=True, bottom_right=True))
few = decode_cases()[:1] + [case for case in mask_kind_cases() if case.planned][:4]
with torch_flashsdpa.profiler.kernels_run() as kernels:
    for case in few:
        check(inputs(case), case.call)
print(json.dumps([sorted(kernels), _C.cpu_features()]))
"""
ORDER = ("portable", "avx2", "avx512", "amx")


def available():
    from torch_flashsdpa._loader import binding

    return binding().cpu_features()


@pytest.mark.parametrize("isa", ORDER)
def test_instruction_set(run_python, isa):
    """The oracles hold for it, and the kernels that ran are its own (or, where it has none for a dtype, lower ones)."""
    if not available().get(isa):
        pytest.skip(f"this processor has no {isa}")
    out = run_python(PROGRAM.format(tests=str(Path(__file__).parent)), env={"TORCH_FLASHSDPA_CPU_ISA": isa})
    names, features = json.loads(out.splitlines()[-1])
    assert features[isa] and not any(features[higher] for higher in ORDER[ORDER.index(isa) + 1 :])
    sets = {name.rsplit("_", 1)[1] for name in names}
    assert isa in sets and sets <= set(ORDER[: ORDER.index(isa) + 1])
    if isa != "amx":
        assert sets == {isa}
    assert {"fwd", "bwd", "decode", "mask"} == {name.split("_")[1] for name in names}


def test_a_cap_above_the_processor_gives_its_best(run_python):
    features = available()
    best = [isa for isa in ORDER if features.get(isa)][-1]
    code = ("import torch, torch_flashsdpa as t; q = torch.randn(1, 1, 4, 8); "
            "print(t.explain(q, q, q, backend='flashsdpa').chosen)")
    out = run_python(code, env={"TORCH_FLASHSDPA_CPU_ISA": "amx"})
    assert out.endswith(best) or best == "amx"


def test_an_unknown_set_changes_nothing(run_python):
    code = "import torch_flashsdpa._loader as l; print(sum(l.binding().cpu_features().values()))"
    assert run_python(code, env={"TORCH_FLASHSDPA_CPU_ISA": "sse9"}) == run_python(code)
