"""The mask plan of src/mask_plan.h, built with plain torch operations: what every planning kernel is compared with."""

import torch

GRANULE = 64
VERSION = 2
EMPTY, FULL, MIXED, BITS = 0, 1, 2, 3


def granule_classes(mask: torch.Tensor) -> torch.Tensor:
    """Class of each 64 x 64 granule.

    mask: (mb, mh, mq, mk), bool (True takes part) or a float bias; any strides.
    Returns int64 (mb, mh, ceil(mq / 64), ceil(mk / 64)) of EMPTY, FULL, MIXED, BITS. Only elements inside the mask count.
    """
    kept = _kept(mask)
    shifted = kept & (mask != 0) if mask.is_floating_point() else torch.zeros_like(kept)  # NaN shifts
    removed, kept, shifted = (_any_per_granule(flags) for flags in (~kept, kept, shifted))
    return torch.where(shifted, MIXED, torch.where(kept, torch.where(removed, BITS, FULL), EMPTY))


def reference_plan(mask: torch.Tensor) -> torch.Tensor:
    """The plan of mask (mb, mh, mq, mk): int32 (mb, mh, words) on mask's device, every word as src/mask_plan.h says."""
    classes = granule_classes(mask)
    counts = [chosen.sum(dim=(2, 3)) for chosen in (classes == EMPTY, classes == FULL, classes >= MIXED)]
    header = torch.stack([torch.full_like(counts[0], VERSION), *counts], dim=-1)
    lists = torch.cat([header, _lists(classes), _lists(classes.transpose(2, 3))], dim=-1)
    lists = torch.nn.functional.pad(lists, (0, -lists.shape[-1] % 4))
    return torch.cat([lists.to(torch.int32), _bits(_kept(mask))], dim=-1)


def _kept(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask != -torch.inf


def _bits(kept: torch.Tensor) -> torch.Tensor:
    """(mb, mh, mq, mk) bool to words (mb, mh, mq * words), four words for two granules of keys."""
    if kept.shape[-1] == 1:
        kept = kept.expand(*kept.shape[:-1], GRANULE)
    kept = torch.nn.functional.pad(kept, (0, -kept.shape[-1] % (2 * GRANULE))).unflatten(-1, (-1, 32))
    words = (kept.long() << torch.arange(32, device=kept.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).flatten(2)


def _any_per_granule(flags: torch.Tensor) -> torch.Tensor:
    for dim in (2, 3):
        pad = -flags.shape[dim] % GRANULE
        shape = list(flags.shape)
        shape[dim] = pad
        flags = torch.cat([flags, flags.new_zeros(shape)], dim=dim)
        flags = flags.unflatten(dim, (flags.shape[dim] // GRANULE, GRANULE)).any(dim=dim + 1)
    return flags


def _lists(classes: torch.Tensor) -> torch.Tensor:
    """Classes (mb, mh, lists, n) to words (mb, mh, lists * (1 + n)): a count, the non-empty entries, zeros."""
    n = classes.shape[-1]
    present = classes != EMPTY
    entries = torch.where(present, torch.arange(n, device=classes.device) << 2 | classes, 4 * n)  # 4n sorts last
    entries = entries.sort(dim=-1).values
    entries = torch.where(entries == 4 * n, 0, entries)
    return torch.cat([present.sum(-1, keepdim=True), entries], dim=-1).flatten(2)
