"""FLOP formulas of our ops, equal to torch's own counts for scaled_dot_product_attention."""


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
    """Make torch.utils.flop_counter.FlopCounterMode count our ops. A second call does nothing."""
    import torch
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    ops = torch.ops.flashsdpa
    for op, formula in ((ops.forward, _forward), (ops.backward, _backward), (ops.jvp, _jvp)):
        if op not in flop_registry:
            register_flop_formula(op)(formula)
