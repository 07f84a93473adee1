"""Dense masks through F.scaled_dot_product_attention on the GPU: ours beside stock, its backends, FlexAttention, and ourselves
without a mask, in one run.

    python benchmarks/masks.py [--grid auto] [--only TEXT] [--rounds N] [--out DIR]

Every forward of ours is cold: it plans its mask, and the plan counts; the backward uses that plan again. FlexAttention is
compiled and gets its block mask for nothing. TFLOP/s are over the pairs that the mask keeps. Rows "is_causal" and "window"
say what a call that states its structure reaches: ours, and FlashAttention-3 where gpu.fa3_ops finds it. Writes
DIR/<date>-<machine>-masks.json. A result is held against float64 before it is timed. `--grid auto`: ours and stock alone, forward
and training step, over the shapes of the table of "auto".
"""

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpu  # noqa: E402
import torch_flashsdpa  # noqa: E402
from torch_flashsdpa.bench import measure  # noqa: E402

DOCUMENTS = torch.Generator().manual_seed(5)


@functools.cache
def document_ends(seq):
    """Where documents of 239 to 3908 tokens end that fill a sequence; the same in every run."""
    ends = [0]
    while ends[-1] < seq:
        ends.append(ends[-1] + int(torch.randint(239, 3909, (), generator=DOCUMENTS)) // (1 if seq > 8192 else 4))
    return torch.tensor(ends[1:], device="cuda").clamp(max=seq)


@dataclass(frozen=True)
class Case:
    kind: str
    batch: int
    seq: int
    dim: int = 128
    heads: int = 16
    few_queries: int = 0  # 0: as many as keys
    dtype: torch.dtype = torch.bfloat16

    @property
    def seq_q(self):
        return self.few_queries or self.seq

    @property
    def name(self):
        length = f"Sq{self.seq_q} Sk{self.seq}" if self.few_queries else f"S{self.seq}"
        return f"D{self.dim} {self.kind} B{self.batch} H{self.heads} {length}"

    @property
    def is_bias(self):
        return self.kind.startswith("bias")

    @property
    def window(self):
        """Keys to the left and right of a query that it sees, where the mask is such a band; -1: all."""
        return (1023, 0) if self.kind == "window 1024" else (-1, -1)

    def keep(self, b, h, q, k):
        """Whether query q sees key k; of indices, tensors or scalars."""
        if self.kind == "causal bool":
            return k <= q
        if self.kind == "half padded":
            return (k < self.seq // 2) & (q >= 0)
        if self.kind == "window 1024":
            return (q - k < 1024) & (k <= q)
        if self.kind == "documents":
            document = self.documents
            return document[q] == document[k]
        return (q >= 0) & (k >= 0)

    @functools.cached_property
    def documents(self):
        return torch.bucketize(torch.arange(self.seq, device="cuda"), document_ends(self.seq), right=True)

    def make_mask(self):
        rows, cols = torch.arange(self.seq_q, device="cuda")[:, None], torch.arange(self.seq, device="cuda")
        if self.is_bias:
            heads = 1 if self.kind == "bias one head" else self.heads
            return torch.randn(1, heads, self.seq_q, self.seq, device="cuda", dtype=self.dtype)
        keep = self.keep(0, 0, rows, cols).expand(self.seq_q, self.seq)
        return keep.expand(self.batch, 1, self.seq_q, self.seq).contiguous()

    def shape(self):
        """The cell of the table of "auto"."""
        return {"kind": "bias" if self.is_bias else "mask", "dim": self.dim, "seq_q": self.seq_q, "seq_k": self.seq}

    def flop(self):
        pairs = self.seq_q * self.seq if self.is_bias else int(self.make_mask()[0, 0].sum())
        return 4 * self.batch * self.heads * pairs * self.dim


CASES = [Case(kind, 4, 4096, dim) for dim in (128, 64) for kind in ("causal bool", "half padded", "window 1024", "documents")]
CASES += [Case(kind, 1, 16384) for kind in ("causal bool", "window 1024", "documents")]
CASES += [Case(kind, 4, 2048) for kind in ("bias", "bias one head")]


def auto_cases():
    """A mask with much to skip and one with nothing, of which the table keeps the worse; decoding steps with padding too."""
    for dtype, dims in ((torch.bfloat16, (64, 96, 128, 192, 256)), (torch.float16, (64, 128, 256))):
        for dim in dims:
            for batch, seq in ((4, 64), (4, 256), (4, 1024), (2, 4096), (1, 16384)):
                for kind in ("causal bool", "bias one head"):
                    yield Case(kind, batch, seq, dim, dtype=dtype)
            for few, seq in ((1, 256), (1, 2048), (1, 16384), (16, 2048), (64, 8192), (256, 4096)):
                for kind in ("half padded", "bias one head"):
                    yield Case(kind, 4, seq, dim, few_queries=few, dtype=dtype)


def sdpa(case, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def only(backend):
    def call(case, q, k, v, mask):
        with sdpa_kernel(backend):
            return sdpa(case, q, k, v, mask)

    return call


def stated(case, q, k, v, mask):
    """Our kernel, told the structure instead of shown it; what is asked of the masked one is a share of this."""
    return torch.ops.flashsdpa.forward(q, k, v, is_causal=case.kind == "causal bool", window_left=case.window[0],
                                       window_right=case.window[1])[0]  # fmt: skip


def fa3(case, q, k, v, mask):
    return gpu.fa3_forward(q, k, v, case.kind == "causal bool", case.window)[0]


def flex(case):
    """FlexAttention compiled for the case; what it needs of the mask is made here, outside the time."""
    torch.compiler.reset()  # or the cases before count towards the limit of recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    if case.is_bias:
        def call(case, q, k, v, mask):
            return compiled(q, k, v, score_mod=lambda score, b, h, i, j: score + mask[0, h if mask.size(1) > 1 else 0, i, j])
    else:
        block_mask = create_block_mask(lambda b, h, i, j: case.keep(b, h, i, j), None, None, case.seq, case.seq, device="cuda")

        def call(case, q, k, v, mask):
            return compiled(q, k, v, block_mask=block_mask)

    return call


def implementations(case, grid):
    """{name: (implementation of the record, note, call, context)}"""
    every = {
        "flashsdpa": ("flashsdpa", None, sdpa, measure.ours),
        "stock": ("stock", None, sdpa, measure.stock),
    }
    if grid == "auto":
        return every
    every |= {
        "efficient": ("efficient", None, only(SDPBackend.EFFICIENT_ATTENTION), measure.stock),
        "cudnn": ("cudnn", None, only(SDPBackend.CUDNN_ATTENTION), measure.stock),
        "flex": ("flex", "block mask not counted", flex(case), measure.stock),
    }
    if case.kind in ("causal bool", "window 1024"):
        every["stated"] = ("flashsdpa", "the structure as an argument", stated, measure.ours)
        if gpu.fa3_ops():
            every["fa3"] = ("fa3", "the structure as an argument", fa3, contextlib.nullcontext)
    return every


def sampled_error(case, q, k, v, mask, out):
    """The largest error against float64, over 64 rows of the first and of the last head."""
    worst, rows = 0.0, torch.randint(0, case.seq_q, (64,), device="cuda")
    for b, h in ((0, 0), (case.batch - 1, case.heads - 1)):
        plane = mask[min(b, mask.size(0) - 1), min(h, mask.size(1) - 1), rows]
        scores = q[b, h, rows].double() @ k[b, h].double().T * case.dim**-0.5
        scores = scores + plane.double() if case.is_bias else scores.masked_fill(~plane, -torch.inf)
        worst = max(worst, (out[b, h, rows].double() - scores.softmax(-1) @ v[b, h].double()).abs().max().item())
    return worst


def run_backward(case, rounds):
    """The backward alone, dq, dk and dv, of a forward run before; with a bias its gradient too, in rows of their own."""
    inputs = [torch.randn(case.batch, case.heads, case.seq, case.dim, device="cuda", dtype=case.dtype, requires_grad=True)
              for _ in range(3)]  # fmt: skip
    mask, flop = case.make_mask(), 2.5 * case.flop()
    grad_out = torch.randn_like(inputs[0])
    rows, calls, exact = [], {}, None
    for name, (impl, note, call, context) in implementations(case, "masks").items():
        if name == "fa3" and case.kind != "causal bool":
            continue
        for wanted in (inputs, [*inputs, mask.clone().requires_grad_()]) if case.is_bias else (inputs,):
            notes = [note] * bool(note) + ["with the bias's gradient"] * (len(wanted) == 4)
            row = {"group": "bias" if case.is_bias else "mask", "case": case.name,
                   "dtype": str(case.dtype).removeprefix("torch."), "pass": "bwd", "impl": impl}  # fmt: skip
            row |= {"note": "; ".join(notes)} if notes else {}
            rows.append(row)
            try:
                with context(), torch_flashsdpa.record_dispatch() as seen:
                    if name == "fa3":
                        out, lse = gpu.fa3_forward(*(t.detach() for t in inputs), True)
                        run = functools.partial(gpu.fa3_backward, grad_out, *inputs, out, lse, True)
                    else:
                        out = call(case, *inputs, wanted[3] if len(wanted) == 4 else mask)
                        run = functools.partial(torch.autograd.grad, out, wanted, grad_out, retain_graph=True)
                    grads = [g.float() for g in run()]
                if impl == "flashsdpa" and sum(r["count"] for r in seen.rows if r["kind"] == "launch") < 2:
                    raise RuntimeError("left to stock")
            except Exception as error:  # noqa: BLE001  a rival without this case is a row without a time
                row["note"] = "; ".join([f"failed: {str(error).splitlines()[0]}", *notes])
                continue
            # Of one head in float64; the others are held against ours by the tests.
            exact = exact or exact_gradients(case, inputs, mask, grad_out)
            row["error"] = max(((a[-1, -1] - b).norm() / b.norm()).item() for a, b in zip(grads, exact))
            if row["error"] > 0.02:
                row["note"] = "wrong: no time"
                continue
            calls[len(rows)] = (run, context, row)
    times = gpu.interleaved({key: lambda run=run, context=context: in_context(context, run)
                             for key, (run, context, _) in calls.items()}, rounds)  # fmt: skip
    for key, (_, _, row) in calls.items():
        row["ms"] = statistics.median(times[key])
        row["tflops"] = flop / row["ms"] / 1e9
    return rows


def in_context(context, run):
    with context():
        return gpu.elapsed_ms(run, 3)


def run_training(case, rounds):
    """Forward, its plan counted, and backward in one time, ours and stock's, for the table of "auto"."""
    inputs = [torch.randn(case.batch, case.heads, length, case.dim, device="cuda", dtype=case.dtype, requires_grad=True)
              for length in (case.seq_q, case.seq, case.seq)]  # fmt: skip
    mask, grad_out = case.make_mask(), torch.randn_like(inputs[0])
    rows, calls, grads = [], {}, {}
    for name, (impl, _, call, context) in implementations(case, "auto").items():
        rows.append({"group": "bias" if case.is_bias else "mask", "case": case.name,
                     "dtype": str(case.dtype).removeprefix("torch."), "pass": "fwd+bwd", "impl": impl})  # fmt: skip
        run = lambda call=call: torch.autograd.grad(call(case, *inputs, mask), inputs, grad_out)  # noqa: E731
        with context():
            grads[name] = [g.float() for g in run()]
        calls[name] = functools.partial(in_context, context, run)
    ours = rows[0]
    ours["error"] = max(((a - b).norm() / b.norm()).item() for a, b in zip(grads["flashsdpa"], grads["stock"]))
    if ours["error"] > 0.02:
        ours["note"] = "failed: not stock's gradients"
        return rows
    times = gpu.interleaved(calls, rounds)
    for row, name in zip(rows, calls):
        row["ms"] = statistics.median(times[name])
        row["tflops"] = 3.5 * case.flop() / row["ms"] / 1e9
    ratio, bound = measure.ratio_with_bound(times)
    ours |= {"ratio": ratio, "ratio_lower_95": bound, "isa": "sm90", "section": "auto", "shape": case.shape()}
    return rows


def exact_gradients(case, inputs, mask, grad_out):
    """dq, dk, dv of the last head of the last batch, in float64, some rows at a time."""
    q, k, v = (t.detach()[-1, -1].double().requires_grad_() for t in inputs)
    plane = mask[-1, -1]
    total = [torch.zeros_like(t) for t in (q, k, v)]
    for start in range(0, case.seq, 2048):
        rows = slice(start, start + 2048)
        scores = q[rows] @ k.T * case.dim**-0.5
        scores = scores + plane[rows].double() if case.is_bias else scores.masked_fill(~plane[rows], -torch.inf)
        part = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), grad_out[-1, -1, rows].double())
        for sum_, one in zip(total, part):
            sum_ += one
    return [t.float() for t in total]


def run_case(case, grid, rounds):
    q, k, v = (torch.randn(case.batch, case.heads, length, case.dim, device="cuda", dtype=case.dtype)
               for length in (case.seq_q, case.seq, case.seq))  # fmt: skip
    mask, flop = case.make_mask(), case.flop()
    rows, calls = [], {}
    for name, (impl, note, call, context) in implementations(case, grid).items():
        row = {"group": "bias" if case.is_bias else "mask", "case": case.name,
               "dtype": str(case.dtype).removeprefix("torch."), "pass": "fwd", "impl": impl}  # fmt: skip
        row |= {"note": note} if note else {}
        rows.append(row)
        try:
            with context(), torch.no_grad():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                out = call(case, q, k, v, mask)
                row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        except Exception as error:  # noqa: BLE001  a rival without this case is a row without a time
            row["note"] = f"failed: {str(error).splitlines()[0]}"
            continue
        row["error"] = sampled_error(case, q, k, v, mask, out)
        calls[name] = (call, context, row)
    ours = calls["flashsdpa"][2]
    if ours["error"] > 2 * calls["stock"][2]["error"] + torch.finfo(case.dtype).eps:
        ours["note"] = "wrong: no time"
        return rows
    masks = itertools.cycle([mask, mask.clone(), mask.clone()])  # none is in the cache when its turn comes

    def time_once(name):
        call, context, _ = calls[name]
        with context(), torch.no_grad():
            return gpu.elapsed_ms(lambda: call(case, q, k, v, next(masks)), 3)

    times = gpu.interleaved({name: functools.partial(time_once, name) for name in calls}, rounds)
    for name, (_call, _context, row) in calls.items():
        row["ms"] = statistics.median(times[name])
        row["tflops"] = flop / row["ms"] / 1e9
    ratio, bound = measure.ratio_with_bound(times)
    ours |= {"ratio": ratio, "ratio_lower_95": bound, "isa": "sm90", "section": grid, "shape": case.shape()}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=("masks", "auto"), default="masks")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows, path = [], None
    for case in CASES if options.grid == "masks" else auto_cases():
        if options.only not in case.name:
            continue
        rows += run_case(case, options.grid, options.rounds)
        if options.grid == "masks" and case.dim == 128:
            rows += run_backward(case, options.rounds)
        if options.grid == "auto" and case.seq_q >= 64:  # nobody trains on few queries
            rows += run_training(case, options.rounds)
        path = gpu.write(rows, options.out, "masks" if options.grid == "masks" else "masks-auto")
        new = [row for row in rows if row["case"] == case.name and row["dtype"] == str(case.dtype).removeprefix("torch.")]
        print(f"{case.name:36}" + "  ".join(
            f"{row['impl']}{'*' if row.get('note') == 'the structure as an argument' else ''} "
            + (f"{row['tflops']:.0f}" if "tflops" in row else "-") for row in new), flush=True)  # fmt: skip
    print(f"* told the structure instead of a mask\n{path}")
    return 1 if any(row["impl"] == "flashsdpa" and "ms" not in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
