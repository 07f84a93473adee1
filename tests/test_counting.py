"""The exact oracle: every (query, key) pair that took part, forward and backward, for every mask, band and tile edge."""

import itertools

import pytest
import torch
from cases import BANDS, FLOATS, LENGTHS, MASK_KINDS, MASK_STRIDES, SEQS, dtype_name, make_mask
from oracle import INF, Call, check_counting

DTYPES = itertools.cycle(FLOATS)


def count(name, dtype, heads=(2, 2), seq=(130, 200), dim=128, batch=1, mask="", call=Call(), additive=False, **options):
    tensor = None
    if mask:
        tensor = make_mask(mask, name, (batch, heads[0], *seq), dtype)
        if additive:  # the same pairs, written as 0 and -inf
            tensor = torch.zeros(tensor.shape, dtype=dtype).masked_fill_(~tensor, -INF)
    check_counting(batch, *heads, *seq, dim, dtype, tensor, call, **options)


@pytest.mark.parametrize("seq, dtype", [(s, next(DTYPES)) for s in SEQS], ids=lambda v: str(v).replace("torch.", ""))
@pytest.mark.parametrize("band", BANDS)
def test_bands(band, seq, dtype):
    count(f"{band}{seq}", dtype, seq=seq, call=BANDS[band])


@pytest.mark.parametrize("seq_k, dtype", [(n, next(DTYPES)) for n in LENGTHS], ids=lambda v: str(v).replace("torch.", ""))
@pytest.mark.parametrize("seq_q", LENGTHS)
def test_tile_edges(seq_q, seq_k, dtype):
    """Every pair of lengths, with the whole row visible: a lost tail key or query shows here."""
    count("edges", dtype, heads=(1, 1), seq=(seq_q, seq_k), dim=256 if seq_k > 128 else 128)


@pytest.mark.parametrize("planned", (False, True), ids=("unplanned", "planned"))
@pytest.mark.parametrize("additive", (False, True), ids=("bool", "additive"))
@pytest.mark.parametrize("kind", ["random", "causal", "padding", "padding_left", "prefix_lm", "checkerboard", "window", "document",
                                  "rows_false", "granules", "one_key", "single_true", "all_true", "all_false"])
def test_masks(kind, additive, planned):
    for dtype, band in ((torch.float32, "full"), (next(DTYPES), "causal_br")):
        count(f"{kind}{additive}", dtype, batch=2, seq=(130, 257), mask=kind, additive=additive, planned=planned,
              call=BANDS[band])


@pytest.mark.parametrize("strides", [*MASK_STRIDES, "expanded"])
@pytest.mark.parametrize("axes", ("qk", "k", "q", "hk", "bq", "bhqk", "-"))
def test_mask_layouts(axes, strides):
    kind = "granules" if "q" in axes and "k" in axes else "random"
    for planned in (False, True):
        count(f"{axes}{strides}", torch.float32, heads=(4, 2), batch=2, seq=(70, 131), mask=f"{kind}:{axes}:{strides}",
              planned=planned)


@pytest.mark.parametrize("heads", ((2, 1), (4, 1), (8, 2), (7, 1), (6, 3), (14, 2)), ids=str)
@pytest.mark.parametrize("mask", ("", "random:hqk"), ids=("dense", "mask"))
def test_grouped_heads(heads, mask):
    """Each kv head has its own weight in V: the wrong one gives another number."""
    for dtype in (torch.float32, torch.bfloat16):
        count("gqa", dtype, heads=heads, seq=(66, 130), mask=mask, call=Call(is_causal=not mask))


@pytest.mark.parametrize("seq", ((1, 8192), (1, 8191), (1, 4097), (2, 1025), (4, 513), (16, 2049), (3, 64)), ids=str)
@pytest.mark.parametrize("mask", ("", "random:bk", "granules:bk", "one_key:hk"))
def test_decode(seq, mask):
    """Keys split over workers: none lost, none twice, at any split."""
    for planned in (False, True) if mask else (False,):
        count(f"decode{seq}", torch.float32, heads=(4, 1), seq=seq, dim=256, mask=mask, backward=False, planned=planned,
              call=BANDS["causal_br"] if seq[0] > 1 else Call())


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_decode_at_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seq_k in (1, 65, 700, 1000, 4099):
            count(f"threads{seq_k}", torch.bfloat16, heads=(2, 1), seq=(1, seq_k), dim=256, backward=False)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dim", (16, 40, 64, 72, 96, 200, 256))
def test_head_dims(dim):
    """Each head-dim class has its own tile code."""
    for dtype in FLOATS:
        count(f"dim{dim}", dtype, heads=(1, 1), seq=(65, 70), dim=dim, mask="rows_false", call=Call(is_causal=True))


@pytest.mark.parametrize("shift", (0, 1, 63, 64, 65, 127, 128))
def test_bands_shifted_against_the_grid(shift):
    """A narrow window whose edges cross the tile grid at every offset, top-left and bottom-right."""
    for bottom_right in (False, True):
        call = Call(window=(shift, 1), bottom_right=bottom_right)
        count(f"shift{shift}", torch.float32, heads=(1, 1), seq=(129, 129 + shift), call=call)
        count(f"shift{shift}", torch.float32, heads=(1, 1), seq=(129 + shift, 129), call=call)


def test_every_kind_of_pure_mask_is_counted():
    """The list of test_masks holds all recipes that only keep or remove."""
    pure = {k for k, make in MASK_KINDS.items() if make(torch.Generator(), (1, 1, 4, 4), torch.float32).dtype == torch.bool}
    listed = test_masks.pytestmark[0].args[1]
    assert pure == set(listed), (pure, dtype_name(torch.bool))
