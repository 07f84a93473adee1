"""The mask plan of src/mask_plan.h, built with plain torch operations: what every planning kernel is compared with."""

import torch

GRANULE = 64
VERSION = 1
EMPTY, FULL, MIXED = 0, 1, 2


def granule_classes(mask: torch.Tensor) -> torch.Tensor:
    """Class of each 64 x 64 granule.

    mask: (mb, mh, mq, mk), bool (True takes part) or a float bias; any strides.
    Returns int64 (mb, mh, ceil(mq / 64), ceil(mk / 64)) of EMPTY, FULL, MIXED. Only elements inside the mask count.
    """
    if mask.dtype == torch.bool:
        kept, touched = mask, ~mask
    else:
        kept, touched = mask != -torch.inf, mask != 0  # a NaN is both, so its granule is mixed
    kept, touched = _any_per_granule(kept), _any_per_granule(touched)
    return torch.where(kept, torch.where(touched, MIXED, FULL), EMPTY)


def reference_plan(mask: torch.Tensor) -> torch.Tensor:
    """The plan of mask (mb, mh, mq, mk): int32 (mb, mh, words) on mask's device, every word as src/mask_plan.h says."""
    classes = granule_classes(mask)
    counts = [(classes == c).sum(dim=(2, 3)) for c in (EMPTY, FULL, MIXED)]
    header = torch.stack([torch.full_like(counts[0], VERSION), *counts], dim=-1)
    return torch.cat([header, _lists(classes), _lists(classes.transpose(2, 3))], dim=-1).to(torch.int32)


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
