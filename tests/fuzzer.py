"""Random calls of the public functions and the ops, most of them wrong: each gives a result or a Python exception.

    python tests/fuzzer.py SEED FIRST COUNT [STEP]    # the calls FIRST, FIRST + STEP, ..., each printed before it is made
"""

import random
import sys
import warnings

import torch
import torch_flashsdpa
from oracle import Call, Inputs, reference
from torch_flashsdpa._loader import binding

PYTHON_ERRORS = (TypeError, ValueError, RuntimeError, NotImplementedError)
INT32_MAX, NAN, INF = 2**31 - 1, float("nan"), float("inf")
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
BAD_DTYPES = (torch.int64, torch.int8, torch.complex64, torch.float8_e4m3fn, torch.bool)
NO_TENSORS = (None, 3, "text", [1.0], object())
ODD_NUMBERS = (NAN, INF, -INF, 0.0, -0.0, -2.5, 1e300, 1e-300, -1, 2**62, -(2**62), 2**63, "text", None, 1j, [1.0])


class Calls:
    """Random calls: a valid one first, then most times a few faults in it. Call number n of a seed is always the same."""

    def __init__(self, seed, number):
        self.rng = random.Random(f"{seed} {number}")
        torch.manual_seed(self.rng.randrange(2**31))
        self.faults = []

    def some(self, *values):
        return self.rng.choice(values)

    def chance(self, percent):
        return self.rng.random() * 100 < percent

    def tensor(self, *sizes, dtype=torch.float32):
        t = torch.randn(sizes).to(dtype)
        if self.chance(20) and len(sizes) > 1:  # dense, but not in order
            t = t.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif self.chance(10):  # every second element
            t = torch.stack([t, t], -1)[..., 0]
        elif self.chance(10) and sizes:
            t = t[:1].expand(sizes)
        return t

    def valid(self):
        """Arguments of one valid call of flashsdpa::forward."""
        self.batch, kv, group = self.some(1, 2, 3), self.some(1, 2), self.some(1, 1, 2)
        self.seq_q, self.seq_k = (self.some(0, 1, 1, 3, 5, 17, 64, 65, 130) for _ in range(2))
        dim, dim_v, self.dtype = self.some(0, 1, 4, 8, 40), self.some(0, 1, 4, 8, 33), self.some(*DTYPES)
        self.heads = kv * group
        q = self.tensor(self.batch, self.heads, self.seq_q, dim, dtype=self.dtype)
        k = self.tensor(self.batch, kv, self.seq_k, dim, dtype=self.dtype)
        v = self.tensor(self.batch, kv, self.seq_k, dim_v, dtype=self.dtype)
        if self.chance(10) and group == 1 and self.seq_q == self.seq_k:  # one memory for all
            k, v = q, q
        call = dict(query=q, key=k, value=v, attn_mask=None, mask_plan=None, is_causal=self.chance(30))
        if self.chance(20):
            call["scale"] = self.some(0.0, 1.0, -0.5, 0.3)
        if self.chance(20):
            call["window_left"], call["window_right"] = self.some(-1, 0, 3, 70, 2**62), self.some(-1, 0, 3, 70, 2**62)
        if self.chance(10):
            call["bottom_right"] = True
        if self.chance(50):
            call["attn_mask"] = self.mask()
        if call["attn_mask"] is not None and self.chance(60):
            call["mask_plan"] = torch.ops.flashsdpa.mask_plan(call["attn_mask"])
        return call

    def mask(self):
        sizes = [n if self.chance(60) else 1 for n in (self.batch, self.heads, self.seq_q, self.seq_k)]
        mask = torch.rand(sizes) > self.some(0.0, 0.1, 0.9, 1.0)
        if self.chance(30):
            mask = torch.where(mask, torch.randn(sizes), -INF).to(self.some(torch.float32, self.dtype))
        if self.chance(30):
            mask = mask.transpose(-1, -2).contiguous().transpose(-1, -2)
        return mask

    # --- faults: bad_* makes one of a tensor ---

    def spoil(self, call, *names):
        """One fault in one of the named arguments."""
        name = self.some(*names)
        old = call.get(name)
        if isinstance(old, torch.Tensor):
            kind = self.some(*(f for f in dir(self) if f.startswith("bad_")))
            try:
                call[name] = getattr(self, kind)(old)
            except (*PYTHON_ERRORS, IndexError):  # torch itself does not make such a tensor
                return
        else:
            kind = "number"
            call[name] = self.some(*ODD_NUMBERS, True, *NO_TENSORS, torch.ones(2), torch.ones(()))
        self.faults.append(f"{name}: {kind}")

    def bad_kind(self, t):
        return self.some(self.some(*NO_TENSORS), t.to(self.some(*BAD_DTYPES, *DTYPES)), t.to("meta"))

    def bad_rank(self, t):
        return self.some(lambda: t[None], lambda: t[0], lambda: t.flatten(), lambda: t.flatten(0, 1), lambda: t.sum(),
                         lambda: t[None, None, None])()

    def bad_size(self, t):
        axis = self.rng.randrange(t.dim())
        return self.some(lambda: t.narrow(axis, 0, t.size(axis) // 2), lambda: torch.cat([t, t], axis),
                         lambda: t.narrow(axis, 0, 0), lambda: t.transpose(0, axis),
                         lambda: t.narrow(axis, 0, 1).expand(*t.shape[:axis], self.some(2, 7, 300), *t.shape[axis + 1 :]))()

    def bad_huge(self, t):
        """Of a size that no memory holds, without taking any."""
        sizes = [self.some(n, n, n, 2**20, 2**31, 2**40) for n in t.shape]
        return torch.empty((), dtype=t.dtype).expand(sizes) if max(sizes, default=0) >= 2**31 else t

    def bad_layout(self, t):
        return self.some(lambda: t.to_sparse(), lambda: t.to_sparse_csr(), lambda: t.to_mkldnn(),
                         lambda: torch.nested.nested_tensor(list(t)),
                         lambda: torch.nested.nested_tensor(list(t), layout=torch.jagged),
                         lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8))()

    def bad_values(self, t):
        if t.is_floating_point():
            return torch.full_like(t, self.some(NAN, INF, -INF, torch.finfo(t.dtype).max))
        return torch.randint_like(t, -INT32_MAX - 1, INT32_MAX) if t.dtype == torch.int32 else ~t

    def bad_overlap(self, t):
        """Rows that share memory with their neighbours."""
        return torch.randn(t.numel() + 8).to(t.dtype).as_strided(t.shape, [1] * t.dim())

    def bad_view(self, t):
        return self.some(lambda: torch._neg_view(t), lambda: t.requires_grad_(), lambda: t.flip(-1),
                         lambda: t.as_strided(t.shape, [0] * t.dim()))()

    def garbage_plan(self, call):
        """A plan of the right or a wrong size, with random words, a right version now and then, or of another mask."""
        mask = call["attn_mask"] if call["attn_mask"] is not None else self.mask()
        self.faults.append("mask_plan: garbage")
        plan = torch.ops.flashsdpa.mask_plan(mask if self.chance(80) else self.mask())
        if self.chance(60) and plan.numel():
            low, high = self.some((-INT32_MAX, INT32_MAX), (0, 3), (-5, 500), (3, 2000))
            changed = torch.rand(plan.shape) < self.some(1.0, 0.02)
            plan = torch.where(changed, torch.randint(low, high, plan.shape, dtype=torch.int32), plan)
            if self.chance(70):
                plan[..., 0] = 2
        call["mask_plan"] = plan
        if self.chance(40):
            call["attn_mask"] = None

    # --- calls: (function without arguments, the arguments as a dict) ---

    def make(self):
        """(name, function without arguments, the arguments as a dict)."""
        target = self.some(*(t for t in dir(self) if t.startswith("call_")))
        return (target[5:], *getattr(self, target)())

    def arguments(self, *names):
        call = self.valid()
        if self.chance(15):
            self.garbage_plan(call)
        for _ in range(self.some(0, 1, 1, 1, 2, 3)):
            self.spoil(call, *names, *call)
        return call

    def call_forward(self):
        call = self.arguments("window_left", "window_right", "scale", "dropout_p", "softcap", "alibi_slopes", "sinks",
                              "rng_state", "deterministic", "batch_invariant", "bottom_right")
        if self.chance(20) and not {"dropout_p", "rng_state"} & call.keys():
            call |= dict(dropout_p=self.some(1e-9, 0.3, 1.0), rng_state=torch.ops.flashsdpa.rng_state())
        positional = [call.pop(n) for n in ("query", "key", "value")]

        def run():
            out, lse = torch.ops.flashsdpa.forward(*positional, **call)
            check_result(self, *positional, call, out)
            if out.requires_grad:
                out.sum().backward()

        return run, dict(zip(("query", "key", "value"), positional)) | call

    call_forward_again = call_forward  # the largest surface gets more of the calls

    def call_backward(self):
        call = self.valid()
        out, lse = torch.ops.flashsdpa.forward(call["query"], call["key"], call["value"], **dict(list(call.items())[3:]))
        if self.chance(15):
            self.garbage_plan(call)
        call |= dict(out=out, lse=lse, grad_out=self.some(out, torch.ones_like(out), torch.ones(()).to(out).expand_as(out)),
                     grad_lse=self.some(None, lse), output_mask=[self.chance(70) for _ in range(5)])
        for _ in range(self.some(0, 1, 1, 2)):
            self.spoil(call, *call)
        names = ("grad_out", "grad_lse", "query", "key", "value", "out", "lse")
        positional = [call[n] for n in names]
        return lambda: torch.ops.flashsdpa.backward(*positional, **{n: a for n, a in call.items() if n not in names}), call

    def call_mask_plan(self):
        self.valid()
        call = dict(attn_mask=self.mask())
        if self.chance(80):
            self.spoil(call, "attn_mask")
        function = self.some(torch.ops.flashsdpa.mask_plan, torch_flashsdpa.plan_mask)
        return lambda: function(**call), call

    def call_attention(self):
        call = self.arguments("scale", "dropout_p", "softcap", "alibi_slopes", "sinks", "deterministic", "batch_invariant")
        call["window"] = call.pop("window_left", -1), call.pop("window_right", -1)
        call["enable_gqa"] = self.some(True, True, False)
        if self.chance(20):
            self.spoil(call, "window", "enable_gqa", "return_lse")

        def run():
            check_result(self, call["query"], call["key"], call["value"], call, torch_flashsdpa.attention(**call))

        return run, call

    def call_sdpa(self):
        call = self.arguments("scale", "dropout_p", "enable_gqa", "is_causal")
        call = {n: call[n] for n in call if n in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")}
        if "bad_huge" in str(self.faults):  # stock would take the time it needs
            call["query"] = None
        scope = [self.some("flashsdpa", "auto"), self.some(False, True)]
        if self.chance(10):
            scope[self.some(0, 1)] = self.some(*ODD_NUMBERS, *NO_TENSORS)

        def run():
            with torch_flashsdpa.sdpa_backend(*scope):
                torch.nn.functional.scaled_dot_product_attention(**call)

        return run, call | {"scope": scope}

    def call_explain(self):
        call = self.arguments("scale", "dropout_p", "enable_gqa", "backend")
        call = {n: call[n] for n in call if n not in ("mask_plan", "window_left", "window_right", "bottom_right")}
        return lambda: str(torch_flashsdpa.explain(**call)), call

    def call_plan_mask_fn(self):
        call = dict(fn=lambda b, h, q, k: k <= q + b, batch=self.some(1, 2, None), heads=self.some(1, 3, None),
                    seq_q=self.some(0, 1, 65), seq_k=self.some(0, 1, 65), device=None, compile=False)
        for _ in range(self.some(0, 1, 1, 2)):
            name = self.some("fn", "batch", "heads", "seq_q", "seq_k", "device")
            results = self.some(torch.ones(3), torch.ones(3) > 0, torch.ones(()) > 0, True, 3, None)
            call[name] = self.some(lambda *_, answer=results: answer, *ODD_NUMBERS, *NO_TENSORS, "meta", "nowhere")
        return lambda: torch_flashsdpa.plan_mask_fn(**call), call

    def call_others(self):
        lse = self.tensor(2, 5)
        call = dict(out1=self.tensor(2, 5, 4), lse1=lse, out2=self.tensor(2, 5, 4), lse2=lse)
        if self.chance(50):
            self.spoil(call, *call)
            return lambda: torch_flashsdpa.merge_partials(**call), call
        if self.chance(50):
            device = self.some("cpu", "meta", "cuda", "nowhere", *ODD_NUMBERS)
            return lambda: torch.ops.flashsdpa.rng_state(device=device), dict(device=device)
        call = dict(backend=self.some("stock", "auto", "flashsdpa", *NO_TENSORS, torch.ones(2)),
                    strict=self.some(False, True, *ODD_NUMBERS, torch.ones(2)))
        return lambda: (torch_flashsdpa.enable(**call), torch_flashsdpa.disable()), call


def check_result(calls, query, key, value, call, out):
    """A call without a fault against the formula in float64, which other tests do to the last digit."""
    if calls.faults:
        return
    window = call.get("window", (call.get("window_left", -1), call.get("window_right", -1)))
    options = Call(call["is_causal"], call.get("bottom_right", False), window, call.get("scale"),
                   dropout_p=call.get("dropout_p", 0.0))
    want = reference(Inputs(query, key, value, call["attn_mask"], rng_state=call.get("rng_state")), options)
    close = 1e-4 if query.dtype in (torch.float32, torch.float64) else 3e-2
    torch.testing.assert_close(out.double(), want.out, rtol=close, atol=close)


def text(value):
    if not isinstance(value, torch.Tensor):
        return repr(value)[:60]
    if value.is_nested or value.layout is not torch.strided:
        return f"{value.layout} {value.dtype}"
    return f"{value.dtype} {tuple(value.shape)} strides {value.stride()} on {value.device}"


def main(seed, first, count, step=1):
    """Makes the calls. Standard output gets a line before each, so that the last one tells where it ended."""
    warnings.simplefilter("ignore")
    binding()
    served = refused = 0
    for number in range(first, first + count, step):
        calls = Calls(seed, number)
        name, run, arguments = calls.make()
        print("call", number, name, {n: text(a) for n, a in arguments.items()}, calls.faults, flush=True)
        try:
            run()
            served += 1
        except AssertionError:
            raise  # a wrong result
        except PYTHON_ERRORS as error:
            assert str(error).strip(), "an error without a text"
            assert calls.faults or not name.startswith("forward"), f"a valid call is refused: {error}"
            assert "INTERNAL ASSERT" not in str(error), f"not meant for a user: {error}"
            refused += 1
        except IndexError:
            assert name == "sdpa"  # stock PyTorch's, for a mask with one axis
    print("done", served, refused)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
