"""FLOP formulas of our ops, equal to torch's own counts for scaled_dot_product_attention.

torch's counter imports triton, 150 ms where it is installed, and most programs never count. So the formulas are registered
when a program imports it, by a finder on sys.meta_path, which costs any other import one comparison.
"""

import sys

_COUNTER = "torch.utils.flop_counter"


def _forward(query, key, value, *args, out_shape=None, **kwargs):
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(query, _with_heads(key, query), _with_heads(value, query))


def _backward(grad_out, grad_lse, query, key, value, out, *args, out_shape=None, **kwargs):
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return sdpa_backward_flop_count(out, query, _with_heads(key, query), _with_heads(value, query))


def _jvp(grad_out, grad_lse, query, key, value, out, lse, *tangents, out_shape=None, **kwargs):
    # A tangent of the forward: q k^T, q' k^T, q k'^T, P' v, P v'. Of the backward besides: G v^T, G' v^T, G v'^T, and two
    # products for each of dq', dk', dv'. Those of directions that are not given count too.
    from torch.utils.flop_counter import sdpa_flop_count

    whole = sdpa_flop_count(query, _with_heads(key, query), _with_heads(value, query))  # two products
    return whole * 5 // 2 if grad_out is None and grad_lse is None else whole * 7


def _with_heads(shape, query):
    # Grouped heads do the work of query's heads; older torch counts equal heads only.
    return (shape[0], query[1], *shape[2:])


def register():
    """Make torch.utils.flop_counter.FlopCounterMode count our ops, from its import on. A second call does nothing."""
    # By name: of a package that is imported a second time the first import's finder serves on; two would ask each other for ever.
    if not any((type(finder).__module__, type(finder).__name__) == (__name__, "_Finder") for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if _COUNTER in sys.modules:
        _register_now()


def _register_now():
    import torch
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    ops = torch.ops.flashsdpa
    for op, formula in ((ops.forward, _forward), (ops.backward, _backward), (ops.jvp, _jvp)):
        if op not in flop_registry:
            register_flop_formula(op)(formula)


class _Finder:
    """Finds torch's counter as the finders behind it do. It stays on sys.meta_path: to take it out while another thread
    goes through that list would make that thread skip a finder."""

    def find_spec(self, name, path=None, target=None):
        if name != _COUNTER:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """The loader of torch's counter, which registers the formulas behind it and is not seen in the module."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register_now()
