"""The Hopper forward for few queries without a GPU: packed heads, split keys and the kernel that sums the parts, on the emulator.

A `way` is (consumers of the tile, heads packed, splits). The plan alone would hardly split such short keys.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import BANDS, Case, inputs
from oracle import Call, Inputs, check, check_counting, generator
from test_emulated_forward import HALVES, emulator, forward, pytestmark, runner  # noqa: F401

DIMS = ((64, 64), (40, 64), (70, 33), (128, 128), (192, 128), (256, 256), (1, 200))
HEADS = ((2, 2), (8, 2), (6, 2), (7, 1), (5, 1), (20, 1))  # groups of 1, 4, 3, 7, 5, 20


def hold(forward, name, heads, lengths, dims, way, band="full", dtype=torch.bfloat16, batch=1, layout=("bhs",) * 3, **options):
    call = BANDS[band] if isinstance(band, str) else band
    case = Case(f"{name}-{heads}-{lengths}-{dims}-{way}-{band}", batch, heads, lengths, dims, dtype, call=call, layout=layout, grad="")
    check(inputs(case), case.call, runner(forward, way=way, **options))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("consumers", (1, 2))
def test_dims(forward, dims, consumers):
    for band, heads, dtype in zip(("full", "causal", "causal_br"), ((2, 2), (8, 2), (6, 2)), itertools.cycle(HALVES)):
        pack = heads[0] // heads[1]
        hold(forward, "dims", heads, (5, 700), dims, (consumers, pack, 3), band, dtype)
        hold(forward, "dims", heads, (40, 300), dims, (consumers, pack, 1), band, dtype)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packs(forward, heads):
    """Packs that fill the rows and packs that leave some unused; several tiles of a head; the last pack not full."""
    group = heads[0] // heads[1]
    for seq_q, splits in ((1, 3), (9, 1), (17, 2), (65, 1)):
        for pack in sorted({group, (group + 1) // 2}):
            hold(forward, "packs", heads, (seq_q, 260), (64, 64), (1, pack, splits), "causal_br")


@pytest.mark.parametrize("band", BANDS)
def test_bands(forward, band):
    """Parts without a key, rows without a key in a part, tiles with fewer key blocks than splits."""
    hold(forward, "bands", (4, 2), (70, 500), (64, 64), (1, 2, 3), band)
    hold(forward, "bands", (2, 1), (200, 150), (128, 128), (2, 1, 4), band)


@pytest.mark.parametrize("splits", (2, 8, 9, 31, 33, 128))
def test_many_splits(forward, splits):
    """All ways in which warps of the second kernel share a row."""
    hold(forward, "splits", (2, 1), (3, 64 * splits + 5), (128, 130), (1, 2, splits))


@pytest.mark.parametrize("layout", ("bsh", "packed", "offset", "expand_batch", "expand_heads", "expand_seq"))
def test_layouts(forward, layout):
    for layouts in ((layout,) * 3, (layout, "bhs", "bhs"), ("bsh", layout, "bhs")):
        hold(forward, "layouts", (6, 2), (30, 200), (64, 64), (1, 3, 2), "causal_br", batch=2, layout=layouts)
        hold(forward, "layouts", (6, 2), (30, 200), (64, 64), (1, 3, 1), "causal_br", batch=2, layout=layouts, odd=layout == "offset")


@pytest.mark.parametrize("dynamic", (True, False), ids=("counter", "in turn"))
def test_many_pieces(forward, dynamic):
    """Each block runs through several pieces of work, of one tile and of several."""
    for dims, consumers, splits, band in (((64, 64), 1, 2, "full"), ((128, 128), 2, 3, "causal"), ((256, 256), 2, 2, "causal_br"),
                                          ((256, 256), 1, 1, "full")):  # fmt: skip
        hold(forward, "pieces", (6, 2), (70, 300), dims, (consumers, 3, splits), band, dynamic=dynamic)


@pytest.mark.parametrize("scale", (-0.5, 0.0, 3.0))
def test_scales(forward, scale):
    hold(forward, f"scale{scale}", (4, 2), (10, 500), (64, 64), (1, 2, 3), replace(BANDS["causal_br"], scale=scale), torch.float16)


@pytest.mark.parametrize("magnitude", (1.0, 133120.0, 1e18))
def test_equal_scores_of_any_magnitude_weigh_the_same(forward, magnitude):
    q, k = (torch.full((1, 1, rows, 64), magnitude, dtype=torch.bfloat16) for rows in (3, 900))
    v = torch.randn(1, 1, 900, 64, generator=generator("equal")).bfloat16()
    out, lse = forward(q, k, v, **Call().op_arguments(), way=(1, 1, 3))  # parts of different lengths
    assert (out.float() - v.float().mean(2, keepdim=True)).abs().max() < 1e-2
    assert lse.isfinite().all()


@pytest.mark.parametrize("order", (1, -1))
def test_maximum_in_the_first_and_in_the_last_part(forward, order):
    q = torch.ones(1, 1, 7, 64, dtype=torch.bfloat16)
    k = (order * torch.linspace(-2, 2, 1000)[:, None] * torch.ones(64)).bfloat16()[None, None]
    v = torch.randn(1, 1, 1000, 64, generator=generator("rise")).bfloat16()
    check(Inputs(q, k, v), run=runner(forward, way=(1, 1, 4)))


def test_nan_and_inf_stay_where_they_are(forward):
    q, k, v = (torch.randn(1, heads, rows, 64, generator=generator(f"nan{rows}")).bfloat16() for heads, rows in ((4, 8), (2, 600), (2, 600)))
    way = (1, 2, 3)
    clean, clean_lse = forward(q, k, v, **Call().op_arguments(), way=way)
    bad_q, bad_k, bad_v = q.clone(), k.clone(), v.clone()
    bad_q[0, 1, 3] = float("nan")
    out, lse = forward(bad_q, k, v, **Call().op_arguments(), way=way)
    assert out[0, 1, 3].isnan().all() and lse[0, 1, 3].isnan()
    rest = torch.ones(1, 4, 8, dtype=torch.bool)
    rest[0, 1, 3] = False
    assert (out[rest] - clean[rest]).abs().max() < 0.02  # a NaN sends its neighbours another way, to other roundings
    assert (lse[rest] - clean_lse[rest]).abs().max() < 1e-5
    bad_k[0, 1, 400] = float("nan")
    out, _ = forward(q, bad_k, v, **Call().op_arguments(), way=way)
    assert torch.equal(out[:, :2], clean[:, :2]) and out[:, 2:].isnan().all()
    bad_v[0, 0, 500, 7] = float("inf")
    out, _ = forward(q, k, bad_v, **Call().op_arguments(), way=way)
    assert (out[:, :2, :, 7] == float("inf")).all() and out[:, :2, :, 6].isfinite().all() and torch.equal(out[:, 2:], clean[:, 2:])


@pytest.mark.parametrize("dim", (64, 128, 256))
def test_counting(forward, dim):
    for (seq_q, seq_k), way in (((7, 500), (1, 3, 2)), ((1, 385), (1, 3, 5)), ((90, 500), (2, 3, 3)), ((30, 129), (1, 2, 1))):
        for call in (Call(), Call(is_causal=True), Call(is_causal=True, bottom_right=True), Call(window=(70, 3))):
            run = lambda *args, **options: forward(*args, **options, way=way)  # noqa: B023, E731
            check_counting(1, 6, 2, seq_q, seq_k, dim, HALVES[seq_q % 2], call=call, backward=False, forward=run)


def test_bitwise_equal_in_any_order(forward):
    x = inputs(Case("orders", 1, (4, 2), (40, 300), (128, 128), torch.bfloat16, grad=""))
    for way in ((1, 2, 4), (2, 2, 2)):
        results = [forward(x.q, x.k, x.v, **Call(is_causal=True).op_arguments(), way=way) for _ in range(5)]
        assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results[1:])


def test_as_planned(forward):
    """What the launcher asks for, and chooses, by itself: whichever it is, the result holds."""
    for heads, lengths, dims in (((8, 2), (1, 900), (64, 64)), ((8, 2), (3, 500), (128, 128)), ((2, 2), (200, 300), (64, 64))):
        for band in ("full", "causal_br"):
            hold(forward, "planned", heads, lengths, dims, None, band)
