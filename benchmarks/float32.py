"""Float32 attention on the GPU, forward and backward, ours beside stock's kernels, in one run; exact and where TF32 is allowed.

    python benchmarks/float32.py [--only TEXT] [--rounds N] [--out DIR]

"exact": torch's float32 matmul precision is "highest"; "tf32": "high", which stock's math path and our kernels follow. Results are
held against float64 on the last head before they are timed; of the masks, a causal one, with values in it as a bias, stands for all.
Writes DIR/<date>-<machine>-float32.json.
"""

import contextlib
import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import backward  # noqa: E402
import forward  # noqa: E402
import passes  # noqa: E402
from torch_flashsdpa.bench import measure  # noqa: E402

RIVALS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
MODES = {"exact": "highest", "tf32": "high"}  # torch.set_float32_matmul_precision
LARGEST_ERROR = {"exact": 1e-4, "tf32": passes.LARGEST_ERROR}  # relative to the largest element
MASKS = ("mask", "bias")


def cases():
    """(case, kind): the plain calls, then those with a mask."""
    plain = [forward.Case(dim, 4, 16, seq, seq, causal, dtype=torch.float32)
             for dim in (64, 128) for causal in (True, False) for seq in (256, 1024, 4096)]  # fmt: skip
    masked = [forward.Case(dim, 4, 16, seq, seq, True, dtype=torch.float32) for dim in (64, 128) for seq in (256, 1024, 4096)]
    return [(case, "causal" if case.is_causal else "full") for case in plain] + [(case, kind) for case in masked for kind in MASKS]


@contextlib.contextmanager
def precision(mode):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(MODES[mode])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def causal_mask(case, kind):
    """(B, 1, Sq, Sk), bool or with 0 and -inf."""
    keep = torch.ones(case.batch, 1, case.seq_q, case.seq_k, dtype=torch.bool, device="cuda").tril()
    return keep if kind == "mask" else torch.zeros(keep.shape, device="cuda").masked_fill_(~keep, -torch.inf)


def call_of(case, kind, backend=None):
    how = {"attn_mask": causal_mask(case, kind)} if kind in MASKS else {"is_causal": case.is_causal}

    def call(q, k, v):
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, **how)

    return call


def output_error(case, leaves, out):
    """Of the last head, relative to its largest element."""
    q, k, v = (t.detach()[-1, -1].double() for t in leaves)
    scores = q @ k.T * case.dim**-0.5
    if case.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape, dtype=torch.bool, device="cuda").tril(), -torch.inf)
    want = scores.softmax(-1) @ v
    return ((out[-1, -1].double() - want).abs().max() / want.abs().max()).item()


def run_case(case, kind, mode, rounds):
    implementations = {"flashsdpa": (call_of(case, kind), measure.ours), "stock": (call_of(case, kind), measure.stock)}
    if kind not in MASKS:
        implementations |= {name: (call_of(case, kind, backend), measure.stock) for name, backend in RIVALS.items()}

    def error_of(name, leaves, grad_out, out, grads):
        return max(output_error(case, leaves, out), backward.last_head_error(case, leaves, grad_out, grads))

    rows = passes.run_case(case, "float32", kind, implementations, error_of, rounds, LARGEST_ERROR[mode])
    name = f"{case.name} {kind}" if kind in MASKS else case.name
    return [row | {"case": f"{name} {mode}"} for row in rows]


def groups(only, rounds):
    for (case, kind), mode in itertools.product(cases(), MODES):
        if only in f"{case.name} {kind} {mode}":
            with precision(mode):
                yield run_case(case, kind, mode, rounds)


def main():
    options = passes.parser_of(__doc__, rounds=5).parse_args()
    return passes.record(groups(options.only, options.rounds), "float32", options.out)


if __name__ == "__main__":
    sys.exit(main())
