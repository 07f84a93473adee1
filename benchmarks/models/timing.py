"""Steps of a model measured: time in turns, memory, and from the profiler which attention ran and its share of the time."""

import re
import time

import gpu
import torch

from torch_flashsdpa import profiler
from torch_flashsdpa.bench import measure

SAMPLE_MS = 20  # short steps are timed in batches of about this length
ATTENTION = re.compile(r"aten::_scaled_dot_product_\w+|flashsdpa::\w+")


class Step:
    """One step of a case: the forward, and in training loss, backward and AdamW with a learning rate of 0, which does all of
    its work and leaves the weights as they are."""

    def __init__(self, case, module, inputs):
        self.case, self.module, self.inputs = case, module, inputs
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, fused=True) if case.train else None

    def __call__(self):
        with torch.set_grad_enabled(self.case.train):
            result = self.case.result(self.module, **self.inputs)
        if self.case.train:
            result.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return result


def milliseconds(step, repeats, device):
    """Of one of `repeats` steps in a row."""
    if device.type == "cuda":
        return gpu.elapsed_ms(step, repeats)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) * 1e3 / repeats


def time_in_turns(step, contexts, rounds, device):
    """{implementation: [milliseconds] * rounds}, the implementations taking turns."""
    calls = {}
    for name, context in contexts.items():
        with context():
            step()
            repeats = max(1, round(SAMPLE_MS / milliseconds(step, 1, device)))

        def sample(context=context, repeats=repeats):
            with context():
                return milliseconds(step, repeats, device)

        calls[name] = sample
    return gpu.interleaved(calls, rounds)


def peak_mib(step, device):
    """How far memory rises during a step above what model, optimizer and inputs hold."""
    if device.type != "cuda":
        return measure.peak_mib(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def attention_seen(step, device):
    """What torch's profiler saw of the attention in one step: {"stock_backend": stock's operators and how often, "kernels":
    ours, "attention_share": of the time of all operators, on a GPU of all its kernels}."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    attention = total = 0.0
    for event in profile.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total += 0 if event.is_user_annotation else event.self_device_time_total  # an annotation spans kernels of its own
            continue
        if not on_gpu:
            total += event.self_cpu_time_total
        if ATTENTION.fullmatch(event.key):
            attention += event.device_time_total if on_gpu else event.cpu_time_total
    return {"stock_backend": text(measure.backends(profile)), "kernels": text(profiler.kernels_in(profile)),
            "attention_share": attention / total}  # fmt: skip


def text(counts):
    """cudnn_attention x16, or "none"."""
    return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items())) or "none"
