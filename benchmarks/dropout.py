"""Attention with dropout on the GPU, ours beside every backend of SDPA, in one run: forward, backward and both.

    python benchmarks/dropout.py [--p P] [--only TEXT] [--rounds N] [--out DIR]

"flashsdpa-none" is ours without dropout: what the decisions cost. Each implementation draws as it does; ours is held against
float64 with the weights that it drops under one seed, read off equal scores and unit vectors for values. Writes
DIR/<date>-<machine>-dropout.json.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import forward  # noqa: E402
import passes  # noqa: E402
from torch_flashsdpa.bench import measure  # noqa: E402

RIVALS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
          "math": SDPBackend.MATH}  # fmt: skip
MATH_UP_TO = 4096  # its scores must fit in memory
SEED = 0


def cases():
    square = [(16, 1024), (4, 4096), (1, 16384)]
    return [*(forward.Case(dim, batch, heads, seq, seq, causal)
              for dim, heads in ((128, 16), (64, 32)) for causal in (True, False) for batch, seq in square),
            *(forward.Case(256, 4, 8, 4096, 4096, causal) for causal in (True, False)),
            *(forward.Case(dim, batch, 16, seq, seq, False, dtype=torch.float16) for dim in (64, 128) for batch, seq in square[:2]),
            *(forward.Case(dim, 16, 16, 128, 128, False, dtype=dtype) for dim in (64, 128)
              for dtype in (torch.bfloat16, torch.float16)),
            *(forward.Case(dim, 4, 16, 1024, 1024, False, dtype=torch.float32) for dim in (64, 128))]  # fmt: skip


def call_of(case, p, backend=None):
    def call(q, k, v):
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=case.is_causal)

    return call


def kept_of_last_head(case, p):
    """(seq_q, seq_k) bool: the weights of the last batch and head that ours keeps under SEED."""
    q, k, v = (torch.zeros_like(t) for t in case.make())
    kept = []
    for start in range(0, case.seq_k, case.dim):
        v[:] = torch.eye(case.seq_k, device="cuda", dtype=case.dtype)[:, start : start + case.dim]
        torch.manual_seed(SEED)
        with measure.ours(), torch.no_grad():
            kept.append(F.scaled_dot_product_attention(q, k, v, dropout_p=p)[-1, -1] != 0)
    return torch.cat(kept, -1)


def error_of_ours(case, p, leaves, grad_out):
    """The largest error of out and gradients of the last head, each relative to its largest number."""
    torch.manual_seed(SEED)
    with measure.ours():
        out = F.scaled_dot_product_attention(*leaves, dropout_p=p, is_causal=case.is_causal)
        got = [t[-1, -1].detach().double() for t in (out, *torch.autograd.grad(out, leaves, grad_out))]
    factor = kept_of_last_head(case, p) / (1 - round(p * 2**16) / 2**16)
    q, k, v = (t.detach()[-1, -1].double().requires_grad_() for t in leaves)
    scores = q @ k.T * case.dim**-0.5
    if case.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    out = (scores.softmax(-1) * factor) @ v
    want = [out, *torch.autograd.grad(out, (q, k, v), grad_out[-1, -1].double())]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want))


def run_case(case, p, rounds):
    implementations = {"flashsdpa": (call_of(case, p), measure.ours), "flashsdpa-none": (call_of(case, 0.0), measure.ours),
                       "stock": (call_of(case, p), measure.stock)}  # fmt: skip
    implementations |= {name: (call_of(case, p, backend), measure.stock) for name, backend in RIVALS.items()
                        if name != "math" or case.seq_k <= MATH_UP_TO}  # fmt: skip

    def error_of(name, leaves, grad_out, out, grads):
        return error_of_ours(case, p, leaves, grad_out) if name == "flashsdpa" and case.seq_k <= 4096 else None

    return passes.run_case(case, "dropout", "dropout", implementations, error_of, rounds)


def main():
    parser = passes.parser_of(__doc__, rounds=7)
    parser.add_argument("--p", type=float, default=0.1, help="the share that is dropped (default 0.1)")
    options = parser.parse_args()
    chosen = (case for case in cases() if options.only in case.name)
    return passes.record((run_case(case, options.p, options.rounds) for case in chosen), "dropout", options.out)


if __name__ == "__main__":
    sys.exit(main())
