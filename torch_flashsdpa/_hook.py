"""What the router asks Python, and only for tensors with the Python dispatch key: fake tensors while something is traced,
and tensor subclasses; and for those that torch.func has wrapped, in which such tensors may be. Never on the plain eager path.

The answer also leaves two marks on the compilation that is under way: a Dynamo guard, so that the compiled function
notices a changed selection, and a tag in torch's cache key, so that another process does not load our choice from disk.
"""

import contextlib
import contextvars
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import __version__, _dtensor, _dynamo_compat, auto_table

STOCK = 0
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# Other subclasses (jagged tensors, wrappers) have SDPA rules of their own, which our op would bypass; for DTensors see
# _dtensor.py.
SERVED_TYPES = (*PLAIN_TYPES, FakeTensor, FunctionalTensor)

_C = None  # torch_flashsdpa._C, from connect()
_export_routed = contextvars.ContextVar("flashsdpa_export_routed", default=False)


def connect(binding):
    """Give the router its hook; done once, when the binding is loaded."""
    global _C
    _C = binding
    _C.set_hook(answer)


@contextlib.contextmanager
def route_in_export():
    """Let programs exported inside this context hold flashsdpa::forward instead of PyTorch's own SDPA.

    Such a program needs torch_flashsdpa where it is loaded. Outside of it an exported program stays stock.
    """
    token = _export_routed.set(True)
    try:
        yield
    finally:
        _export_routed.reset(token)


class Selector:
    """This thread's selection as an attribute for Dynamo to guard on. A guard on a plain module variable could not see
    a scope that belongs to one thread."""

    @property
    def current(self):
        """Everything outside a traced function on which it depends whether ours serves in it, as one string."""
        backend, strict, batch_invariant, _ = _compiled_selection() or _C.current_selection()
        marks = ("!" if strict else "") + (" batch invariant" if batch_invariant else "")
        return f"{backend}{marks}{'' if _C.stock_only() is None else ' stock'}"


def _compiled_selection(begin=False):
    """The selection that the compilation on this thread began with; None outside of one, or before begin=True has noted it. What
    another thread selects meanwhile is for the next call: all calls in a graph, the guard that torch makes after them, and
    torch's trial of that guard are of one mind."""
    context = _dynamo_compat.compile_context()
    if context is not None and begin:
        context.__dict__.setdefault("flashsdpa_selection", _C.current_selection())
    return getattr(context, "flashsdpa_selection", None)


selector = Selector()
_run_time = threading.local()  # .previous: the scopes that graphs run as they stand have replaced on this thread


def push(backend, strict, batch_invariant):
    """Open a scope inside a graph. While compiling, the graph's compilation owns it, so that nothing leaks when tracing
    is abandoned; a graph that is run as it stands (backend="eager") opens a scope of the thread."""
    context = _dynamo_compat.tracing_context()
    token = _C.scope_token(backend, strict, batch_invariant)
    if context is not None:
        context.__dict__.setdefault("flashsdpa_scopes", []).append(token)
    else:
        _run_time.__dict__.setdefault("previous", []).append(_C.swap_scope(token))


def pop():
    """Close the scope that the last push() opened."""
    context = _dynamo_compat.tracing_context()
    if context is not None:
        context.flashsdpa_scopes.pop()
    else:
        _C.swap_scope(_run_time.previous.pop())


@contextlib.contextmanager
def _scope(token):
    previous = _C.swap_scope(token)
    try:
        yield
    finally:
        _C.swap_scope(previous)


def answer(query, key, value, attn_mask, dropout_p):
    """The router's question: (backend, strict, batch_invariant, traced, reason) for these tensors. Backend 0 leaves the call to
    stock PyTorch, for the reason if there is one beside the selection; the answer is final about torch's own backend settings
    too. Not traced: plain tensors, and nothing to be answered."""
    inner = _dynamo_compat.innermost_dispatching((query, key, value, attn_mask))
    if inner is None:
        return STOCK, False, False, False, ""
    context = _dynamo_compat.tracing_context()
    in_graph = getattr(context, "flashsdpa_scopes", None)
    begun = None
    if not in_graph:
        begun = _compiled_selection(begin=True)
        _dynamo_compat.install_guard(__name__, "selector", "current")
    if context is not None:
        _dynamo_compat.set_cache_tag(f"{__version__} {auto_table.digest()} {selector.current}")
    with _scope(in_graph[-1]) if in_graph else contextlib.nullcontext():
        backend, strict, batch_invariant, _ = begun or _C.current_selection()
        reason = _C.stock_only() or refusal(*inner, dropout_p)
    if backend == STOCK or reason is None:
        return backend, strict, batch_invariant, True, ""
    if strict:
        raise RuntimeError(f"flashsdpa cannot serve this call and strict=True forbids the fallback to stock: {reason}")
    return STOCK, strict, batch_invariant, True, reason


def refusal(query, key, value, attn_mask, dropout_p):
    """Why tensors of these types, or this tracer, stay with stock PyTorch; None if they need not."""
    if torch.compiler.is_exporting() and not _export_routed.get():
        return "torch.export keeps PyTorch's own op; export inside torch_flashsdpa.route_in_export() to route"
    if any(map(_dtensor.is_dtensor, (query, key, value))):
        return _dtensor.refusal(query, key, value, attn_mask, dropout_p)
    named = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    for name, tensor in named.items():
        if tensor is not None and type(tensor) not in SERVED_TYPES:
            return f"{name} is a {type(tensor).__name__}; tensor subclasses are served by stock PyTorch"
    return None
