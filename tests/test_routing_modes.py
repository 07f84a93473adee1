"""One set of cases eager, compiled with dynamic shapes, and exported: the float64 oracle holds in every mode."""

import pytest
import torch
import torch_flashsdpa
from cases import Case, inputs
from oracle import Call, check, reference, run_op
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

CASES = [
    Case("full", batch=2, heads=(2, 2), seq=(66, 66), dim=(16, 16)),
    Case("causal", batch=2, heads=(4, 2), seq=(70, 90), dim=(24, 16), call=Call(is_causal=True)),
    Case("bool", batch=1, heads=(2, 2), seq=(130, 70), dim=(16, 16), mask="rows_false:bqk"),
    Case("bias", batch=3, heads=(2, 1), seq=(66, 131), dim=(8, 8), mask="bias:hqk", mask_grad=True),
    Case("scale", batch=2, heads=(2, 2), seq=(65, 64), dim=(16, 16), call=Call(scale=-0.4), layout=("bsh",) * 3),
    Case("bfloat16", batch=2, heads=(2, 2), seq=(67, 64), dim=(32, 32), dtype=torch.bfloat16, layout=("bsh", "bhs", "packed")),
]


class Attend(nn.Module):
    def __init__(self, call, gqa):
        super().__init__()
        self.call, self.gqa = call, gqa

    def forward(self, q, k, v, mask=None):
        return sdpa(q, k, v, attn_mask=mask, is_causal=self.call.is_causal, scale=self.call.scale, enable_gqa=self.gqa)


def runner(function):
    """function(q, k, v, mask) as a `run` of the oracle."""

    def run(x, call):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        mask = x.mask.detach().requires_grad_(x.mask_grad) if x.mask is not None else None
        out = function(*leaves, mask) if mask is not None else function(*leaves)
        wanted = leaves + ([mask] if x.mask_grad else [])
        grads = torch.autograd.grad(out, wanted, x.grad_out)
        result = run_op(x, call)
        result.out, result.lse, result.grads = out.detach(), None, dict(zip(x.names(), grads))
        return result

    return run


def module_of(case):
    return Attend(case.call, case.heads[0] != case.heads[1])


@pytest.fixture(autouse=True)
def enabled():
    torch_flashsdpa.enable("flashsdpa", strict=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager(case, routed):
    x, module = inputs(case), module_of(case)
    assert routed(module, x.q, x.k, x.v, x.mask) == 1
    check(x, case.call, run=runner(module))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_by_aot_with_dynamic_shapes(case, routed):
    module = torch.compile(module_of(case), backend="aot_eager", fullgraph=True, dynamic=True)
    x = inputs(case)
    assert routed(module, x.q, x.k, x.v, x.mask) == 1
    check(x, case.call, run=runner(module))


@pytest.mark.parametrize("case", CASES[1:4:2] + CASES[5:], ids=str)
def test_compiled_by_inductor_with_dynamic_shapes(case, routed):
    """One compilation serves several sizes; the numbers are the oracle's for each."""
    module = torch.compile(module_of(case), fullgraph=True, dynamic=True)
    for seq in (case.seq, (case.seq[0] + 5, case.seq[1] + 64)):
        case = Case(**{**vars(case), "seq": seq})
        x = inputs(case)
        with torch.no_grad():
            assert routed(module, x.q, x.k, x.v, x.mask) == 1
        check(x, case.call, run=runner(module))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exported(case, routed):
    """A program exported for our op holds it by name; exported without asking, it stays PyTorch's own and still runs."""
    x, module = inputs(case), module_of(case)
    arguments = (x.q, x.k, x.v) + ((x.mask,) if x.mask is not None else ())
    want = reference(x, case.call).out
    bound = 4 * torch.finfo(case.dtype).eps * want.abs().max() + 1e-6
    torch_flashsdpa.enable("flashsdpa")
    plain = torch.export.export(module, arguments)
    assert "flashsdpa" not in str(plain.graph)
    with torch_flashsdpa.route_in_export():
        program = torch.export.export(module, arguments).run_decompositions()
    assert "flashsdpa.forward" in str(program.graph)
    torch_flashsdpa.disable()
    assert routed(program.module(), *arguments) == 1
    for exported in (plain, program):
        assert (exported.module()(*arguments) - want).abs().max() <= bound


def test_exported_program_survives_a_file(tmp_path, routed):
    case = CASES[3]
    x = inputs(case)
    torch_flashsdpa.enable("flashsdpa")
    with torch_flashsdpa.route_in_export():
        program = torch.export.export(module_of(case), (x.q, x.k, x.v, x.mask)).run_decompositions()
    torch.export.save(program, tmp_path / "attend.pt2")
    loaded = torch.export.load(tmp_path / "attend.pt2")
    torch_flashsdpa.disable()
    assert routed(loaded.module(), x.q, x.k, x.v, x.mask) == 1
    assert (loaded.module()(x.q, x.k, x.v, x.mask) - reference(x, case.call).out).abs().max() < 1e-5
