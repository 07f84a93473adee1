"""The mask-plan kernels without a GPU: their sources on the emulator, every word as the plan in plain torch has it."""

import ctypes
import mmap
import multiprocessing
import platform

import pytest
import torch
from cases import BROADCASTS, FLOATS, MASK_KINDS, MASK_STRIDES, dtype_name, make_mask
from emulator import Emulator, build
from oracle import INF, generator
from reference_plan import reference_plan

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is tried on x86-64 alone")
DTYPES = (torch.bool, *FLOATS)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    sources = ["src/cuda/sm90/mask_plan_launch.cu", "tests/gpu/mask_plan_shim.cu"]
    return Emulator(build(tmp_path_factory.mktemp("mask_plan"), sources))


@pytest.fixture
def same(emulator, request):
    orders = generator(request.node.name)

    def check(mask):
        want = reference_plan(mask)
        got = torch.full_like(want, 0x7FFFFFFF)
        emulator.configure(int(torch.randint(2**31, (), generator=orders)), 1)
        emulator.mask_plan(mask, got)
        wrong = (got != want).nonzero()
        assert not len(wrong), (
            f"{len(wrong)} words differ for a {dtype_name(mask.dtype)} mask {tuple(mask.shape)}, strides {mask.stride()}; the first "
            f"at {wrong[0].tolist()}: {got[tuple(wrong[0])]}, want {want[tuple(wrong[0])]}")

    return check


def as_dtype(mask, dtype):
    """A bool mask as the bias that means the same; others unchanged."""
    if mask.dtype != torch.bool or dtype == torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -INF)


def content(recipe, name, sizes, dtype):
    return as_dtype(make_mask(recipe, name, sizes, dtype if dtype.is_floating_point else torch.float32), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_contents(same, kind, dtype):
    same(content(kind, "contents", (1, 2, 130, 333), dtype))


@pytest.mark.parametrize("strides", MASK_STRIDES)
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda axes: axes or "none")
def test_broadcast_axes_and_strides(same, axes, strides):
    for dtype in (torch.bool, torch.bfloat16):
        same(MASK_STRIDES[strides](content(f"granules:{axes or '-'}", "axes", (2, 2, 129, 192), dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("seq_q", (0, 1, 63, 64, 65, 200))
def test_sizes(same, seq_q, dtype):
    for seq_k in (0, 1, 63, 64, 65, 128, 600):
        mask = content("window", "sizes", (1, 1, seq_q, seq_k), dtype)
        same(mask)
        same(mask.transpose(2, 3).contiguous().transpose(2, 3))


@pytest.mark.parametrize("offset", (1, 2, 8, 15))
def test_odd_offsets(same, offset):
    for dtype in DTYPES:
        mask = content("causal", "offsets", (1, 1, 70, 256), dtype)
        flat = torch.zeros(mask.numel() + offset, dtype=dtype)
        flat[offset:] = mask.flatten()
        same(flat[offset:].view(mask.shape))


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("value", (0.0, -0.0, -INF, INF, float("nan"), "lowest", "smallest"), ids=lambda value: f"value {value}")
def test_one_odd_element(same, value, dtype):
    number = {"lowest": torch.finfo(dtype).min, "smallest": -torch.finfo(dtype).smallest_normal}.get(value, value)
    for rest in (0.0, -INF):
        for row, col in ((0, 0), (63, 63), (64, 127), (129, 199)):
            mask = torch.full((1, 1, 130, 200), rest, dtype=dtype)
            mask[0, 0, row, col] = number
            same(mask)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=dtype_name)
def test_any_pattern_of_16_bits(same, dtype):
    """Each alone in its granule: subnormals, NaN of any payload, infinities and zeros of either sign among them."""
    g = generator("patterns")
    tops = (0, 0x0080, 0x0400, 0x7C00, 0x7F80)  # no exponent, the smallest, the largest; of either type
    edges = torch.tensor([sign | top | low for sign in (0, 0x8000) for top in tops for low in (0, 1, 0x7F)])
    patterns = torch.cat([edges, torch.randint(2**16, (2000,), generator=g)]).to(torch.uint16).view(dtype)
    mask = torch.full((1, 1, 2, 64 * len(patterns)), -INF, dtype=dtype)
    mask[0, 0, 1, 17::64] = patterns
    same(mask)


def test_any_byte_of_a_bool(emulator):
    """What is not 0 is true."""
    bytes_ = torch.arange(256, dtype=torch.uint8).repeat(64, 3)[None, None]
    for offset in (0, 1, 16):
        mask, got = bytes_[..., offset:], torch.full_like(reference_plan(bytes_[..., offset:] != 0), 0x7FFFFFFF)
        emulator.mask_plan(mask.view(torch.bool), got)
        assert torch.equal(got, reference_plan(mask != 0))


def _plan_between_pages(emulator, dtype, rows, seq_k, pitch, at_end):
    """The plan of a mask that starts, or ends, where memory that may be read does."""
    page = mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, 3 * page), dtype=torch.uint8)
    inside = memory[page : 2 * page].view(dtype)
    count = (rows - 1) * pitch + seq_k
    mask = (inside[len(inside) - count :] if at_end else inside).as_strided((1, 1, rows, seq_k), (0, 0, pitch, 1))
    mask.copy_(content("causal", "pages", (1, 1, rows, seq_k), dtype))
    want = reference_plan(mask)
    got = torch.full_like(want, 0x7FFFFFFF)
    for guard in (0, 2):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.data_ptr() + guard * page), page, 0) == 0
    emulator.mask_plan(mask, got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("at_end", (False, True), ids=("start", "end"))
def test_nothing_outside_the_mask_is_read(emulator, at_end):
    emulator.configure(1, 1)
    fork = multiprocessing.get_context("fork")
    for dtype in DTYPES:
        for sizes in ((5, 67, 67), (1, 333, 333), (5, 80, 84), (5, 80, 83)):
            child = fork.Process(target=_plan_between_pages, args=(emulator, dtype, *sizes, at_end))
            child.start()
            child.join(60)
            assert child.exitcode == 0, f"{dtype_name(dtype)} {sizes}: ended with {child.exitcode}"
