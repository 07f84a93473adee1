"""What the GPU benchmarks share: timing in turns and from a graph, the copy ceiling, the record of the machine."""

import datetime
import re
import statistics
import subprocess

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
