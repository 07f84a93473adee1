"""What the GPU benchmarks share: timing in turns and from a graph, the copy ceiling, FlashAttention-3, the record of the machine."""

import contextlib
import ctypes
import datetime
import functools
import importlib
import os
import re
import statistics
import subprocess
from pathlib import Path

import torch

from torch_flashsdpa.bench import output

ROTATED_BYTES = 512 * 2**20  # inputs of one timed round: many times the L2 cache


def rotations(bytes_per_call):
    """How many input sets a round needs so that no input is found in the L2 cache."""
    return max(2, min(64, -(-ROTATED_BYTES // bytes_per_call)))


def elapsed_ms(call, repeats):
    """Milliseconds of one of `repeats` calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def elapsed_ms_in(context, call, repeats):
    """The same, within what `context` makes: a backend, a mode."""
    with context():
        return elapsed_ms(call, repeats)


def repeats(call, ms):
    """How many of `call` in a row fill about `ms` milliseconds."""
    call()
    return max(2, min(50, int(ms / elapsed_ms(call, 2))))


def interleaved(calls, rounds):
    """{name: what its call returned in each round}: the calls, each a measurement, take turns, and turns in going first, so that a
    drift of the clocks falls on all of them."""
    times = {name: [] for name in calls}
    for turn in range(-1, rounds):  # the first round warms up
        for name in list(calls) if turn % 2 else list(reversed(calls)):
            ms = calls[name]()
            if turn >= 0:
                times[name].append(ms)
    return times


def graph_ms(calls, replays=25, warm_up=3):
    """Median milliseconds of one of `calls`, captured together in one CUDA graph, so that no launch gap is counted."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    rounds = []
    for number in range(warm_up + replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= warm_up:
            rounds.append(start.elapsed_time(end) / len(kept))
    return statistics.median(rounds)


def kernel_us(call, repeats=20):
    """{kernel name: median microseconds} over the kernels that `call` runs, from the profiler."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: statistics.median(each) for name, each in times.items()}


def copy_gbps():
    """Gigabytes read plus written per second by a device-to-device copy of 1 GiB: the ceiling of memory-bound work."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    ms = graph_ms([lambda: target.copy_(source)])
    return 2 * source.nbytes / ms / 1e6


@functools.cache
def fa3_ops():
    """FlashAttention-3's operators, or None: from the library that FLASHSDPA_FA3 names (xformers' flash_attn_3/_C.so is one), else from
    the first package that is installed (fa3-fwd is the forward alone, without windows)."""
    library = os.environ.get("FLASHSDPA_FA3")
    if library:
        runtime = Path(library).resolve().with_name("libcudart.so.12")
        if runtime.exists():  # a library built with CUDA 12 asks for it, and a torch built with CUDA 13 does not bring it
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        torch.ops.load_library(library)
        return torch.ops.flash_attn_3
    packages = {"flash_attn_3._C": "flash_attn_3", "xformers.flash_attn_3._C": "flash_attn_3", "fa3_fwd_interface": "fa3_fwd"}
    for module, namespace in packages.items():
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
            return getattr(torch.ops, namespace)
    return None


@torch.no_grad()  # the operators have no autograd; a recorded call would warn
def fa3_forward(q, k, v, is_causal, window=(-1, -1)):
    """(output, log-sum-exp). FlashAttention-3 takes (batch, length, heads, dim): views of what the others are given."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    splits = 1 if q.size(1) == k.size(1) else 0  # 0: its own choice
    out, lse, *_ = fa3_ops().fwd(q, k, v, softmax_scale=q.size(-1) ** -0.5, is_causal=is_causal, window_size_left=window[0],
                                 window_size_right=window[1], num_splits=splits)  # fmt: skip
    return out.transpose(1, 2), lse


@torch.no_grad()
def fa3_backward(grad_out, q, k, v, out, lse, is_causal):
    """(dq, dk, dv), allocated here as autograd would."""
    grad_out, q, k, v, out = (t.transpose(1, 2) for t in (grad_out, q, k, v, out))
    grads = [torch.empty_like(t) for t in (q, k, v)]
    fa3_ops().bwd(grad_out, q, k, v, out, lse, *grads, softmax_scale=q.size(-1) ** -0.5, is_causal=is_causal)
    return [t.transpose(1, 2) for t in grads]


def smi(fields):
    try:
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def record(rows):
    """The run as one JSON document."""
    return {
        "machine": torch.cuda.get_device_name(),
        "driver": smi("driver_version"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "commit": output.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "clocks": smi("clocks.sm,clocks.mem,power.draw"),
        "rows": rows,
    }


def write(rows, folder, group):
    """Writes <date>-<machine>-<group>.json and returns its path."""
    run = record(rows)
    machine = re.sub(r"[^a-z0-9]+", "-", run["machine"].lower()).strip("-")
    path = folder / f"{run['date'][:10]}-{machine}-{group}.json"
    output.write_json(run, path)
    return path
