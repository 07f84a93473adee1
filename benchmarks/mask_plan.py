"""The mask plan on the GPU against memory bandwidth: bytes of the mask, read once, over the time of the whole plan.

    python benchmarks/mask_plan.py [--out DIR]      # writes DIR/<date>-<machine>-mask-plan.json

Every plan is compared with the reference before it is timed. The masks of a round are several copies, larger together
than the L2 cache.
"""

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import gpu  # noqa: E402
from oracle import ops  # noqa: E402
from reference_plan import reference_plan  # noqa: E402

SHAPES = ((1, 1, 4096, 4096), (4, 1, 4096, 4096), (1, 1, 16384, 16384))
# content, layout, shape, dtype
CASES = [("causal", "dense", shape, dtype) for shape in SHAPES for dtype in (torch.bool, torch.bfloat16)] + [
    ("random", "dense", (1, 1, 16384, 16384), torch.bool),
    ("causal", "dense", (1, 1, 16384, 16384), torch.float32),
    ("causal", "transposed", (1, 1, 16384, 16384), torch.bool),
    ("causal", "misaligned", (1, 1, 16384, 16384), torch.bool),
    ("causal", "misaligned", (1, 1, 16384, 16384), torch.bfloat16),
    ("random", "dense", (1, 16, 2048, 2048), torch.bfloat16),
    ("padding", "dense", (64, 1, 1, 8192), torch.bool),
]


def make_mask(content, layout, shape, dtype):
    batch, heads, seq_q, seq_k = shape
    rows, cols = torch.arange(seq_q, device="cuda")[:, None], torch.arange(seq_k, device="cuda")
    if content == "causal":
        mask = (cols <= rows).expand(shape)
    elif content == "padding":
        mask = cols < torch.randint(1, seq_k, (batch, heads, seq_q, 1), device="cuda")
    else:
        mask = torch.rand(shape, device="cuda") < 0.5
    if dtype != torch.bool:
        mask = torch.zeros(shape, dtype=dtype, device="cuda").masked_fill_(~mask, -torch.inf)
    if layout == "transposed":
        return mask.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "misaligned":  # rows one element longer: no two start at the same offset from 16 bytes
        return torch.zeros(batch, heads, seq_q, seq_k + 1, dtype=dtype, device="cuda")[..., 1:].copy_(mask)
    return mask.contiguous()


def measure(content, layout, shape, dtype, ceiling):
    mask = make_mask(content, layout, shape, dtype)
    batch, heads, seq_q, seq_k = shape
    row = {
        "group": "mask",
        "case": f"plan {content} {layout} B{batch} H{heads} Sq{seq_q} Sk{seq_k}",
        "dtype": str(dtype).removeprefix("torch."),
        "pass": "plan",
        "impl": "flashsdpa",
    }
    wrong = (ops().mask_plan(mask) != reference_plan(mask)).sum().item()
    if wrong:
        return row | {"ms": None, "gbps": None, "error": wrong, "note": "words differ from the reference"}
    size = mask.numel() * mask.element_size()
    copies = [mask] + [
        torch.empty_strided(mask.shape, mask.stride(), dtype=dtype, device="cuda").copy_(mask)
        for _ in range(gpu.rotations(size) - 1)
    ]
    ms = gpu.graph_ms([lambda each=each: ops().mask_plan(each) for each in copies])
    gbps = size / ms / 1e6
    kernels = gpu.kernel_us(lambda: [ops().mask_plan(each) for each in copies])
    lists = sum(us for name, us in kernels.items() if "flashsdpa_mask_plan_lists_sm90" in name)
    classify = sum(us for name, us in kernels.items() if "flashsdpa_mask_plan_sm90" in name)
    parts = f"classify {classify:.1f} us ({size / classify / 1e3:.0f} GB/s), lists {lists:.1f} us"
    return row | {"ms": ms, "gbps": gbps, "error": 0, "note": f"{100 * gbps / ceiling:.0f} % of copy; {parts}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()

    ceiling = gpu.copy_gbps()
    rows = [
        {"group": "mask", "case": "copy 1 GiB", "dtype": "float32", "pass": "copy", "impl": "stock",
         "ms": 2 * 2**30 / ceiling / 1e6, "gbps": ceiling, "error": 0, "note": "bytes read plus written"}
    ]  # fmt: skip
    for case in CASES:
        rows.append(measure(*case, ceiling))
        torch.cuda.empty_cache()
    for row in rows:
        time, rate = ("wrong", "") if row["ms"] is None else (f"{1e3 * row['ms']:8.1f} us", f"{row['gbps']:6.0f} GB/s")
        print(f"{row['case']:44} {row['dtype']:9} {time} {rate}  {row['note']}")
    print("written:", gpu.write(rows, args.out, "mask-plan"))
    sys.exit(any(row["error"] for row in rows))


if __name__ == "__main__":
    main()
