"""DTensors: attention is independent for each batch and head, so shards of these two axes are served where they are,
without a collective. Everything else (lengths sharded as in context parallelism, partial sums, masks) is for PyTorch's
own rules. torch.distributed is never imported here: a DTensor in hand says that it is there.
"""

import sys

import torch

from . import _dynamo_compat

BATCH, HEADS = 0, 1  # axes of query (batch, heads, length, head_dim)
_registered = False


def is_dtensor(tensor):
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(tensor) is module.DTensor


def refusal(query, key, value, attn_mask, dropout_p):
    """Why a call with at least one DTensor stays with stock PyTorch; None if ours serves each rank's shards."""
    from torch.distributed.tensor import Shard

    named = {"query": query, "key": key, "value": value}
    plain = [name for name, tensor in named.items() if not is_dtensor(tensor)]
    if attn_mask is not None or plain:
        what = "attn_mask is given" if attn_mask is not None else f"{plain[0]} is none"
        return f"of DTensor inputs {what}; flashsdpa takes query, key, value that all are, without a mask"
    if dropout_p > 0.0:
        return "of DTensor inputs dropout_p is given; flashsdpa takes 0, as shards would drop the weights of others"
    if any(tensor.dim() != 4 for tensor in named.values()):
        return "DTensors of other than 4 dimensions, (batch, heads, length, head_dim), are served by stock PyTorch"
    for name, tensor in named.items():
        if tensor.device_mesh != query.device_mesh or tensor.placements != query.placements:
            return f"{name} is a DTensor placed as {_text(tensor)}, query as {_text(query)}; give one placement"
        for axis, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                continue
            # Not isinstance: a strided shard is a subclass whose pieces interleave.
            if type(placement) is not Shard or placement.dim not in (BATCH, HEADS):
                return (f"{name} is a DTensor placed as {_text(tensor)}; flashsdpa serves whole ones and shards of batch "
                        "(axis 0) or heads (axis 1), stock PyTorch the others")
            if tensor.shape[placement.dim] % _pieces(tensor, placement.dim):
                return f"{name} has {tensor.shape[placement.dim]} on axis {placement.dim}, unequal shards on mesh axis {axis}"
    if key.shape[BATCH] != query.shape[BATCH] or value.shape[BATCH] != query.shape[BATCH]:
        return "DTensors whose batch is broadcast are served by stock PyTorch"
    _register()
    return None


def _pieces(tensor, dim):
    """Into how many shards the whole mesh cuts an axis."""
    pieces = 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard(dim):
            pieces *= tensor.device_mesh.size(axis)
    return pieces


def _text(tensor):
    return "(" + ", ".join(map(str, tensor.placements)) + ")"


def _register():
    """Tell DTensor what our ops do with shards, along one axis of a mesh: keep them, if all tensors have them."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor import Replicate, Shard

    placements = Replicate(), Shard(BATCH), Shard(HEADS)  # lse is (batch, heads, length): the same axes

    def forward(query, key, value, **options):
        return [([p] * 2, [p] * 3) for p in placements]

    def backward(grad_out, grad_lse, *saved, output_mask, **options):
        # A gradient that nobody wants is empty, and so is whole everywhere.
        given = (grad_out is not None) + (grad_lse is not None) + len(saved)
        return [([p if wanted else Replicate() for wanted in output_mask], [p] * given) for p in placements]

    _dynamo_compat.register_sharding(torch.ops.flashsdpa.forward.default, forward)
    _dynamo_compat.register_sharding(torch.ops.flashsdpa.backward.default, backward, "output_mask")
    _registered = True
