"""Which implementation serves scaled_dot_product_attention: a default of the process, and scopes of a thread.

The C++ router reads both without Python. Compiled functions are guarded on the selection that they were traced under
(see _hook.py), so a toggle is noticed by code that was compiled before it.
"""

import contextlib
import threading
import warnings

import torch

from . import _dynamo_compat, _hook, _loader
from ._hook import route_in_export
from ._inputs import check_flags

__all__ = ["enable", "disable", "sdpa_backend", "is_enabled", "status", "route_in_export", "restore_point"]

NAMES = ("stock", "flashsdpa", "auto")  # the index is the number that the router knows
_lock = threading.RLock()
_reset_due = False  # the router came in while a function was being compiled


def number(backend):
    """The router's number for a backend's name; ValueError for an unknown one."""
    try:
        return NAMES.index(backend)
    except ValueError:
        raise ValueError(f"backend is {backend!r}; choose one of {', '.join(map(repr, NAMES))}") from None


def _library_or_warn(strict, stacklevel):
    """torch_flashsdpa._C, or None with a warning: a missing binding leaves SDPA stock. In strict mode it is an error."""
    library = _loader.load()
    if library.module is None:
        text = f"torch_flashsdpa: {library.problem}; scaled_dot_product_attention stays stock"
        if strict:
            raise RuntimeError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)
    return library.module


def _install(_C, tracing=False):
    """Put the router in place. Functions compiled before it carry no guard on our selection, so they are dropped; while
    Dynamo is at work on this thread (tracing) that waits for the next call."""
    global _reset_due
    with _lock:
        if not _C.router_installed():
            _C.install_router()
            _reset_due = True
        if _reset_due and not tracing:
            _reset_due = False
            _dynamo_compat.drop_compiled_code()


def _set_default(_C, *selection):
    with _lock:
        changed = _C.get_default() != selection
        _C.set_default(*selection)
    if changed and not _dynamo_compat.can_guard():
        _dynamo_compat.drop_compiled_code()


def enable(backend="auto", strict=False, batch_invariant=False):
    """Serve F.scaled_dot_product_attention with our kernels, in the whole process.

    Args:
        backend: "auto" serves the calls that our kernels support and that were measured faster than stock PyTorch,
            "flashsdpa" all calls that they support, "stock" none.
        strict: raise an error that lists every reason where a call would otherwise go to stock PyTorch because our
            kernels do not support it.
        batch_invariant: where ours serve, a sequence's output, log-sum-exp and gradients of query, key and value have the same
            bits alone and at any place of any batch, given the same lengths, the same mask and as many threads. "auto"
            then takes every supported call. Stock PyTorch promises nothing: add strict=True to be told of its calls.

    Where the compiled binding is missing or does not fit the installed torch this warns, in one line, and SDPA stays
    stock (strict: RuntimeError). Raises ValueError for an unknown backend, TypeError for a flag that is no bool.
    Every caller is served from then on, code that was compiled earlier too. A thread's sdpa_backend() scope has precedence.
    """
    chosen = number(backend)
    check_flags(strict=strict, batch_invariant=batch_invariant)
    _C = _library_or_warn(strict and chosen, stacklevel=3)
    if _C is None:
        return
    if chosen:
        _install(_C)
    _set_default(_C, chosen, bool(strict), bool(batch_invariant))


def disable():
    """Undo enable(): from now on stock PyTorch serves outside of sdpa_backend() scopes.

    torch's own kernel is put back into the dispatcher unless code may have been compiled; then the router stays,
    answers "stock", and compiled functions keep what they compiled for both selections.
    """
    _C = _loader.load().module
    if _C is None:
        return
    with _lock:
        _set_default(_C, 0, False, False)
        _remove_if_unused(_C)


def _remove_if_unused(_C):
    """Take the router out of the dispatcher where no default, scope or compiled code can need it."""
    unused = _C.get_default()[0] == 0 and not _open_scopes and not _dynamo_compat.dynamo_loaded()
    if unused and _C.router_installed():
        _C.remove_router()


@contextlib.contextmanager
def router_in_place():
    """The router stays in the dispatcher in the block whatever is selected, so that stock's calls are seen too. Counts as an
    open scope. Raises RuntimeError without the binding."""
    _C = _loader.binding()
    _install(_C)
    _open_scopes.append(None)
    try:
        yield
    finally:
        _open_scopes.pop()
        with _lock:
            _remove_if_unused(_C)


def restore_point():
    """A function that brings back the process's selection of this moment."""
    _C = _loader.load().module
    backend, *flags = _C.get_default() if _C is not None else (0,)

    def restore():
        if backend:
            enable(NAMES[backend], *flags)
        else:
            disable()

    return restore


# Scopes open now, over all threads. A list used as a counter: append and pop are atomic.
_open_scopes = []


@_dynamo_compat.constant_for_dynamo
def _prepare_graph_scopes():
    """Run by Dynamo when it meets sdpa_backend() inside a function that it compiles."""
    _dynamo_compat.allow_in_graph(_hook.push, _hook.pop)
    _C = _loader.load().module
    if _C is not None:
        _install(_C, tracing=True)
    return _C is not None


@contextlib.contextmanager
def sdpa_backend(backend, strict=False, batch_invariant=False):
    """Select who serves scaled_dot_product_attention inside a `with` block or a decorated function, on this thread.

    Args:
        backend, strict, batch_invariant: as for enable().

    Nests, is undone on exceptions, works inside and outside functions given to torch.compile, and holds for a
    backward() called inside it. An inner sdpa_backend() has precedence over torch.nn.attention.sdpa_kernel outside it.
    A checkpoint whose forward ran inside and whose backward runs outside recomputes with the outer selection; torch
    raises CheckpointError if that differs.
    """
    chosen = number(backend)
    check_flags(strict=strict, batch_invariant=batch_invariant)
    if torch.compiler.is_dynamo_compiling():
        if not _prepare_graph_scopes():
            yield
            return
        _hook.push(chosen, strict, batch_invariant)
        try:
            yield
        finally:
            _hook.pop()
        return
    _C = _library_or_warn(strict and chosen, stacklevel=4)
    if _C is None:
        yield
        return
    if chosen and (_reset_due or not _C.router_installed()):
        _install(_C)
    _open_scopes.append(None)
    previous = _C.swap_scope(_C.scope_token(chosen, bool(strict), bool(batch_invariant)))
    try:
        yield
    finally:
        _C.swap_scope(previous)
        _open_scopes.pop()


def is_enabled():
    """Whether a call of F.scaled_dot_product_attention on this thread may be served by our kernels now."""
    _C = _loader.load().module
    return _C is not None and _C.router_installed() and _C.current_selection()[0] != 0


def describe(now):
    """status() in a few words."""
    flags = [text for text, on in (("strict", now["strict"]), ("batch invariant", now["batch_invariant"])) if on]
    where = "scope of this thread" if now["scoped"] else "default of the process"
    return f"{now['backend']}{' (' + ', '.join(flags) + ')' if flags else ''}, {where}"


def status():
    """How things stand on this thread, as a dict.

    enabled (bool); backend, strict and batch_invariant in force; default, default_strict and default_batch_invariant of the
    process; scoped (bool: a scope decides); router (bool: in the dispatcher); stock_only (why torch's own backend choice leaves calls to stock now, or
    None); problem (why there is no binding, or None); dispatch ({dispatch key: registration} of
    aten::scaled_dot_product_attention, to see who else overrides it).
    """
    library = _loader.load()
    _C = library.module
    result = {"enabled": is_enabled(), "problem": library.problem}
    backend, strict, batch_invariant, scoped = _C.current_selection() if _C else (0, False, False, False)
    default, default_strict, default_batch_invariant = _C.get_default() if _C else (0, False, False)
    return result | {
        "backend": NAMES[backend],
        "strict": strict,
        "batch_invariant": batch_invariant,
        "scoped": scoped,
        "default": NAMES[default],
        "default_strict": default_strict,
        "default_batch_invariant": default_batch_invariant,
        "router": bool(_C and _C.router_installed()),
        "stock_only": _C.stock_only() if _C else None,
        "dispatch": _dynamo_compat.dispatch_kernels(),
    }
