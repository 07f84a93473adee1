"""What attention costs in a program, call by call: `with torch_flashsdpa.profile()` and `python -m torch_flashsdpa profile`."""

import contextlib
import functools
import json
import os
import time
from pathlib import Path

import torch

from .. import report, selection
from . import html, output, replay
from .calls import Calls, mask_kind


class Profile:
    """What profile() saw. Print it, or read `rows` and `summary`; write_json(path) and write_html(path) keep it.

    The first of these re-runs each distinct call, which takes up to `replay_seconds`; nothing before it does.
    """

    def __init__(self, replay_seconds):
        self._calls, self._replay_seconds = Calls(), replay_seconds
        self.seconds = 0.0  # of the block
        self.program_flop = None

    @functools.cached_property
    def rows(self):
        """One dict for each distinct call, those that cost most first.

        call (text), count, source, kernel, reasons, backend, mask (its kind), needs_grad, gqa, is_causal, dropout_p; and where
        the call was run again stock_ms, ours_ms (None: refused), speedup, stock_error, our_error, stock_kernel, our_kernel,
        seconds (count times the time of what served), share (of the block), flop (of all its calls).
        """
        entries = self._calls.rows()
        masks = {id(call): entry.mask for call, entry in entries}
        flop = {id(call): replay.flop(call, masks[id(call)]) or 0.0 for call, _ in entries}
        order = sorted(entries, key=lambda item: -flop[id(item[0])] * item[1].count)
        deadline = time.perf_counter() + self._replay_seconds
        with _own_random_numbers():
            rows = [self._row(call, entry, flop[id(call)], deadline) for call, entry in order]
        return sorted(rows, key=lambda row: -(row.get("seconds") or 0.0))

    def _row(self, call, entry, flop, deadline):
        row = {
            "call": call.text(), "count": entry.count, "threads": len(entry.threads), "source": call.source,
            "kernel": call.kernel, "reasons": list(call.reasons), "backend": call.backend,
            "mask": mask_kind(call, entry.mask), "shapes": call.shapes, "dtype": call.dtype, "device": call.device,
            "needs_grad": call.needs_grad, "gqa": call.gqa, "is_causal": call.is_causal, "dropout_p": call.dropout_p,
        }  # fmt: skip
        if not call.repeatable:
            return row | {"note": "not run again: " + _why_not_repeated(call)}
        left = deadline - time.perf_counter()
        if left <= 0:
            return row | {"note": f"not run again: the {self._replay_seconds:g} s for that were used up"}
        try:
            timing = replay.replay(call, entry.mask, min(left / 2, 0.2))
        except RuntimeError as error:  # a call that stock refuses too, or too little memory for a second copy of it
            return row | {"note": f"not run again: {' '.join(str(error).split())[:200]}"}
        served = timing.stock if call.kernel == "stock" or timing.ours is None else timing.ours
        return row | {
            "stock_ms": timing.stock * 1e3,
            "ours_ms": None if timing.ours is None else timing.ours * 1e3,
            "speedup": None if timing.ours is None else timing.stock / timing.ours,
            "stock_error": timing.stock_error, "our_error": timing.our_error,
            "stock_kernel": timing.stock_kernel, "our_kernel": timing.our_kernel,
            "seconds": served * entry.count, "share": served * entry.count / self.seconds if self.seconds else 0.0,
            "flop": flop * entry.count,
        }  # fmt: skip

    @functools.cached_property
    def summary(self):
        """Totals: seconds of the block, calls, distinct, threads, attention_seconds and share (of the calls run again),
        flop_rate of attention (FLOP/s), peaks ({"float32 cpu": FLOP/s of a matrix product, measured}), utilisation of
        attention, with flops=True program_flop and program_utilisation (model FLOP utilisation of the block), and busy: whether
        others kept the processor at work meanwhile."""
        timed = [row for row in self.rows if "seconds" in row]
        seconds, flop = sum(row["seconds"] for row in timed), sum(row["flop"] for row in timed)
        kinds = sorted({(row["dtype"], row["device"]) for row in timed})
        with _own_random_numbers():
            peaks = {f"{dtype} {device}": replay.peak_flops(getattr(torch, dtype), device) for dtype, device in kinds}
        possible = sum(row["flop"] / peaks[f"{row['dtype']} {row['device']}"] for row in timed)
        threads = {thread for _, entry in self._calls.rows() for thread in entry.threads}
        best = max(peaks.values(), default=None)
        return {
            "seconds": self.seconds, "calls": sum(row["count"] for row in self.rows if row["source"] != "traced"),
            "distinct": len(self.rows), "timed": len(timed), "threads": len(threads), "attention_seconds": seconds,
            "share": seconds / self.seconds if self.seconds else 0.0, "flop_rate": flop / seconds if seconds else None,
            "peaks": peaks, "utilisation": possible / seconds if seconds else None, "program_flop": self.program_flop,
            "busy": os.getloadavg()[0] > 0.5 + torch.get_num_threads(),
            "program_utilisation": self.program_flop / self.seconds / best if self.program_flop and best else None,
        }  # fmt: skip

    def __str__(self):
        return output.text(self.rows, self.summary)

    def write_json(self, path):
        """{"torch", "summary", "rows"} as JSON at `path`; returns the path."""
        document = {"torch": torch.__version__, "summary": self.summary, "rows": self.rows}
        Path(path).write_text(json.dumps(document, indent=1) + "\n")
        return path

    def write_html(self, path, title="attention"):
        """The report as one HTML file without references to others; returns the path."""
        Path(path).write_text(html.page(self.rows, self.summary, title), encoding="utf-8")
        return path


def _own_random_numbers():
    """What a program draws must not depend on whether its report was read."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.random.fork_rng([torch.cuda.current_device()] if in_use else [])


def _why_not_repeated(call):
    if call.source == "traced":
        return "left to stock in a compiled function, whose executions are not seen; the count is of traces"
    if call.extras:
        return f"torch_flashsdpa.attention() with {', '.join(call.extras)}, which stock does not have"
    return "its tensors are nested, or of unknown size"


@contextlib.contextmanager
def profile(*, replay_seconds=20.0, flops=False):
    """Watch every call of scaled_dot_product_attention in the block, over all threads; the selection stays as it is.

        with torch_flashsdpa.profile() as profile:
            model(x)
        print(profile)

    Args:
        replay_seconds: about how long the report may take to run the distinct calls again; those with the most arithmetic come
            first, and what was left out is said.
        flops: also count the FLOP of the whole block on this thread, by torch's FlopCounterMode, which slows it down.
    Yields:
        a Profile, complete when the block has ended, by an exception too. RuntimeError: the compiled binding is missing.

    Each distinct call (shapes, strides, dtype, mask, flags, who served it) is run again afterwards, alone: with fresh random
    normal inputs of the same sizes and strides, the values of the mask of its first occurrence, forward, and backward where a
    gradient was needed (of a compiled graph: where a backward of its shapes ran). Stock and ours take turns, median. Hence
    "share of the program" is count times that time over the block's: an estimate, which threads at work together can raise
    above 1. Errors are the largest of the output against float64, over at most 8 heads and 256 rows of each.

    Seen: eager calls of any caller, our op in compiled functions. Not seen: calls that a compiled function leaves to stock (their
    tracing is), replays of CUDA graphs, other processes, and what never calls SDPA.
    """
    result = Profile(replay_seconds)
    with selection.router_in_place(), contextlib.ExitStack() as stack:
        counter = None
        if flops:
            from torch.utils.flop_counter import FlopCounterMode

            counter = stack.enter_context(FlopCounterMode(display=False))
        report._observers.add(result._calls)
        start = time.perf_counter()
        try:
            yield result
        finally:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            result.seconds = time.perf_counter() - start
            report._observers.remove(result._calls)
            result.program_flop = counter.get_total_flops() if counter else None
