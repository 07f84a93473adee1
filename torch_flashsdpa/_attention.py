"""The explicit functions: attention() with our extras, plans made ahead of time, and the merging of partial results."""

import torch

from ._dynamo_compat import in_transform
from ._inputs import check_flags, check_numbers, check_tensors
from ._loader import binding


def attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    window=(-1, -1),
    bottom_right=False,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    mask_plan=None,
    deterministic=None,
    batch_invariant=False,
):
    """scaled_dot_product_attention by our kernels, whatever is selected for F.scaled_dot_product_attention.

    Args:
        query: (..., heads_q, seq_q, dim), float32, bfloat16, float16 or float64; any leading axes, or none.
        key: (..., heads_kv, seq_k, dim); value: (..., heads_kv, seq_k, dim_v), both of query's dtype and device.
        attn_mask: broadcastable to (..., heads_q, seq_q, seq_k); bool, where True takes part, or additive in float32 or
            query's dtype. Its gradient is computed where it requires one.
        dropout_p: the share of the weights that are dropped behind the softmax, 0 to 1, in steps of 2^-16 (one that rounds to 0 is none);
            the others are divided by 1 - dropout_p. Which ones follows from torch's generator of the device, which goes on.
        is_causal, scale, enable_gqa: as in SDPA. is_causal is top-left aligned.
        window: (left, right), in keys: key j is seen by query i when i - left <= j <= i + right; -1 is open.
        bottom_right: align is_causal, window and alibi_slopes to the last key instead of the first, an offset of seq_k - seq_q.
        softcap: scaled scores become softcap * tanh(score / softcap), before slopes and masks; 0 for none.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32, without a gradient: -slope * |i + offset - j| is added to the score
            of query i and key j, the offset being 0, or bottom_right's.
        sinks: (heads_q,) float32, one logit per head that takes weight in every row and gives no value. With a gradient.
        return_lse: also return the log-sum-exp of the final scores, that of the sink among them, with a gradient.
        mask_plan: plan_mask(attn_mask), to plan a mask once for many calls; or, without attn_mask, the plan of a bool mask,
            which says all of it. It has the sizes of attn_mask as given. Its sizes are checked; that it is of this mask
            is taken on trust.
        deterministic: bitwise equal gradients in every run; None asks torch.are_deterministic_algorithms_enabled().
        batch_invariant: out, lse and the gradients of query, key and value of a sequence have the same bits alone and at any
            place of any batch, given the same seq_q, seq_k and mask, and as many threads.

    Returns:
        out (..., heads_q, seq_q, dim_v), in query's layout and dtype; with return_lse also lse (..., heads_q, seq_q),
        float32 natural logarithm (float64 for float64 inputs), -inf for a row without an allowed key (or its sink).

    Differentiable any number of times, in reverse and forward mode, and by all transforms of torch.func; second derivatives and
    tangents need attn_mask itself, not its plan alone.

    Raises RuntimeError, naming every argument that our kernels do not take, and where the compiled binding is missing;
    TypeError for an argument of the wrong type.
    """
    binding()  # the ops exist once it is loaded
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    ops = torch.ops.flashsdpa
    check_tensors(query=query, key=key, value=value)
    check_tensors(optional=True, attn_mask=attn_mask, mask_plan=mask_plan, alibi_slopes=alibi_slopes, sinks=sinks)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa, bottom_right=bottom_right, return_lse=return_lse,
                deterministic=deterministic, batch_invariant=batch_invariant)
    check_numbers(dropout_p=dropout_p, softcap=softcap, scale=1.0 if scale is None else scale)
    pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not pair or any(side is None or isinstance(side, (float, str)) for side in window):
        raise TypeError(f"window is {window!r}; give (left, right), two numbers of keys, -1 for no limit")
    lead = _check_ranks(query, key, value)
    if key.dim() > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise RuntimeError(
            f"query has {query.shape[-3]} heads, key {key.shape[-3]}; give equal counts, or enable_gqa=True and a multiple"
        )
    if attn_mask is not None and attn_mask.dim() > query.dim():
        raise RuntimeError(f"attn_mask has {attn_mask.dim()} axes, query {query.dim()}; give at most the query's")
    mask = None if attn_mask is None else _mask_to_4d(attn_mask, lead)
    q, k, v = _to_4d(query), _to_4d(key), _to_4d(value)
    if mask is not None and mask_plan is None:
        scores = (*q.shape[:3], k.shape[2])
        mask = _unexpanded(mask, scores)
        if _pays_to_plan(query, key) and _fits(mask, scores, query.dtype):
            mask_plan = ops.mask_plan(mask.detach())
    out, lse = ops.forward(
        q,
        k,
        v,
        attn_mask=mask,
        mask_plan=mask_plan,
        rng_state=ops.rng_state(device=query.device) if dropout_p > 0.0 else None,
        dropout_p=dropout_p,
        is_causal=is_causal,
        bottom_right=bottom_right,
        scale=scale,
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
    )
    if query.dim() != 4:
        # Views only where a backward must notice that they are edited: those made under no_grad() may not be, outside of it.
        reshape = torch.reshape if out.requires_grad or in_transform() else torch.ops.aten._unsafe_view
        out = reshape(out, (*query.shape[:-1], value.shape[-1]))
        lse = reshape(lse, query.shape[:-1])
    return (out, lse) if return_lse else out


def plan_mask(attn_mask):
    """Classify every 64 x 64 granule of a mask as empty, full or mixed, for the mask_plan argument of attention().

    Args:
        attn_mask: (..., seq_q|1, seq_k|1) with up to 4 axes, as given to attention(); it must not change afterwards. An axis
            that broadcasts is cheap as size 1, and planned in full where it is expanded.
    Returns:
        An opaque int32 tensor on the mask's device. Raises RuntimeError for a mask that cannot be planned, and where the
        compiled binding is missing.
    """
    binding()
    check_tensors(attn_mask=attn_mask)
    if attn_mask.dim() > 4:
        raise RuntimeError(f"attn_mask has {attn_mask.dim()} axes; plan_mask takes up to 4: (batch, heads, seq_q, seq_k)")
    return torch.ops.flashsdpa.mask_plan(_mask_to_4d(attn_mask.detach(), ()))


def merge_partials(out1, lse1, out2, lse2):
    """Merge attention over two disjoint sets of keys into attention over both.

    Args:
        out1, out2: (..., seq_q, dim_v), normalized within their own keys; lse1, lse2: (..., seq_q), natural logarithm. Sinks
            belong to one of the two.
    Returns:
        (out, lse) in the dtypes of out1 and lse1. An empty partial (lse -inf) leaves the other as it is, bit for bit.
    """
    check_tensors(out1=out1, lse1=lse1, out2=out2, lse2=lse2)
    if out1.shape != out2.shape or not out1.shape[:-1] == lse1.shape == lse2.shape:
        shapes = ", ".join(str(tuple(t.shape)) for t in (out1, lse1, out2, lse2))
        raise RuntimeError(f"out1, lse1, out2, lse2 are {shapes}; give outs of one shape, and lses of it without the last axis")
    top = torch.maximum(lse1, lse2).detach()  # cancels out
    empty = top == -torch.inf  # both
    base = torch.where(empty, 0.0, top)
    weight1, weight2 = torch.exp(lse1 - base), torch.exp(lse2 - base)
    total = torch.where(empty, 1.0, weight1 + weight2)  # no 0 / 0: where() hides a nan, not that of its gradient
    share1, share2 = ((w / total).unsqueeze(-1) for w in (weight1, weight2))
    out = out1.to(lse1.dtype) * share1 + out2.to(lse1.dtype) * share2
    return out.to(out1.dtype), torch.where(empty, -torch.inf, base + torch.log(total))


def _check_ranks(query, key, value):
    """The leading axes before (heads, length, head_dim), which are the same in all three."""
    ranks = query.dim(), key.dim(), value.dim()
    if min(ranks) < 2 or len(set(ranks)) > 1:
        raise RuntimeError(
            f"query, key, value have {ranks[0]}, {ranks[1]}, {ranks[2]} axes; give equal counts, at least 2: "
            "(..., heads, length, head_dim)"
        )
    lead = query.shape[:-3]
    # With one leading axis the op compares them. Several become one there, in which (2, 3) would pass for (3, 2).
    if len(lead) > 1 and not lead == key.shape[:-3] == value.shape[:-3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise RuntimeError(f"query, key, value are {shapes}: batch sizes differ; give equal ones")
    return lead


def _to_4d(tensor):
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4)


def _mask_to_4d(mask, lead):
    """`lead`: the query's leading axes; where they are several, the mask gets them all, or none."""
    if mask.dim() < 4:
        return mask[(None,) * (4 - mask.dim())]
    if mask.dim() == 4 and len(lead) < 2:
        return mask
    own = mask.shape[:-3]
    if all(size == 1 for size in own):
        return mask.flatten(0, -4)
    if any(size not in (1, whole) for size, whole in zip(own, lead[len(lead) - len(own):])):
        raise RuntimeError(f"attn_mask {tuple(mask.shape)} does not broadcast to the query's leading axes {tuple(lead)}")
    return mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)


def _unexpanded(mask, scores):
    """`mask` with size 1 on axes that are expanded to the size of the scores, so that its plan is not. As it is where its
    gradient is wanted, or may be by an outer transform of torch.func, which does not show here."""
    if mask.requires_grad or (mask.is_floating_point() and in_transform()):
        return mask
    for axis, size in enumerate(scores):
        if mask.stride(axis) == 0 and mask.shape[axis] == size and size > 1:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _fits(mask, scores, dtype):
    """Whether the op will take the mask for scores of this size and a query of this dtype; one that it refuses is not
    planned, since a refusal comes before any work."""
    return mask.dtype in (torch.bool, torch.float32, dtype) and all(m in (1, n) for m, n in zip(mask.shape, scores))


def _pays_to_plan(query, key):
    # The router's rule: with one granule of scores there is nothing to skip.
    return query.shape[-2] > 64 or key.shape[-2] > 64
