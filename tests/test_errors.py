"""Bad input to the ops and to attention(): one clear Python error each, before any work, and the process goes on."""

import pytest
import torch
import torch_flashsdpa
from oracle import Call, Inputs, check, ops


def t(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


Q = dict(query=t(2, 4, 5, 8), key=t(2, 2, 7, 8), value=t(2, 2, 7, 6))
PLAN = ops().mask_plan(t(1, 1, 5, 7, dtype=torch.bool))
SPARSE = r"is nested or has layout (Sparse|torch\.sparse_coo); .* take dense strided tensors"
# name -> (changed arguments, what the error must say: the argument or shape, the value given, what is accepted)
BAD = {
    "query rank": (dict(query=t(4, 5, 8)), "3, 4, 4 dimensions; give 4"),
    "value rank": (dict(value=t(2, 2, 7)), "4, 4, 3 dimensions; give 4"),
    "batch": (dict(key=t(3, 2, 7, 8)), r"query \(2, 4, 5, 8\), key \(3, 2, 7, 8\).*batch sizes differ; give equal ones"),
    "kv heads": (dict(value=t(2, 4, 7, 6)), r"value \(2, 4, 7, 6\): key and value heads differ; give equal counts"),
    "ratio": (dict(key=t(2, 3, 7, 8), value=t(2, 3, 7, 6)), "query heads must be a multiple of key heads"),
    "no kv heads": (dict(key=t(2, 0, 7, 8), value=t(2, 0, 7, 6)), "query heads must be a multiple of key heads"),
    "head_dim": (dict(key=t(2, 2, 7, 9)), "query and key head_dim differ; give equal ones"),
    "lengths": (dict(value=t(2, 2, 8, 6)), "key and value lengths differ; give equal ones"),
    "large head_dim": (dict(query=t(2, 4, 5, 257), key=t(2, 2, 7, 257)), "head_dim is 257; supported: 0 to 256"),
    "large value head_dim": (dict(value=t(2, 2, 7, 300)), "head_dim of value is 300; supported: 0 to 256"),
    "mixed dtypes": (dict(key=t(2, 2, 7, 8, dtype=torch.float16)), "dtypes float32, float16, float32; give one dtype"),
    "integer": ({n: v.to(torch.int32) for n, v in Q.items()}, "dtype is int32; supported on cpu: float32, bfloat16"),
    "complex": ({n: v.to(torch.complex64) for n, v in Q.items()}, "dtype is ComplexFloat; supported on cpu: float32"),
    "float8": ({n: v.to(torch.float8_e4m3fn) for n, v in Q.items()}, "dtype is Float8_e4m3fn; supported on cpu"),
    "devices": (dict(key=t(2, 2, 7, 8).to("meta")), "query, key, value are on cpu, meta, cpu; give them on one device"),
    "sparse": (dict(query=t(2, 4, 5, 8).to_sparse()), f"query {SPARSE}"),
    "mask dtype": (
        dict(attn_mask=t(1, 1, 5, 7, dtype=torch.int64)),
        "attn_mask has dtype int64; supported: bool, float32, or the query's float32"),
    "half mask": (dict(attn_mask=t(1, 1, 5, 7, dtype=torch.float16)), "attn_mask has dtype float16; supported: bool, float32"),
    "mask shape": (dict(attn_mask=t(1, 1, 5, 6)), r"attn_mask \(1, 1, 5, 6\) does not broadcast to \(2, 4, 5, 7\)"),
    "mask heads": (dict(attn_mask=t(1, 2, 5, 7)), r"attn_mask \(1, 2, 5, 7\) does not broadcast to \(2, 4, 5, 7\)"),
    "mask device": (dict(attn_mask=t(1, 1, 5, 7).to("meta")), "attn_mask is on meta, query on cpu; give them on one device"),
    "dropout": (dict(dropout_p=1.25), "dropout_p is 1.25; give a probability from 0 to 1"),
    "dropout below 0": (dict(dropout_p=-1e-9), "dropout_p is -1e-09; give a probability from 0 to 1"),
    "dropout nan": (dict(dropout_p=float("nan")), "dropout_p is -?nan; give a probability from 0 to 1"),
    "softcap": (dict(softcap=-30.0), "softcap is -30; give a positive number, or 0 for none"),
    "softcap inf": (dict(softcap=float("inf")), "softcap is inf; give a positive number"),
    "softcap nan": (dict(softcap=float("nan")), "softcap is -?nan; give a positive number"),
    "slopes shape": (dict(alibi_slopes=t(3)), r"alibi_slopes is \(3\); give \(4\) or \(2, 4\)"),
    "slopes batch": (dict(alibi_slopes=t(3, 4)), r"alibi_slopes is \(3, 4\); give \(4\) or \(2, 4\)"),
    "slopes rank": (dict(alibi_slopes=t(1, 2, 4)), r"alibi_slopes is \(1, 2, 4\); give \(4\) or \(2, 4\)"),
    "slopes dtype": (dict(alibi_slopes=t(4, dtype=torch.float64)), "alibi_slopes is float64 on cpu; give float32 on cpu"),
    "slopes device": (dict(alibi_slopes=t(4).to("meta")), "alibi_slopes is float32 on meta; give float32 on cpu"),
    "sinks shape": (dict(sinks=t(2)), r"sinks is \(2\); give \(4\)"),
    "sinks batch": (dict(sinks=t(2, 4)), r"sinks is \(2, 4\); give \(4\)"),
    "sinks dtype": (dict(sinks=t(4, dtype=torch.bfloat16)), "sinks is bfloat16 on cpu; give float32 on cpu"),
    "sinks device": (dict(sinks=t(4).to("meta")), "sinks is float32 on meta; give float32 on cpu"),
    "plan device": (dict(mask_plan=PLAN.to("meta")), "mask_plan is int32 on meta; give .*: int32 on cpu"),
    "plan dtype": (dict(mask_plan=PLAN.long()), "mask_plan is int64 on .*; give .*: int32 on"),
    "sparse mask": (dict(attn_mask=t(1, 1, 5, 7).to_sparse()), f"attn_mask {SPARSE}"),
    "sparse plan": (dict(mask_plan=PLAN.to_sparse()), f"mask_plan {SPARSE}"),
}
OP_ONLY = {
    "random state dtype": (dict(rng_state=t(2)), r"rng_state is float32 on .*; give flashsdpa::rng_state\(\): int64 on"),
    "random state device": (dict(rng_state=torch.zeros(2).long().to("meta")), "rng_state is int64 on meta; give .* on cpu"),
    "random state shape": (dict(rng_state=torch.zeros(3).long()), r"rng_state is \(3\); give flashsdpa::rng_state\(\): \(2\)"),
    "random state rank": (dict(rng_state=torch.zeros(2, 1).long()), r"rng_state is \(2, 1\); give flashsdpa::rng_state"),
    "sparse random state": (dict(dropout_p=0.5, rng_state=torch.zeros(2).long().to_sparse()), f"rng_state {SPARSE}"),
    "no random state": (dict(dropout_p=0.25), r"dropout_p is 0.25 and rng_state is not given; give flashsdpa::rng_state\(\)"),
    "mask rank": (dict(attn_mask=t(5, 7)), r"attn_mask \(5, 7\) does not broadcast"),
    "window left": (dict(window_left=-2), "window_left is -2"),
    "window right": (dict(window_right=-7), "window_right is -7"),
}


@pytest.fixture(autouse=True)
def the_process_goes_on():
    before = torch_flashsdpa.routed_calls()
    yield
    assert torch_flashsdpa.routed_calls() == before, "work began before the arguments were checked"
    check(Inputs(t(1, 1, 3, 4), t(1, 1, 3, 4), t(1, 1, 3, 4), grad_out=t(1, 1, 3, 4)), Call())


def raises(match):
    return pytest.raises(RuntimeError, match=match)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text.strip() and len(text) < 400, text


@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
@pytest.mark.parametrize("name", [*BAD, *OP_ONLY])
def test_forward_op(name, grad):
    change, match = (BAD | OP_ONLY)[name]
    arguments = {**Q, **change}
    if grad and arguments["query"].is_floating_point() and arguments["query"].layout == torch.strided:
        arguments["query"] = arguments["query"].detach().requires_grad_()
    with raises(match) as error:
        ops().forward(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)
    assert "flashsdpa::forward" in str(error.value)
    one_line(error)


# The meta device stands for every device, so that dtypes and limits, which are a kernel's, are no matter of its.
OF_A_DEVICE = ("devices", "mask device", "plan device", "random state device", "slopes device", "slopes dtype", "sinks device",
               "sinks dtype", "sparse", "sparse mask", "sparse plan", "integer", "complex", "float8", "large head_dim",
               "large value head_dim")


@pytest.mark.parametrize("name", [n for n in (*BAD, *OP_ONLY) if n not in OF_A_DEVICE])
def test_meta_gives_the_same_error(name):
    """A compiler must refuse what the kernel would refuse, not trace it."""
    change, match = (BAD | OP_ONLY)[name]
    arguments = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in {**Q, **change}.items()}
    with raises(match):
        ops().forward(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


@pytest.mark.parametrize("name", [n for n in BAD if n not in ("query rank", "value rank")])
def test_attention(name):
    change, match = BAD[name]
    arguments = {**Q, **change}
    with raises(match if name != "ratio" else "multiple") as error:
        torch_flashsdpa.attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), enable_gqa=True,
                                  **arguments)
    one_line(error)


@pytest.mark.parametrize("arguments, match", [
    (dict(query=t(8)), "query, key, value have 1, 4, 4 axes; give equal counts, at least 2"),
    (dict(query=t(5, 8)), "2, 4, 4 axes; give equal counts"),
    (dict(), "query has 4 heads, key 2; give equal counts, or enable_gqa=True"),
    (dict(window=(3, -2), enable_gqa=True), "window_right is -2"),
    (dict(window=(-9, 0), enable_gqa=True), "window_left is -9"),
    (dict(attn_mask=t(1, 1, 1, 1, 1, 5, 7), enable_gqa=True), "attn_mask"),
], ids=("rank 1", "ranks differ", "no gqa flag", "window right", "window left", "mask rank"))
def test_attention_only(arguments, match):
    arguments = {**Q, **arguments}
    with raises(match) as error:
        torch_flashsdpa.attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)
    one_line(error)


@pytest.mark.parametrize("arguments, match", [
    (dict(query="text"), "query is str 'text'; give a tensor"),
    (dict(key=None), "key is NoneType None; give a tensor"),
    (dict(attn_mask=3), "attn_mask is int 3; give a tensor or None"),
    (dict(mask_plan=[PLAN]), "mask_plan is a list; give a tensor or None"),
    (dict(window=5), r"window is 5; give \(left, right\)"),
    (dict(window=(1, 2, 3)), r"window is \(1, 2, 3\); give \(left, right\)"),
    (dict(window=(3.0, 0)), r"window is \(3.0, 0\); give \(left, right\)"),
    (dict(window=(None, 0)), r"window is \(None, 0\); give \(left, right\)"),
    (dict(is_causal="no"), "is_causal is str 'no'; give True or False"),
    (dict(enable_gqa=t(2)), "enable_gqa is Tensor .*; give True or False"),
    (dict(deterministic=0), "deterministic is int 0; give True or False"),
    (dict(dropout_p="half"), "dropout_p is str 'half'; give a number"),
    (dict(scale="big"), "scale is str 'big'; give a number"),
    (dict(scale=t(2)), "scale is Tensor .*; give a number"),
], ids=lambda a: next(iter(a)) if isinstance(a, dict) else "")
def test_attention_wrong_type(arguments, match):
    with pytest.raises(TypeError, match=match):
        torch_flashsdpa.attention(**{**Q, "enable_gqa": True, **arguments})


@pytest.mark.parametrize("mask", (t(1, 1, 100, 7, dtype=torch.int64), t(1, 1, 100, 7, dtype=torch.float64), t(1, 1, 99, 7)),
                         ids=("integers", "float64", "size"))
def test_a_mask_that_is_refused_is_not_planned_before(mask):
    """With more than one granule of scores attention() plans a mask; the refusal is the op's all the same, and first."""
    with torch_flashsdpa.profiler.kernels_run() as kernels:
        with raises("flashsdpa::forward: attn_mask .*(supported: bool, float32, or the query's float32|does not broadcast)"):
            torch_flashsdpa.attention(t(2, 4, 100, 8), t(2, 4, 7, 8), t(2, 4, 7, 8), attn_mask=mask)
    assert not kernels


FIVE = dict(query=t(2, 3, 4, 5, 8), key=t(2, 3, 4, 7, 8), value=t(2, 3, 4, 7, 6))


@pytest.mark.parametrize("change, match", [
    (dict(key=t(3, 2, 4, 7, 8)), r"key, value are .*\(3, 2, 4, 7, 8\).*: batch sizes differ"),
    (dict(value=t(6, 1, 4, 7, 6)), "batch sizes differ"),
    (dict(attn_mask=t(3, 2, 1, 5, 7)), r"attn_mask \(3, 2, 1, 5, 7\) does not broadcast to the query's leading axes \(2, 3\)"),
    (dict(attn_mask=t(6, 4, 5, 7)), r"attn_mask \(6, 4, 5, 7\) does not broadcast to the query's leading axes \(2, 3\)"),
], ids=("key", "value", "mask of five axes", "mask of four axes"))
def test_several_batch_axes_are_not_taken_for_their_product(change, match):
    with raises(match):
        torch_flashsdpa.attention(**{**FIVE, **change})


def test_a_mask_broadcasts_to_several_batch_axes_from_the_last():
    x = {name: torch.randn(tensor.shape) for name, tensor in FIVE.items()}
    for sizes in ((5, 7), (4, 5, 7), (3, 4, 5, 7), (3, 1, 1, 7), (2, 1, 4, 5, 7), (1, 3, 1, 5, 7), (1, 1, 1, 5, 1)):
        mask = torch.randn(sizes)
        want = torch.nn.functional.scaled_dot_product_attention(**x, attn_mask=mask.expand(2, 3, 4, 5, 7))
        torch.testing.assert_close(torch_flashsdpa.attention(**x, attn_mask=mask), want)
    torch_flashsdpa.reset_routed_calls()


@pytest.mark.parametrize("call, error, match", [
    (lambda f: f.plan_mask("text"), TypeError, "attn_mask is str 'text'; give a tensor"),
    (lambda f: f.plan_mask(t(5, 7).to_sparse()), RuntimeError, f"attn_mask {SPARSE}"),
    (lambda f: f.plan_mask(torch.ones(1).expand(2**31, 4)), RuntimeError, "give lengths of at most 2147483647"),
    (lambda f: f.plan_mask(torch.ones(1, device="meta").expand(2**34, 2**28)), RuntimeError, "give lengths of at most"),
    (lambda f: f.plan_mask_fn(None, 1, 1, 4, 4), TypeError, "fn is None; give a function"),
    (lambda f: f.plan_mask_fn(lambda b, h, q, k: q + k, 1, 1, 4, 4), TypeError, r"is torch.int64 \(\); give one bool"),
    (lambda f: f.plan_mask_fn(lambda *_: torch.ones(3) > 0, 1, 1, 4, 4), TypeError, r"is torch.bool \(3,\); give one bool"),
    (lambda f: f.plan_mask_fn(max, -1, 1, 4, 4), ValueError, "batch is -1; give at least 1"),
    (lambda f: f.plan_mask_fn(max, 1, 1, 4.5, 4), TypeError, "seq_q is 4.5; give a whole number of at least 0"),
    (lambda f: f.merge_partials(OUT, LSE, OUT, LSE[0]), RuntimeError, r"out1, lse1, out2, lse2 are .*\(4, 5\); give outs"),
    (lambda f: f.merge_partials(OUT, None, OUT, LSE), TypeError, "lse1 is NoneType None; give a tensor"),
    (lambda f: f.explain("text", OUT, OUT), TypeError, "query is str 'text'; give a tensor"),
    (lambda f: f.explain(OUT, OUT, OUT, is_causal="no"), TypeError, "is_causal is str 'no'; give True or False"),
    (lambda f: f.explain(OUT, OUT, OUT, scale="big"), TypeError, "scale is str 'big'; give a number"),
    (lambda f: f.enable("flashsdpa", strict="no"), TypeError, "strict is str 'no'; give True or False"),
    (lambda f: f.sdpa_backend("auto", strict=1).__enter__(), TypeError, "strict is int 1; give True or False"),
])
def test_other_functions(call, error, match):
    with pytest.raises(error, match=match) as found:
        call(torch_flashsdpa)
    one_line(found)


@pytest.mark.parametrize("value", (t(7, 6), t(6), torch.nested.nested_tensor([t(2, 7, 6), t(2, 5, 6)])), ids=("2", "1", "nested"))
def test_explain_of_a_refused_call_looks_at_no_size_that_is_not_there(value):
    for arguments in ((Q["query"], Q["key"], value), (Q["query"], value, value), (value, Q["key"], value)):
        explanation = torch_flashsdpa.explain(*arguments, backend="flashsdpa")
        assert explanation.chosen == "stock" and all(c["reasons"] for c in explanation.candidates)


LSE, OUT = t(2, 4, 5), t(2, 4, 5, 6)
BACKWARD = {
    "out shape": (dict(out=t(2, 4, 5, 8)), r"out is .*\(2, 4, 5, 8\).*give float32 \(2, 4, 5, 6\)"),
    "out dtype": (dict(out=OUT.half()), "out is float16"),
    "lse shape": (dict(lse=t(2, 5, 4)), r"lse is .*\(2, 5, 4\).*give float32 \(2, 4, 5\)"),
    "lse dtype": (dict(lse=LSE.double()), "lse is float64"),
    "grad_out shape": (dict(grad_out=t(2, 4, 6, 6)), r"grad_out is .*\(2, 4, 6, 6\)"),
    "grad_out dtype": (dict(grad_out=OUT.double()), "grad_out is float64"),
    "grad_lse shape": (dict(grad_lse=t(2, 4)), r"grad_lse is .*\(2, 4\)"),
    "grad_out device": (dict(grad_out=OUT.to("meta")), "grad_out is .* on meta"),
    "key": (dict(key=t(2, 3, 7, 8)), "flashsdpa::backward.*key and value heads differ"),
    "plan device": (dict(mask_plan=PLAN.to("meta")), "flashsdpa::backward: mask_plan is int32 on meta"),
    "dropout": (dict(dropout_p=1.5), "flashsdpa::backward: dropout_p is 1.5"),
    "no random state": (dict(dropout_p=0.5), "flashsdpa::backward: dropout_p is 0.5 and rng_state is not given"),
    "window": (dict(window_left=-4), "window_left is -4"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_op(name):
    change, match = BACKWARD[name]
    arguments = {**Q, "out": OUT, "lse": LSE, "grad_out": OUT, "grad_lse": None,
                 "output_mask": [True] * 3 + [False] * 2, **change}
    positional = [arguments.pop(n) for n in ("grad_out", "grad_lse", "query", "key", "value", "out", "lse")]
    with raises(match) as error:
        ops().backward(*positional, **arguments)
    one_line(error)


def test_several_faults_are_all_named():
    with raises("dropout_p is 0.5 and rng_state is not given.*softcap is -2"):
        ops().forward(**Q, dropout_p=0.5, softcap=-2.0)


def test_undefined_and_missing_arguments():
    with pytest.raises((RuntimeError, TypeError)):
        ops().forward(Q["query"], Q["key"])
    with pytest.raises((RuntimeError, TypeError)):
        ops().forward(Q["query"], Q["key"], None)
