"""Unmasked attention forward on the GPU, ours beside every rival that can be imported, in one run.

    python benchmarks/forward.py [--grid dense|auto|decode|host] [--only TEXT] [--rounds N] [--out DIR]

dense: the cells of the published comparisons, with FlashAttention-3 where gpu.fa3_ops finds it. auto: the calls
that the table of "auto" is made from, stock against ours as a caller sees them, launches included. decode: few queries on
long keys, replayed from a CUDA graph, K and V fresh from memory each time, in GB/s of K and V. host: microseconds of the
host for small calls. Writes DIR/<date>-<machine>-forward[-GRID].json. A result is held against float64 on sampled rows
before it is timed; a wrong one gets no time.
"""

import argparse
import contextlib
import functools
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import gpu  # noqa: E402
from torch_flashsdpa.bench import measure  # noqa: E402


@dataclass(frozen=True)
class Case:
    dim: int
    batch: int
    heads: int
    seq_q: int
    seq_k: int
    is_causal: bool = False
    heads_kv: int = 0  # 0: as many as heads
    dim_v: int = 0  # 0: dim
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self):
        """As in the CPU's records, for instance "D128 causal B4 H16 S4096"."""
        dim = f"D{self.dim}" + (f"/{self.dim_v}" if self.dim_v else "")
        heads = f"H{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv else "")
        length = f"S{self.seq_q}" if self.seq_q == self.seq_k else f"Sq{self.seq_q} Sk{self.seq_k}"
        return f"{dim} {self.kind} B{self.batch} {heads} {length}"

    @property
    def kind(self):
        return "causal" if self.is_causal else "full"

    def make(self):
        def normal(heads, length, dim):
            return torch.randn(self.batch, heads, length, dim, device="cuda", dtype=self.dtype)

        heads_kv = self.heads_kv or self.heads
        return (normal(self.heads, self.seq_q, self.dim), normal(heads_kv, self.seq_k, self.dim),
                normal(heads_kv, self.seq_k, self.dim_v or self.dim))  # fmt: skip

    def key_bytes(self):
        """K and V, each once: what decoding cannot avoid."""
        return 2 * self.batch * (self.heads_kv or self.heads) * self.seq_k * (self.dim + (self.dim_v or self.dim))

    def flop(self):
        """4 per pair that takes part and dimension (2 for each product)."""
        pairs = self.seq_q * self.seq_k
        if self.is_causal:
            pairs = sum(min(i + 1, self.seq_k) for i in range(self.seq_q))
        return 2 * self.batch * self.heads * pairs * (self.dim + (self.dim_v or self.dim))


def dense():
    square = [(16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384)]
    cases = [Case(dim, batch, heads, seq, seq, causal)
             for dim, heads in ((128, 16), (64, 32), (256, 8)) for causal in (True, False) for batch, seq in square]
    cases += [Case(dim, 4, heads, 4096, 4096, causal, dim_v=dim_v)
              for dim, heads, dim_v in ((96, 21, 0), (192, 10, 0), (192, 16, 128)) for causal in (True, False)]
    return cases + [Case(128, 4, 32, 4096, 4096, True, 8), Case(128, 2, 32, 8192, 8192, True, 8)]


def auto():
    """Head dims and lengths that span what is called, in steps of two to four; decoding steps as well."""
    cases = []
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (32, 64, 96, 128, 192, 256) if dtype == torch.bfloat16 else (64, 128, 256):
            for causal in (False, True):
                cases += [Case(dim, batch, 16, seq, seq, causal, dtype=dtype)
                          for batch, seq in ((4, 64), (4, 256), (4, 1024), (2, 4096), (1, 16384))]
            cases += [Case(dim, 4, 16, seq_q, seq_k, dtype=dtype)
                      for seq_q, seq_k in ((1, 256), (1, 2048), (1, 16384), (1, 131072), (4, 8192), (16, 2048), (64, 8192),
                                           (256, 4096), (1024, 16384), (4096, 256))]  # fmt: skip
    return cases


def decode():
    """Decoding steps: grouped heads, one key head, none grouped; a few tokens at once; chunks of a prompt."""
    grouped = [(1, 1, 8192), (1, 1, 131072), (8, 1, 8192), (64, 1, 8192), (20, 1, 8192), (1, 1, 1024), (1, 4, 8192), (8, 4, 8192),
               (64, 4, 8192), (8, 16, 8192), (1, 64, 8192), (1, 256, 32768), (1, 1024, 32768)]  # fmt: skip
    cases = [Case(128, batch, 32, seq_q, seq_k, heads_kv=8) for batch, seq_q, seq_k in grouped]
    cases += [Case(128, batch, 32, seq_q, seq_k, heads_kv=1) for batch, seq_q, seq_k in ((1, 1, 131072), (8, 1, 8192), (1, 4, 131072))]
    for dim in (64, 128, 256):
        cases += [Case(dim, 4, 16, seq_q, seq_k) for seq_q, seq_k in ((1, 2048), (1, 16384), (16, 16384), (128, 16384))]
    return cases


def host():
    return [Case(64, 1, 4, 16, 16), Case(64, 1, 16, 128, 128), Case(64, 1, 16, 128, 128, True), Case(128, 1, 8, 64, 64)]


GRIDS = {"dense": dense, "auto": auto, "decode": decode, "host": host}


def sdpa(q, k, v, case):
    return F.scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=bool(case.heads_kv))


def only(backend):
    def call(q, k, v, case):
        with sdpa_kernel(backend):
            return sdpa(q, k, v, case)

    return call


def fa3(q, k, v, case):
    return gpu.fa3_forward(q, k, v, case.is_causal)[0]


def implementations(grid):
    """{name: (call, the context in which it runs)}"""
    every = {"flashsdpa": (sdpa, measure.ours), "stock": (sdpa, measure.stock)}
    if grid in ("dense", "decode"):
        every["flash"] = (only(SDPBackend.FLASH_ATTENTION), measure.stock)
        every["cudnn"] = (only(SDPBackend.CUDNN_ATTENTION), measure.stock)
        every["efficient"] = (only(SDPBackend.EFFICIENT_ATTENTION), measure.stock)
        if gpu.fa3_ops():
            every["fa3"] = (fa3, contextlib.nullcontext)
    return every


def sampled_error(case, q, k, v, out):
    """The largest error against float64, over 64 rows of the first and of the last head."""
    worst = 0.0
    rows = torch.randint(0, case.seq_q, (64,), device="cuda")
    for b, h in ((0, 0), (case.batch - 1, case.heads - 1)):
        kv = h * k.size(1) // case.heads
        scores = q[b, h, rows].double() @ k[b, kv].double().T * case.dim**-0.5
        if case.is_causal:
            scores = scores.masked_fill(torch.arange(case.seq_k, device="cuda") > rows[:, None], -torch.inf)
        want = scores.softmax(-1) @ v[b, kv].double()
        worst = max(worst, (out[b, h, rows].double() - want).abs().max().item())
    return worst


def graph_ms(calls, repeats):
    """A call of a captured graph, in which the calls take turns: each reads other memory than the one before."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            calls[i % len(calls)]()
    graph.replay()
    return gpu.elapsed_ms(graph.replay, 3) / repeats


def host_ms(call, repeats):
    """The host's part of a call: what it takes to return, the device idle before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e3


def run_case(case, grid, rounds):
    q, k, v = case.make()
    rows, calls = [], {}
    for name, (call, context) in implementations(grid).items():
        row = {"group": grid if grid in ("host", "decode") else "gqa" if case.heads_kv else "dense", "case": case.name,
               "dtype": str(case.dtype).removeprefix("torch."), "pass": "fwd", "impl": name}  # fmt: skip
        rows.append(row)
        try:
            with context(), torch.no_grad():
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                out = call(q, k, v, case)
                row["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        except Exception as error:  # noqa: BLE001  a rival without this case is a row without a time
            row["note"] = f"failed: {str(error).splitlines()[0]}"
            continue
        row["error"] = sampled_error(case, q, k, v, out)
        calls[name] = (call, context, row)
    if "flashsdpa" not in calls or "stock" not in calls:
        return rows
    limit = 2 * calls["stock"][2]["error"] + torch.finfo(case.dtype).eps
    if calls["flashsdpa"][2]["error"] > limit:
        calls["flashsdpa"][2]["note"] = f"failed: error beyond {limit:.3g}"
        return rows
    copies = [(q, k, v)]
    if grid == "decode":  # beyond the L2 cache, several times over
        copies += [tuple(t.clone() for t in (q, k, v)) for _ in range(min(15, 200_000_000 // case.key_bytes()))]
    with measure.ours(), torch.no_grad():
        repeats = 200 if grid == "host" else gpu.repeats(lambda: sdpa(q, k, v, case), 6)

    def time_once(name):
        call, context, _ = calls[name]
        with context(), torch.no_grad():
            runs = [lambda inputs=inputs: call(*inputs, case) for inputs in copies]
            if grid == "decode":
                return graph_ms(runs, max(repeats, len(copies)))
            return (host_ms if grid == "host" else gpu.elapsed_ms)(runs[0], repeats)

    times = gpu.interleaved({name: functools.partial(time_once, name) for name in calls}, rounds)
    for name, (_, _, row) in calls.items():
        row["ms"] = statistics.median(times[name])
        if grid == "decode":
            row["gbps"] = case.key_bytes() / row["ms"] / 1e6
        elif grid != "host":
            row["tflops"] = case.flop() / row["ms"] / 1e9
    ratio, bound = measure.ratio_with_bound(times)
    ours = calls["flashsdpa"][2]
    ours |= {"ratio": ratio, "ratio_lower_95": bound, "isa": "sm90", "section": grid,
             "shape": {"kind": case.kind, "dim": case.dim, "seq_q": case.seq_q, "seq_k": case.seq_k}}  # fmt: skip
    return rows


def table(rows):
    names = [name for name in ("flashsdpa", "stock", "cudnn", "flash", "efficient", "fa3") if any(r["impl"] == name for r in rows)]
    lines = [f"{'case':34} {'dtype':9}" + "".join(f"{name:>11}" for name in names)]
    cells = {}
    for row in rows:
        cells.setdefault((row["case"], row["dtype"]), {})[row["impl"]] = row
    for (case, dtype), by_name in cells.items():
        def text(row):
            if not row or "ms" not in row:
                return "-"
            if "gbps" in row:
                return f"{row['gbps']:.0f} GB/s"
            return f"{row['tflops']:.0f}" if "tflops" in row else f"{row['ms'] * 1e3:.1f} us"

        lines.append(f"{case:34} {dtype:9}" + "".join(f"{text(by_name.get(name)):>11}" for name in names))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=sorted(GRIDS), default="dense")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds TEXT")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = []
    for case in GRIDS[options.grid]():
        if options.only in case.name:
            rows += run_case(case, options.grid, options.rounds)
            path = gpu.write(rows, options.out, "forward" + ("" if options.grid == "dense" else f"-{options.grid}"))
    print(table(rows))
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    print(f"{sum(r >= 1 for r in ratios)} of {len(ratios)} cells at least as fast as stock; geometric mean of the ratios "
          f"{statistics.geometric_mean(ratios):.3f}\n{path}")
    failed = [row for row in rows if row["impl"] == "flashsdpa" and "ms" not in row]
    for row in failed:
        print("FAILED", row["case"], row.get("note"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
