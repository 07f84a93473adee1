"""Which kernel serves a call, and why: explain() before it runs, record_dispatch() and the log while it runs."""

import contextlib
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from . import _dynamo_compat, _hook, _loader, selection
from ._inputs import check_flags, check_numbers, check_tensors

logger = logging.getLogger("torch_flashsdpa")
_LEVELS = {"off": (), "decisions": ("decision",), "launches": ("decision", "launch")}


def routed_calls():
    """How often flashsdpa::forward has run in this process, from eager and compiled code alike."""
    _C = _loader.load().module
    return _C.routed_calls() if _C is not None else 0


def reset_routed_calls():
    """Set routed_calls() back to 0."""
    _C = _loader.load().module
    if _C is not None:
        _C.reset_routed_calls()


def dtype_name(dtype):
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _shape(sizes):
    return f"({', '.join(map(str, sizes))})"


def _shape_of(tensor):
    # A nested tensor of the strided layout has no shape to ask for.
    return "nested" if tensor.is_nested and tensor.layout is torch.strided else _shape(tensor.shape)


@dataclass
class Explanation:
    """The answer of explain(); printed, it reads as a short report.

    chosen: a kernel's name, or "stock". reasons: why ours does not serve the call (empty if it does). candidates: one
    {"kernel", "passes", "reasons"} per kernel that was considered; those that serve the call have no reasons. config: the
    chosen kernel's tile and schedule, and the inputs that are copied before it reads them.
    """

    chosen: str
    reasons: list
    candidates: list
    config: dict
    call: str
    selection: str
    attn_mask: torch.Tensor | None = field(default=None, repr=False)

    def __str__(self):
        lines = [self.call, f"  selection   {self.selection}", f"  chosen      {self.chosen}"]
        lines += [f"  {'because' if not i else '':<11} {reason}" for i, reason in enumerate(self.reasons)]
        config = dict(self.config)
        if config.get("block_m") and config.get("block_n"):
            lines.append(f"  tile        {config.pop('block_m')} queries x {config.pop('block_n')} keys")
        for key, value in config.items():
            if value not in (None, "", [], ()):
                text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
                lines.append(f"  {key.replace('_', ' '):<11} {text}")
        others = [c for c in self.candidates if c["reasons"]]
        if others:
            lines.append("  others")
            width = max(len(c["kernel"]) for c in others)
            for candidate in others:
                lines.append(f"    {candidate['kernel']:<{width}}  {'; '.join(candidate['reasons'])}")
        return "\n".join(lines)

    def plan(self):
        """Plan the mask (this runs the mask-plan kernel, twice) and return its PlanShares. ValueError without a mask with values."""
        if self.attn_mask is None:
            raise ValueError("the call has no attn_mask; there is nothing to plan")
        if self.attn_mask.device.type == "meta" or type(self.attn_mask) is not torch.Tensor:
            raise ValueError(f"attn_mask is a {_kind(self.attn_mask)} without values; explain() the call with a real mask")
        from ._attention import plan_mask

        mask = torch.atleast_2d(self.attn_mask)
        mask = mask.flatten(0, -4) if mask.dim() > 4 else mask
        plan_mask(mask)  # the kernel is loaded when it is timed
        plan, seconds = _timed(lambda: plan_mask(mask), mask.device)
        return PlanShares(plan, mask.shape[-2:], seconds)

    def plot(self, path):
        """Draw the plan of the mask's first batch and head as a PNG at `path`; returns the path. Needs matplotlib."""
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        shares = self.plan()
        colours = ListedColormap(["#e8e8e8", "#2f6f9f", "#e08e2b"])
        figure = Figure(figsize=(5, 5.4), layout="constrained")
        axes = figure.subplots()
        axes.imshow(shares.classes(), cmap=colours, vmin=0, vmax=2, interpolation="nearest")
        axes.set(xlabel="key granule (64 keys)", ylabel="query granule (64 queries)", title=str(shares))
        axes.legend(
            handles=[Patch(color=colours(i), label=name) for i, name in enumerate(PlanShares.NAMES)],
            loc="upper right",
        )
        figure.savefig(path, dpi=120)
        return path


def _timed(function, device):
    """What function() returns, and the seconds that it takes on `device`."""
    if device.type != "cuda":
        start = time.perf_counter()
        return function(), time.perf_counter() - start
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function()
        end.record()
        end.synchronize()
    return result, start.elapsed_time(end) / 1e3


class PlanShares:
    """How many of a mask's 64 x 64 granules are empty (skipped), full (no mask arithmetic) and mixed, and what the plan costs.

    empty, full, mixed: shares, whose counts are in `counts`. seconds: of making the plan. bytes: of the plan.
    """

    NAMES = ("empty", "full", "mixed")

    def __init__(self, plan, mask_size, seconds):
        self._plan = plan
        self.seconds, self.bytes = seconds, plan.numel() * plan.element_size()
        self._rows, self._cols = (-(-size // 64) for size in mask_size)
        counts = plan[..., 1:4].sum((0, 1), dtype=torch.int64).tolist() if plan.numel() else [0, 0, 0]
        self.counts = dict(zip(self.NAMES, counts))
        total = max(sum(counts), 1)
        self.empty, self.full, self.mixed = (count / total for count in counts)

    def __str__(self):
        return ", ".join(f"{name} {getattr(self, name):.1%}" for name in self.NAMES)

    __repr__ = __str__

    @property
    def cost(self):
        """The cost of the plan as text."""
        return f"{self.seconds * 1e3:.3g} ms, {self.bytes:,} bytes"

    def classes(self, batch=0, head=0):
        """(rows, cols) of 0 empty, 1 full, 2 mixed for one batch and head of the mask, as nested lists."""
        words = self._plan[batch, head, : 4 + self._rows * (1 + self._cols)].tolist()
        image = [[0] * self._cols for _ in range(self._rows)]
        for row in range(self._rows):
            start = 4 + row * (1 + self._cols)  # src/mask_plan.h: a count, then entries granule << 2 | class
            for entry in words[start + 1 : start + 1 + words[start]]:
                image[row][entry >> 2] = min(entry & 3, 2)  # 2: values to add; 3: bits alone
        return image


def _kind(tensor):
    return "meta tensor" if tensor.device.type == "meta" else type(tensor).__name__


def explain(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    backend=None,
):
    """Tell which kernel would serve this call of scaled_dot_product_attention, and why. Launches nothing.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: SDPA's; real, meta or fake tensors.
        backend: "flashsdpa", "auto" or "stock"; None is the selection in force on this thread.
    Returns:
        an Explanation. Print it. TypeError, ValueError: an argument is of the wrong type, backend unknown. What SDPA would
        refuse for its shapes, dtypes or devices is no error here: the reasons say it.
    """
    _check_explain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    library = _loader.load()
    if backend is None:
        now = selection.status()
        backend, strict, chosen_by = now["backend"], now["strict"], selection.describe(now)
    else:
        number, strict, chosen_by = selection.number(backend), False, f"{backend}, as asked"
    given = (query, key, value, attn_mask)
    inputs = _cast_by_autocast(given)
    call = _call_text(*inputs, dropout_p, is_causal, enable_gqa) + (", cast by autocast" if inputs is not given else "")
    if library.module is None:
        return Explanation("stock", [library.problem], [], {}, call, chosen_by, attn_mask)
    answer = library.module.explain(
        *inputs, dropout_p, is_causal, scale, enable_gqa, selection.number(backend), strict
    )
    reason = _reason_of_types(*inputs, dropout_p) if answer["chosen"] != "stock" else None
    if reason is not None:
        candidates = [c | {"reasons": [reason, *c["reasons"]]} for c in answer["candidates"]]
        return Explanation("stock", [reason], candidates, {}, call, chosen_by, attn_mask)
    return Explanation(
        answer["chosen"], answer["reasons"], answer["candidates"], answer["config"], call, chosen_by, attn_mask
    )


def _cast_by_autocast(tensors):
    """What autocast hands on to the router, as fake tensors; `tensors` as they are where it changes none of them."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    if any(t is not None and type(t) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for t in tensors):
        return tensors
    dtype, mode = torch.get_autocast_dtype(device), FakeTensorMode()

    def cast(t):
        stays = t is None or t.is_nested or not t.is_floating_point() or t.dtype in (torch.float64, dtype)
        if stays or t.device.type != device or _dynamo_compat.innermost(t) is not t:
            return t
        return (t if isinstance(t, FakeTensor) else mode.from_tensor(t)).to(dtype)

    result = tuple(map(cast, tensors))
    return tensors if all(new is old for new, old in zip(result, tensors)) else result


def _reason_of_types(query, key, value, attn_mask, dropout_p):
    """Why the router leaves tensors of these types to stock, or None. It asks only where one of them dispatches in Python."""
    inner = _dynamo_compat.innermost_dispatching((query, key, value, attn_mask))
    return None if inner is None else _hook.refusal(*inner, dropout_p)


def _check_explain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    check_tensors(any_layout=True, query=query, key=key, value=value)
    check_tensors(any_layout=True, optional=True, attn_mask=attn_mask)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    check_numbers(dropout_p=dropout_p, scale=1.0 if scale is None else scale)


def _call_text(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
    parts = [
        f"scaled_dot_product_attention  q {_shape_of(query)} k {_shape_of(key)} v {_shape_of(value)}",
        f"{dtype_name(query.dtype)} {query.device.type}",
    ]
    if attn_mask is not None:
        parts.append(f"mask {dtype_name(attn_mask.dtype)} {_shape_of(attn_mask)}")
    if is_causal:
        parts.append("causal")
    if enable_gqa:
        parts.append("gqa")
    if dropout_p:
        parts.append(f"dropout {dropout_p}")
    return ", ".join(parts)


class _Observers:
    """Lets several listeners share the binding's one observer; without a listener the binding has none."""

    def __init__(self):
        self._lock = threading.Lock()
        self._listeners = []

    def add(self, listener):
        _loader.load()  # not under the lock: what is loaded connects the log, which comes here too
        with self._lock:
            self._listeners = [*self._listeners, listener]
            self._publish()

    def remove(self, listener):
        _loader.load()
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not listener]
            self._publish()

    def _publish(self):
        listeners = self._listeners
        _C = _loader.load().module
        if _C is None:
            return
        if not listeners:
            _C.set_observer(None)
            return

        def observer(event):
            for listener in listeners:
                listener(event)

        _C.set_observer(observer)


_observers = _Observers()


@dataclass
class Recorder:
    """What record_dispatch() saw: `rows`, one dict per kind of call, with its count."""

    _counts: dict = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    COLUMNS = ("kind", "phase", "op", "shape_q", "shape_k", "shape_v", "dtype", "device", "mask", "is_causal", "kernel")

    def __call__(self, event):
        key = tuple(event.get(name) for name in self.COLUMNS) + (tuple(event.get("reasons") or ()),)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + 1

    @property
    def rows(self):
        """[{kind, phase, op, shape_q, shape_k, shape_v, dtype, device, mask, is_causal, kernel, reasons, count}, ...]

        kind "decision": the router chose a kernel or "stock" (phase "eager", or "traced" while code was compiled).
        kind "launch": one of our ops ran, called by whomever.
        """
        with self._lock:
            items = list(self._counts.items())
        return [
            dict(zip(self.COLUMNS, key)) | {"reasons": list(key[-1]), "count": count} for key, count in items
        ]

    def table(self):
        """The rows as aligned text."""
        rows = self.rows
        if not rows:
            return "no call of scaled_dot_product_attention was seen"
        cells = [("count", "what", "kernel", "call", "reasons")]
        for row in rows:
            what = f"{row['kind']} {row['phase']}" if row["kind"] == "decision" else f"{row['kind']} {row['op']}"
            cells.append((str(row["count"]), what, row["kernel"], event_text(row), "; ".join(row["reasons"])))
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells)

    __str__ = table


def event_text(event):
    """The call of an event on one line: shapes, dtype, device, mask."""
    parts = [f"q {_shape(event['shape_q'])} k {_shape(event['shape_k'])} v {_shape(event['shape_v'])}"]
    parts.append(f"{event['dtype']} {event['device']}")
    if event.get("mask"):
        parts.append(f"mask {event['mask']}")
    if event.get("is_causal"):
        parts.append("causal")
    return ", ".join(parts)


@contextlib.contextmanager
def record_dispatch():
    """Record every choice of the router and every execution of our ops in the block, over all threads.

    Yields a Recorder: print(recorder.table()), or read recorder.rows. Compiled code shows the decisions taken while it
    was traced and each execution of our op; replays of CUDA graphs are not seen.
    """
    recorder = Recorder()
    _observers.add(recorder)
    try:
        yield recorder
    finally:
        _observers.remove(recorder)


def _log_event(event):
    if event["kind"] == "decision":
        why = f" ({'; '.join(event['reasons'])})" if event["reasons"] else ""
        logger.info("%s: %s -> %s%s", event["phase"], event_text(event), event["kernel"], why)
    else:
        logger.info("launch %s: %s", event["kernel"], event_text(event))


def _log_decisions(event):
    if event["kind"] == "decision":
        _log_event(event)


def log(level):
    """Log to the "torch_flashsdpa" logger at INFO: "decisions" of the router, also "launches" of our kernels, or "off".

    Raises ValueError for another level. A handler that writes to stderr is added where logging has none.
    """
    if level not in _LEVELS:
        raise ValueError(f"log level is {level!r}; choose one of {', '.join(map(repr, _LEVELS))}")
    _observers.remove(_log_event)
    _observers.remove(_log_decisions)
    if level == "off":
        return
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    _observers.add(_log_event if level == "launches" else _log_decisions)


def log_from_environment():
    """Obey TORCH_FLASHSDPA_LOG; an unknown value is a warning, since it must not keep attention from working."""
    level = os.environ.get("TORCH_FLASHSDPA_LOG", "off").strip().lower() or "off"
    try:
        log(level)
    except ValueError as error:
        logger.warning("TORCH_FLASHSDPA_LOG: %s", error)
