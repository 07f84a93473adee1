"""scaled_dot_product_attention as documented, written out, in any dtype: what implementations are checked against. Not torch's math
path, since sdpa_kernel() chooses a backend for the whole process."""

import torch


def heads_as(query, tensor):
    """key or value (..., heads_kv, length, columns) with the query's heads."""
    if query.dim() < 3 or tensor.shape[-3] == query.shape[-3]:
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)


def scores(query, key, attn_mask=None, is_causal=False, scale=None):
    """(..., heads, seq_q, seq_k), -inf where the call takes a score out."""
    x = query @ heads_as(query, key).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
    if attn_mask is None:
        return x
    return x.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else x + attn_mask


def weights(query, key, **options):
    """The softmax of scores(). A row without a key has weights of 0, and gives gradients of 0."""
    x = scores(query, key, **options)
    some = (x > -torch.inf).any(-1, keepdim=True)
    return torch.softmax(x.where(some, 0.0), -1).where(some, 0.0)


def attention(query, key, value, factor=None, **options):
    """The output. factor: of the weights, by dropout."""
    p = weights(query, key, **options)
    return (p if factor is None else p * factor.to(p.dtype)) @ heads_as(query, value)
