"""python -m torch_flashsdpa: doctor, explain, profile, bench, demo, build."""

import argparse
import json
import os
import sys

from . import __version__


def _doctor(options):
    from ._doctor import doctor

    diagnosis = doctor()
    print(json.dumps(diagnosis, indent=2, default=str) if options.json else diagnosis)
    return 0 if diagnosis.healthy else 1


def _explain_arguments(parser):
    from .bench.cases import DTYPES

    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8, help="query heads (default 8)")
    parser.add_argument("--heads-kv", type=int, help="key and value heads, a divisor of --heads (default: --heads)")
    parser.add_argument("--seq", type=int, default=2048, help="number of keys, and of queries (default 2048)")
    parser.add_argument("--seq-q", type=int, help="number of queries, where it differs")
    parser.add_argument("--dim", type=int, default=64, help="head dim of query and key (default 64)")
    parser.add_argument("--dim-v", type=int, help="head dim of value, where it differs")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; nothing is allocated there (default cpu)")
    parser.add_argument("--mask", choices=("full", "causal", "causal bool", "half padded", "window 256", "sliding 256"), default="full")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--grad", action="store_true", help="the call is part of a backward pass")
    parser.add_argument("--backend", choices=("flashsdpa", "auto", "stock"), default="auto")
    parser.add_argument("--plan", action="store_true", help="also plan the mask, on the CPU, and count its granules")
    parser.add_argument("--plot", metavar="PNG", help="also draw the mask's plan")


def _explain(options):
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .bench.cases import DTYPES, Case
    from .report import explain

    heads_kv = options.heads_kv or options.heads
    case = Case("explain", options.seq_q or options.seq, options.seq, options.dim, batch=options.batch, mask=options.mask)
    mask = case.make_mask()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def tensor(heads, length, dim):
            shape = (options.batch, heads, length, dim)
            return torch.empty(shape, dtype=DTYPES[options.dtype], device=options.device, requires_grad=options.grad)

        explanation = explain(
            tensor(options.heads, case.seq_q, options.dim),
            tensor(heads_kv, options.seq, options.dim),
            tensor(heads_kv, options.seq, options.dim_v or options.dim),
            None if mask is None else mode.from_tensor(mask).to(options.device),
            options.dropout,
            options.mask == "causal",
            enable_gqa=heads_kv != options.heads,
            backend=options.backend,
        )
    print(explanation)
    if (options.plan or options.plot) and mask is None:
        print("  plan        none: the call has no dense mask; give --mask 'causal bool', 'half padded' or 'window 256'")
        return 0
    explanation.attn_mask = mask
    if options.plan:
        plan = explanation.plan()
        print(f"  granules    {plan}\n  plan's cost {plan.cost}")
    if options.plot:
        print(f"  plot        {explanation.plot(options.plot)}")
    return 0


def _bench(options):
    from .bench import command

    return command.run(options)


def _profile(options):
    from .profiling import command

    return command.run(options)


def _demo(options):
    from . import demo

    return demo.run(options)


def _build(options):
    from . import _build as build
    from ._loader import load

    if options.where:
        library = load()
        print(library.path.parent if library.module else f"torch_flashsdpa: {library.problem}",
              file=sys.stdout if library.module else sys.stderr)  # fmt: skip
        return 0 if library.module else 1
    return build.main(["--force"] if options.force else [])


def main(arguments=None):
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m torch_flashsdpa", description="Faster scaled_dot_product_attention for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torch_flashsdpa {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    doctor = commands.add_parser("doctor", help="what is installed, what works, what to do")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.set_defaults(run=_doctor)

    explain = commands.add_parser("explain", help="which kernel would serve a call, and why")
    _explain_arguments(explain)
    explain.set_defaults(run=_explain)

    bench = commands.add_parser("bench", help="stock PyTorch against ours in one run: table, plot, JSON")
    from .bench import command

    command.add_arguments(bench, grid="small")
    bench.set_defaults(run=_bench)

    profile = commands.add_parser("profile", help="run a program and report its attention: calls, kernels, times, errors")
    from .profiling import command as profile_command

    profile_command.add_arguments(profile)
    profile.set_defaults(run=_profile)

    demo = commands.add_parser("demo", help="a trained sentence encoder on real sentences, stock and routed")
    demo.add_argument("--threads", type=int, metavar="N", help="torch.set_num_threads(N)")
    demo.add_argument("--repeats", type=int, default=10, help="timed forward passes each (default 10)")
    demo.set_defaults(run=_demo)

    build = commands.add_parser("build", help="build the binding for the installed torch (g++ and ninja, a minute)")
    build.add_argument("--force", action="store_true", help="build even if it is there")
    build.add_argument("--where", action="store_true", help="print the folder of libflashsdpa_torch.so, for C++ programs, and stop")
    build.set_defaults(run=_build)

    options = parser.parse_args(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler else writes its own progress between our lines
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
