"""Mask plans from a predicate on indices, for masks that nobody wants to write down (the format: src/mask_plan.h)."""

import functools

import torch

GRANULE = 64
WORD = 32  # bits of a word of the plan
VERSION = 2
EMPTY, FULL, BITS = 0, 1, 3


def plan_mask_fn(fn, batch, heads, seq_q, seq_k, *, device=None, compile=True):
    """The plan of the bool mask that a predicate describes, for the mask_plan argument of attention(), with no mask besides.

    Args:
        fn: fn(b, h, q, k) -> bool, True where query q of head h and batch b sees key k; the signature of FlexAttention's
            mask_mod. It gets integer tensors that broadcast against each other, and must act on each element alone.
        batch, heads: sizes of the mask; 1 or None where fn does not depend on the index, which then is 0.
        seq_q, seq_k: numbers of queries and keys.
        device: of the plan; None is the default device.
        compile: by torch.compile, so that no (seq_q, seq_k) tensor comes to be; False evaluates fn as it is.
    Returns:
        int32 (batch, heads, words): what plan_mask() returns for the mask written down.

    Raises TypeError for what is no predicate, ValueError for sizes below 0 (batch and heads: below 1).
    """
    _check(fn, batch, heads, seq_q, seq_k)
    make = _compiled() if compile else _make_plan
    index = torch.zeros((), dtype=torch.int64, device=device)
    if seq_q and seq_k:
        # Its answer to one position tells what a compiled graph, or a sum over broadcast axes, would not say clearly.
        answer = fn(index, index, index, index)
        kind = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else type(answer).__name__
        if kind not in ("torch.bool ()", "bool"):
            raise TypeError(f"fn(b, h, q, k) of one position each is {kind}; give one bool")
    return make(fn, batch or 1, heads or 1, seq_q, seq_k, index)


def _check(fn, batch, heads, seq_q, seq_k):
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; give a function fn(b, h, q, k) -> bool")
    sizes = {"batch": (batch, 1), "heads": (heads, 1), "seq_q": (seq_q, 0), "seq_k": (seq_k, 0)}
    for name, (size, least) in sizes.items():
        if size is None and least == 1:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
            raise TypeError(f"{name} is {size!r}; give a whole number of at least {least}")
        if size < least:
            raise ValueError(f"{name} is {size}; give at least {least}")


@functools.cache
def _compiled():
    return torch.compile(_make_plan, fullgraph=True)


def _make_plan(fn, batch, heads, seq_q, seq_k, index):
    """`index`: a 0-dimensional int64 tensor on the plan's device."""
    rows, cols = -(-seq_q // GRANULE), -(-seq_k // GRANULE)
    keep = _kept(fn, batch, heads, seq_q, seq_k, rows, cols, index)  # (batch, heads, rows, 64, words, 32)
    place = torch.arange(WORD, device=index.device)
    words = (keep.long() << place).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    bits = words.flatten(2, 3)[:, :, :seq_q].flatten(2)
    # Not by unflatten, which torch 2.11 cannot trace in a device context.
    in_words = keep.sum((3, 5)).view(batch, heads, rows, cols + cols % 2, GRANULE // WORD)
    kept = in_words.sum(-1)[..., :cols]  # in each granule
    inside = _inside(seq_q, rows, index)[:, None] * _inside(_width(seq_k), cols, index)
    classes = torch.where(kept == 0, EMPTY, torch.where(kept == inside, FULL, BITS))
    return torch.cat([_lists_of(classes), bits], -1)


def _kept(fn, batch, heads, seq_q, seq_k, rows, cols, index):
    b = torch.arange(batch, device=index.device).view(-1, 1, 1, 1, 1, 1)
    h = torch.arange(heads, device=index.device).view(-1, 1, 1, 1, 1)
    q = torch.arange(rows * GRANULE, device=index.device).view(rows, GRANULE, 1, 1)
    words = (cols + cols % 2) * (GRANULE // WORD)
    k = torch.arange(words * WORD, device=index.device).view(words, WORD)
    # Past the ends fn gets the last index: it may look something up.
    return fn(b, h, q.clamp(max=seq_q - 1), k.clamp(max=seq_k - 1)) & (q < seq_q) & (k < _width(seq_k)) & (b >= 0) & (h >= 0)


def _width(seq_k):
    """Of a row of bits: one key stands for 64, as it does for any number in a mask that broadcasts."""
    return GRANULE if seq_k == 1 else seq_k


def _inside(size, granules, index):
    """How many of each granule's 64 indices lie below `size`."""
    return (size - GRANULE * torch.arange(granules, device=index.device)).clamp(max=GRANULE)


def _lists_of(classes):
    """(batch, heads, rows, cols) of classes to the words before the bits: header, row lists, column lists, zeros."""
    counts = [chosen.sum((2, 3)) for chosen in (classes == EMPTY, classes == FULL, classes == BITS)]
    header = torch.stack([torch.full_like(counts[0], VERSION), *counts], -1)
    words = torch.cat([header, _entries(classes), _entries(classes.transpose(2, 3))], -1).to(torch.int32)
    return torch.nn.functional.pad(words, (0, -words.shape[-1] % 4))


def _entries(classes):
    """A list each: its count, index << 2 | class of all that are not empty in ascending order, zeros."""
    n = classes.shape[-1]
    past = 4 * n  # sorts last
    entries = torch.where(classes == EMPTY, past, torch.arange(n, device=classes.device) << 2 | classes).sort(-1).values
    count = (entries < past).sum(-1, keepdim=True)
    return torch.cat([count, torch.where(entries < past, entries, 0)], -1).flatten(2)
