"""Which attention calls a program makes: a listener that keeps one entry for each distinct call."""

import threading
from dataclasses import dataclass, field, replace

import torch

from ..report import dtype_name


@dataclass(frozen=True)
class Layout:
    """What is kept of a tensor: sizes and strides in elements, dtype, whether it wanted a gradient."""

    shape: tuple
    stride: tuple
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor):
        """None for what has no plain strides to repeat: nested and sparse tensors, symbolic sizes."""
        if tensor is None or tensor.is_nested or tensor.layout is not torch.strided:
            return None
        sizes = (*tensor.shape, *tensor.stride())
        if not all(type(size) is int for size in sizes):
            return None
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


@dataclass(frozen=True)
class Call:
    """A distinct call. kernel: of our table, or "stock", for `reasons`; backend: the selection that decided.

    source: "eager"; "graph": our op, run by a compiled function or by torch_flashsdpa.attention(); "traced": left to stock in a
    function that was being compiled, whose executions nobody reports.
    """

    query: Layout | None
    key: Layout | None
    value: Layout | None
    mask: Layout | None
    shapes: tuple
    dtype: str
    device: str
    mask_text: str
    is_causal: bool
    dropout_p: float
    scale: float | None
    extras: tuple  # options of torch_flashsdpa.attention() that SDPA does not have
    needs_grad: bool
    kernel: str
    reasons: tuple
    backend: str
    source: str

    @property
    def gqa(self):
        query, key, _ = self.shapes
        return bool(query and key and len(query) > 2 and len(key) > 2 and query[-3] != key[-3])

    @property
    def repeatable(self):
        """Whether the call can be made again as one of F.scaled_dot_product_attention on fresh inputs."""
        whole = self.query and self.key and self.value and (self.mask or not self.mask_text)
        return bool(whole and not self.extras and self.source != "traced")

    def text(self):
        """The call on one line."""
        parts = [" ".join(f"{name} {_shape(shape)}" for name, shape in zip("qkv", self.shapes)), f"{self.dtype} {self.device}"]
        flags = (
            (self.mask_text, f"mask {self.mask_text}"),
            (self.is_causal, "causal"),
            (self.gqa, "gqa"),
            (self.dropout_p, f"dropout {self.dropout_p:g}"),
            (self.extras, " ".join(self.extras)),
            (self.needs_grad, "grad"),
        )
        return ", ".join(parts + [text for given, text in flags if given])


def _shape(sizes):
    return "nested" if sizes is None else f"({', '.join(map(str, sizes))})"


@dataclass
class Entry:
    """How often a call was made, and a copy of the mask of the first of them."""

    count: int = 0
    threads: set = field(default_factory=set)
    mask: torch.Tensor | None = None


class Calls:
    """The listener: {Call: Entry} in order of first appearance, over all threads."""

    def __init__(self):
        self.entries = {}
        self._lock = threading.Lock()
        self._thread = threading.local()  # .served: the router chose our kernel, whose launch comes next on this thread
        self._backward_shapes = set()

    def __call__(self, event):
        if event["kind"] == "launch":
            if event["op"] == "flashsdpa::backward":
                with self._lock:
                    self._backward_shapes.add(_shapes(event) + (event["dtype"],))
            elif event["op"] == "flashsdpa::forward":
                expected, self._thread.served = getattr(self._thread, "served", False), False
                if not expected:
                    self._add(event, "graph")
            return
        traced, stock = event["phase"] == "traced", event["kernel"] == "stock"
        self._thread.served = not traced and not stock
        if stock or not traced:  # what a graph gives to ours is seen when it runs
            self._add(event, "traced" if traced else "eager")

    def _add(self, event, source):
        *tensors, mask = event["inputs"]
        layouts = [Layout.of(tensor) for tensor in tensors]
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, mask) if t is not None)
        call = Call(
            *layouts, Layout.of(mask), _shapes(event), event["dtype"], event["device"], event["mask"] or "",
            event["is_causal"], event["dropout_p"], event["scale"], tuple(event["extras"]), wanted, event["kernel"],
            tuple(event["reasons"]), event["backend"], source,
        )  # fmt: skip
        with self._lock:
            entry = self.entries.get(call)
            if entry is None:
                entry = self.entries[call] = Entry()
                if call.mask is not None and source != "traced":
                    entry.mask = _copy(mask)
            entry.count += 1
            entry.threads.add(threading.get_ident())

    def rows(self):
        """[(Call, Entry)]. A call of a graph wanted a gradient if a backward of its shapes ran."""
        with self._lock:
            items = list(self.entries.items())
        return [(_with_gradient(call) if self._trained(call) else call, entry) for call, entry in items]

    def _trained(self, call):
        return call.source == "graph" and call.shapes + (call.dtype,) in self._backward_shapes


def _with_gradient(call):
    layouts = {name: getattr(call, name) for name in ("query", "key", "value")}
    wanting = {name: replace(layout, requires_grad=True) for name, layout in layouts.items() if layout}
    return replace(call, needs_grad=True, **wanting)


def _copy(tensor):
    """A copy with the same strides where axes are expanded: those stay so."""
    compact = tensor.detach()
    for axis, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[axis] > 1:
            compact = compact.narrow(axis, 0, 1)
    return compact.clone().expand(tensor.shape)


def _shapes(event):
    return event["shape_q"], event["shape_k"], event["shape_v"]


def mask_kind(call, mask):
    """What a mask says, in words: its dtype and the shares of its 64 x 64 granules."""
    if not call.mask_text:
        return "causal" if call.is_causal else "none"
    kind = "bool" if call.mask and call.mask.dtype == torch.bool else "additive"
    shares = _shares(mask)
    return f"{kind} {dtype_name(call.mask.dtype)}, {shares}".replace("bool bool", "bool") if shares else kind


def _shares(mask):
    from .._attention import plan_mask
    from ..report import PlanShares

    if mask is None or mask.dim() > 4:
        return None
    try:
        mask = torch.atleast_2d(mask)
        return str(PlanShares(plan_mask(mask), mask.shape[-2:], 0.0))
    except (RuntimeError, NotImplementedError):  # a device or dtype that no plan kernel takes
        return None
