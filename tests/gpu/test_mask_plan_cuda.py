"""The mask plan built on the device, bit for bit the reference's: contents, dtypes, strides, sizes, streams."""

import random

import pytest
import torch

from cases import BROADCASTS, MASK_KINDS, MASK_STRIDES, dtype_name, make_mask, placed
from oracle import INF, SEED, ops
from reference_plan import GRANULE, reference_plan
from test_mask_plan import PREDICATES

import torch_flashsdpa

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="flashsdpa_mask_plan_sm90 needs a GPU of compute capability 9.0",
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (torch.bool, *FLOATS)


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """Every torch.empty is filled (integers with their largest value), so a word not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def on_gpu(mask):
    return placed(mask, "cuda")


def assert_plan(plan, mask):
    expected = reference_plan(mask)
    assert plan.shape == expected.shape and plan.dtype == torch.int32 and plan.is_contiguous() and plan.is_cuda
    wrong = (plan != expected).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} words differ for a {dtype_name(mask.dtype)} mask {tuple(mask.shape)}, strides {mask.stride()}; "
        f"the first at {wrong[0].tolist()}: {plan[tuple(wrong[0])]}, expected {expected[tuple(wrong[0])]}"
    )


def check(mask):
    assert_plan(ops().mask_plan(mask), mask)


def as_dtype(mask, dtype):
    """A bool mask as the bias that means the same; others unchanged."""
    if mask.dtype != torch.bool or dtype == torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -INF)


def content(recipe, name, sizes, dtype):
    """A mask by a recipe of cases.py, on the CPU. Recipes of a bias have a float type even where bool is asked for."""
    return as_dtype(make_mask(recipe, name, sizes, dtype if dtype.is_floating_point else torch.float32), dtype)


def test_outputs_are_poisoned():
    assert (torch.empty(1000, dtype=torch.int32, device="cuda") == torch.iinfo(torch.int32).max).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_contents(kind, dtype):
    check(on_gpu(content(kind, "contents", (2, 2, 200, 333), dtype)))


@pytest.mark.parametrize("strides", MASK_STRIDES)
@pytest.mark.parametrize("axes", BROADCASTS, ids=lambda axes: axes or "none")
def test_broadcast_axes_and_strides(axes, strides):
    for dtype in (torch.bool, torch.bfloat16):
        mask = content(f"granules:{axes or '-'}", "axes", (3, 2, 193, 320), dtype)
        check(on_gpu(MASK_STRIDES[strides](mask)))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("strides", MASK_STRIDES)
def test_strides_of_every_dtype(strides, dtype):
    check(on_gpu(MASK_STRIDES[strides](content("document", "strides", (2, 3, 256, 384), dtype))))


@pytest.mark.parametrize("seq_k", (0, 1, 63, 64, 65, 200, 1000))
@pytest.mark.parametrize("seq_q", (0, 1, 63, 64, 65, 200, 1000))
def test_sizes(seq_q, seq_k):
    for dtype in (torch.bool, torch.bfloat16, torch.float32):
        check(on_gpu(content("window", "sizes", (1, 2, seq_q, seq_k), dtype)))


@pytest.mark.parametrize("offset", range(1, 18))
def test_odd_offsets(offset):
    for dtype in DTYPES:
        mask = content("causal", "offsets", (1, 1, 130, 256), dtype)
        flat = torch.zeros(mask.numel() + offset, dtype=dtype)
        flat[offset:] = mask.flatten()
        check(on_gpu(flat[offset:].view(mask.shape)))


@pytest.mark.parametrize("axis", (0, 1, 2, 3))
def test_expanded_axes(axis):
    mask = on_gpu(make_mask("random", "expanded", (2, 3, 130, 200), torch.bool))
    check(mask.narrow(axis, 0, 1).expand(mask.shape))


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize(
    "value", (0.0, -0.0, -INF, INF, float("nan"), "lowest", "smallest", "-smallest"), ids=lambda value: f"value {value}"
)
def test_one_odd_element(value, dtype):
    """Among granules of zeros and of -inf, one element decides its granule alone, at a corner or inside."""
    numbers = {"lowest": torch.finfo(dtype).min, "smallest": torch.finfo(dtype).smallest_normal}
    numbers["-smallest"] = -numbers["smallest"]
    for rest in (0.0, -INF):
        for row, col in ((0, 0), (63, 63), (64, 127), (129, 199), (100, 70)):
            mask = torch.full((1, 1, 130, 200), rest, dtype=dtype, device="cuda")
            mask[0, 0, row, col] = numbers.get(value, value)
            check(mask)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=dtype_name)
def test_every_pattern_of_16_bits(dtype):
    """Each alone in its granule: the hardware's comparison with -inf meets every subnormal and NaN."""
    mask = torch.full((1, 1, 256 * GRANULE, 256 * GRANULE), -INF, dtype=dtype, device="cuda")
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(dtype)
    mask[0, 0, 5::GRANULE, 50::GRANULE] = patterns.view(256, 256)
    check(mask)
    check(torch.nn.functional.pad(mask, (1, 2))[..., 1:-2])  # rows at no multiple of 16 bytes


@pytest.mark.parametrize("background", (False, True))
def test_one_odd_bool(background):
    for row, col in ((0, 0), (63, 63), (64, 127), (129, 199), (100, 70)):
        mask = torch.full((1, 1, 130, 200), background, device="cuda")
        mask[0, 0, row, col] = not background
        check(mask)


def test_checkerboard_of_granules():
    rows, cols = torch.arange(640, device="cuda")[:, None], torch.arange(1280, device="cuda")
    board = (rows // GRANULE + cols // GRANULE) % 2 == 0
    check(board[None, None])
    check(as_dtype(board, torch.float16)[None, None])


LONG = ((1, 1, 1, 300_001), (1, 1, 70_000, 1), (1, 1, 20_000, 700), (1, 1, 300, 40_000))


@pytest.mark.parametrize("shape", LONG, ids=str)
def test_long_lists(shape):
    """More than 256 granules in a list, a few of them there."""
    mask = torch.rand(shape, device="cuda") < 0.001
    check(mask)
    check(as_dtype(mask, torch.bfloat16))


@pytest.mark.parametrize("shape", ((70_000, 1, 1, 65), (300, 300, 2, 3), (1, 66_000, 65, 1)), ids=str)
def test_more_masks_than_a_grid_axis_holds(shape):
    check(torch.rand(shape, device="cuda") < 0.5)


def test_random_cases():
    pick = random.Random(SEED)
    kinds, strides = list(MASK_KINDS), list(MASK_STRIDES)
    for number in range(150):
        dtype = pick.choice(DTYPES)
        seq_k = pick.choice((pick.randint(1, 700), 512, 640))
        sizes = (pick.randint(1, 3), pick.randint(1, 3), pick.randint(1, 400), seq_k)
        recipe = f"{pick.choice(kinds)}:{pick.choice(BROADCASTS) or '-'}"
        check(on_gpu(MASK_STRIDES[pick.choice(strides)](content(recipe, str(number), sizes, dtype))))


def test_same_as_on_the_cpu():
    for kind in ("random", "causal", "granules", "padding"):
        mask = make_mask(kind, "cpu", (2, 1, 200, 333), torch.float32)
        assert torch.equal(ops().mask_plan(on_gpu(mask)).cpu(), ops().mask_plan(mask))


def test_over_2_to_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    side = 46_400
    mask = torch.ones(1, 1, side, side, dtype=torch.bool, device="cuda")
    mask[..., 10_000:, :20_000] = False
    mask[0, 0, -1, -1] = False
    check(mask)


def test_strides_over_2_to_31():
    step = 2**31 + 5
    mask = torch.zeros(step + 20_000, dtype=torch.bool, device="cuda").as_strided((2, 1, 100, 130), (step, 1, 130, 1))
    mask.copy_(torch.rand(mask.shape, device="cuda") < 0.001)
    check(mask)


@pytest.mark.parametrize("name", PREDICATES)
def test_a_plan_from_a_predicate(name):
    fn = PREDICATES[name]
    for seq_q, seq_k in ((1, 1), (64, 128), (200, 333)):
        b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(3, 1, 1)
        mask = fn(b, h, torch.arange(seq_q)[:, None], torch.arange(seq_k)).expand(2, 3, seq_q, seq_k)
        plan = torch_flashsdpa.plan_mask_fn(fn, 2, 3, seq_q, seq_k, device="cuda")
        assert torch.equal(plan, ops().mask_plan(mask.contiguous().cuda()))


def test_a_predicate_makes_no_tensor_of_the_scores():
    """16384 x 16384: 33.5 MB of bits; the mask would be 268 MB."""
    plan = torch_flashsdpa.plan_mask_fn(PREDICATES["causal"], 1, 1, 16384, 16384, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch_flashsdpa.plan_mask_fn(PREDICATES["causal"], 1, 1, 16384, 16384, device="cuda")
    assert torch.cuda.max_memory_allocated() - before < 4 * plan.numel() * plan.element_size()


def test_two_runs_are_equal():
    mask = torch.rand(2, 2, 1000, 1000, device="cuda") < 0.01
    first = ops().mask_plan(mask)
    assert all(torch.equal(first, ops().mask_plan(mask)) for _ in range(20))


def test_captured_and_replayed_with_other_contents():
    kinds = ("causal", "random", "granules")
    contents = [make_mask(kind, "graph", (2, 1, 300, 333), torch.bool).cuda() for kind in kinds]
    mask = torch.zeros_like(contents[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = ops().mask_plan(mask)
    for new in contents * 2:
        mask.copy_(new)
        plan.fill_(-1)
        graph.replay()
        assert_plan(plan, new)


def test_side_stream_and_no_synchronisation():
    """The plan waits for its own stream's work, and the host does not wait for the plan."""
    mask = torch.zeros(1, 1, 500, 500, dtype=torch.bool, device="cuda")
    new = make_mask("causal", "stream", mask.shape, torch.bool).cuda()
    check(mask)  # loads the kernels
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # cycles: about a quarter of a second
        mask.copy_(new)
        plan = ops().mask_plan(mask)
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
    stream.synchronize()
    assert_plan(plan, new)


def test_profiler_shows_two_kernels_and_no_copy():
    mask = torch.rand(2, 1, 300, 333, device="cuda") < 0.5
    ops().mask_plan(mask)
    torch.use_deterministic_algorithms(False)  # no filling of the output
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops().mask_plan(mask)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 2, on_device
    for kernel in ("flashsdpa_mask_plan_sm90", "flashsdpa_mask_plan_lists_sm90"):
        assert sum(kernel in name for name in on_device) == 1, on_device
