"""Attention with a soft cap, ALiBi slopes or sinks on the GPU, ours beside FlexAttention, in one run: both passes.

    python benchmarks/score_terms.py [--only TEXT] [--rounds N] [--out DIR]

SDPA has none of these; FlexAttention, compiled, has them as its documentation writes them, sinks by its log-sum-exp, as
transformers does. "flashsdpa-none" is ours without the term: what it costs. Results are held against float64 on the last head.
Writes DIR/<date>-<machine>-score-terms.json.
"""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import forward  # noqa: E402
import passes  # noqa: E402

import torch_flashsdpa  # noqa: E402

SOFTCAP = 20.0
torch._dynamo.config.recompile_limit = 64  # each case is another function to it
flex = torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class Case(forward.Case):
    term: str = ""

    @property
    def name(self):
        return f"{super().name} {self.term}"


def cases():
    shapes = [(dim, heads, causal) for dim, heads in ((128, 16), (64, 32)) for causal in (True, False)]
    terms = ("softcap", "slopes", "sinks")
    return [*(Case(dim, 4, heads, 4096, 4096, causal, term=term) for term in terms for dim, heads, causal in shapes),
            *(Case(dim, 4, 16, 1024, 1024, False, dtype=torch.float32, term=term) for term in terms for dim in (64, 128))]  # fmt: skip


def numbers(case):
    """(slopes, sinks), float32, a number for each head."""
    heads = torch.arange(1, case.heads + 1, device="cuda", dtype=torch.float32)
    return 2 ** (-8 * heads / case.heads), heads / case.heads - 0.5


def ours(case, term):
    slopes, sinks = numbers(case)
    options = {"softcap": dict(softcap=SOFTCAP), "slopes": dict(alibi_slopes=slopes), "sinks": dict(sinks=sinks), "": {}}[term]
    return lambda q, k, v: torch_flashsdpa.attention(q, k, v, is_causal=case.is_causal, **options)


def flex_call(case):
    slopes, sinks = numbers(case)
    mods = {"softcap": lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP),
            "slopes": lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()}  # fmt: skip
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.seq_q, case.seq_k, "cuda") if case.is_causal else None

    def call(q, k, v):
        if case.term != "sinks":
            return flex(q, k, v, score_mod=mods[case.term], block_mask=mask)
        out, lse = flex(q, k, v, block_mask=mask, return_lse=True)
        return out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1).to(out.dtype)

    return call


def error_of(case, leaves, grad_out, out, grads):
    """The largest error of out and gradients of the last head, each relative to its largest number."""
    slope, sink = (t[-1] for t in numbers(case))
    q, k, v = (t.detach()[-1, -1].double().requires_grad_() for t in leaves)
    scores = q @ k.T * case.dim**-0.5
    if case.term == "softcap":
        scores = SOFTCAP * (scores / SOFTCAP).tanh()
    place = torch.arange(case.seq_q, device="cuda")
    if case.term == "slopes":
        scores = scores - slope * (place[:, None] - place).abs()
    if case.is_causal:
        scores = scores.masked_fill(place > place[:, None], -torch.inf)
    if case.term == "sinks":
        scores = torch.cat([scores, sink.double().expand(case.seq_q, 1)], -1)
    want = scores.softmax(-1)[:, : case.seq_k] @ v
    want = [want, *torch.autograd.grad(want, (q, k, v), grad_out[-1, -1].double())]
    return max(((a[-1, -1].double() - b).abs().max() / b.abs().max()).item() for a, b in zip((out, *grads), want))


def run_case(case, rounds):
    implementations = {"flashsdpa": ours(case, case.term), "flashsdpa-none": ours(case, ""), "flex": flex_call(case)}
    implementations = {name: (call, contextlib.nullcontext) for name, call in implementations.items()}

    def error(name, leaves, grad_out, out, grads):
        return None if name == "flashsdpa-none" else error_of(case, leaves, grad_out, out, grads)

    return passes.run_case(case, "score-terms", case.term, implementations, error, rounds)


def main():
    options = passes.parser_of(__doc__, rounds=7).parse_args()
    chosen = (case for case in cases() if options.only in case.name)
    return passes.record((run_case(case, options.rounds) for case in chosen), "score-terms", options.out)


if __name__ == "__main__":
    sys.exit(main())
