"""Faster scaled_dot_product_attention for PyTorch, without a change to the calling code.

Importing this package activates nothing and loads no compiled code; every name below is loaded when it is first used.

    import torch_flashsdpa
    torch_flashsdpa.enable()                 # F.scaled_dot_product_attention is now served where it pays
    print(torch_flashsdpa.explain(q, k, v))  # which kernel, and why not the others
"""

import importlib as _importlib

__version__ = "0.1.0"

# Public name -> the module that defines it. No module here may bear a public name: importing it would hide the function.
_PUBLIC = {
    "enable": "selection",
    "disable": "selection",
    "sdpa_backend": "selection",
    "is_enabled": "selection",
    "status": "selection",
    "route_in_export": "selection",
    "attention": "_attention",
    "plan_mask": "_attention",
    "plan_mask_fn": "_mask_plan",
    "merge_partials": "_attention",
    "explain": "report",
    "Explanation": "report",
    "record_dispatch": "report",
    "routed_calls": "report",
    "reset_routed_calls": "report",
    "doctor": "_doctor",
    "profile": "profiling",
}
_MODULES = ("profiler", "selection", "report", "flops", "integrations")

__all__ = sorted([*_PUBLIC, "integrations", "profiler"])


def __getattr__(name):
    if name in _PUBLIC:
        value = getattr(_importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        globals()[name] = value  # the next access does not come here
        return value
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_PUBLIC, *_MODULES})


class _RegistryHandle:
    """What torch's flash-attention registry keeps while "flashsdpa" is its active implementation."""

    def __init__(self, undo):
        self._undo = undo

    def remove(self):
        """Restore the selection that was in force before activation; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def _activate_from_registry():
    from . import selection

    undo = selection.restore_point()
    selection.enable()
    return _RegistryHandle(undo)


def _register():
    """Make torch.nn.attention.activate_flash_attention_impl("flashsdpa") known, where torch has that registry."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except Exception:  # no torch, or a torch without the registry: the import of this package must not fail for it
        return
    register_flash_attention_impl("flashsdpa", register_fn=_activate_from_registry)


_register()
