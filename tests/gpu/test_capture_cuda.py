"""CUDA graphs, streams, threads, devices around the unchanged call: what a replay reads, whose memory scratch is, who serves.

Gradients are compared bit for bit, so torch's deterministic mode is on everywhere.
"""

import copy
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import Case, inputs, placed
from hopper import capture, needs_hopper, on_the_gpu_with_gradients  # noqa: F401
from oracle import Call, Result, check, generator
from torch import nn

from torch_flashsdpa import enable, profiler, sdpa_backend

pytestmark = needs_hopper
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NAN = float("nan")


@pytest.fixture(autouse=True)
def served_with_the_same_bits():
    enable("flashsdpa", strict=True)
    torch.use_deterministic_algorithms(True, warn_only=True)  # the oracle's matrix products only warn
    yield
    torch.use_deterministic_algorithms(False)


def normal(name, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator(name), device="cpu").to("cuda", dtype)


def on_the_device(case, device="cuda"):
    with torch.device("cpu"):
        mask = inputs(case).mask
    x = inputs(replace(case, mask=""), device)
    return replace(x, mask=None if mask is None else placed(mask, device), mask_grad=case.mask_grad)


def attend(q, k, v, mask, call):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=call.is_causal, dropout_p=call.dropout_p,
                                          enable_gqa=q.size(1) != k.size(1))  # fmt: skip


def stepper(x, call):
    """step(), one forward and backward of what the tensors of x hold then: [out, *gradients]."""
    leaves = [t.requires_grad_() for t in ([x.q, x.k, x.v] + ([x.mask] if x.mask_grad else []))]

    def step():
        out = attend(x.q, x.k, x.v, x.mask, call)
        return [out.detach(), *torch.autograd.grad(out, leaves, x.grad_out)]

    return step


# --- graphs that the caller captures ----------------------------------------------------------------------------------

CAPTURED = {
    "causal": dict(call=Call(is_causal=True)),
    "bool": dict(mask="granules", dim=(128, 128)),
    "bool, of keys": dict(mask="padding:bk", heads=(8, 2)),
    "additive": dict(mask="bias_inf:qk", call=Call(is_causal=True)),
    "additive, with its gradient": dict(mask="bias:hqk", mask_grad=True),
    "float32": dict(mask="random:hqk", dtype=torch.float32),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_replayed_step_reads_what_its_tensors_hold_now(name):
    """Forward and backward in one graph, the mask overwritten in between: its plan is made again by each replay."""
    case = replace(Case(name, 2, (4, 4), (300, 333), (64, 64), torch.bfloat16), **CAPTURED[name])
    static = on_the_device(case)
    step = stepper(static, case.call)
    results, replay = capture(step)

    def replayed(x, call):
        with torch.no_grad():
            for name in ("q", "k", "v", "mask", "grad_out"):
                if getattr(x, name) is not None:
                    getattr(static, name).copy_(getattr(x, name))
        eager = step()  # its scratch is not the graph's
        for t in results:
            t.fill_(NAN)
        replay()
        assert all(torch.equal(a, b) for a, b in zip(results, eager))
        return Result(results[0].clone(), None, dict(zip(x.names(), [t.clone() for t in results[1:]])))

    for turn in range(3):
        check(on_the_device(replace(case, name=f"{name} {turn}")), case.call, run=replayed)


def kept_weights(results):
    """Which weights were kept, from (out, grad_v) of equal weights, V and grad_out being the identity: both passes agree."""
    out, grad_v = results
    kept = out != 0
    assert torch.equal(grad_v != 0, kept.mT), "the backward drops other weights than the forward"
    assert 0.45 < kept.float().mean() < 0.55
    return kept


def check_draws(draw):
    """draw(): a fresh result for kept_weights(), from torch's generator."""

    def draws(seed):
        torch.manual_seed(seed)
        return [kept_weights(draw()).clone() for _ in range(3)]

    first, again, other = draws(1), draws(1), draws(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "the same seed draws something else"
    every = [*first, *other]
    assert not any(torch.equal(every[i], every[j]) for i in range(6) for j in range(i)), "two draws are the same"
    return first


def equal_weights():
    q = torch.zeros(1, 2, 128, 128, dtype=torch.bfloat16)
    return q, torch.eye(128, dtype=torch.bfloat16).expand(1, 2, 128, 128).contiguous().requires_grad_()


def test_replays_draw_dropout_anew_and_a_seed_repeats_them():
    q, v = equal_weights()

    def step():
        out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
        return [out.detach(), *torch.autograd.grad(out, v, v.detach())]

    results, replay = capture(step)

    def draw():
        for t in results:
            t.fill_(NAN)
        replay()
        return results

    first = check_draws(draw)
    torch.manual_seed(1)
    assert torch.equal(kept_weights(step()), first[0]), "eager draws something else than a graph"


class Weighted(nn.Module):
    """Attention of a sequence to itself. The rest goes element by element, so that its bits do not depend on the way."""

    def __init__(self, layers=1):
        super().__init__()
        self.weights = nn.Parameter(normal("weights", layers, 3, 64))

    def forward(self, x, mask):
        for layer in self.weights:
            q, k, v = (x * weight for weight in layer)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x


def train(module, x, mask, grad_out):
    """[out, gradients of x and of the weights]"""
    leaf, module.weights.grad = x.detach().clone().requires_grad_(), None
    out = module(leaf, mask)
    out.backward(grad_out)
    return [out.detach().clone(), leaf.grad.clone(), module.weights.grad.clone()]


def batches(count, shape=(2, 4, 300, 64)):
    """(x, mask, grad_out); each row sees three keys, in each batch others: a wrong mask, or plan, changes everything."""
    rows, batch = torch.arange(300)[:, None], torch.arange(shape[0])[:, None, None, None]
    for turn in range(count):
        mask = (torch.arange(300) - rows - 50 * turn - 70 * batch) % 300 < 3
        yield normal(f"x{turn}", *shape), mask, normal(f"grad{turn}", *shape)


def test_graphed_callables(routed):
    module = Weighted()
    sample = next(batches(1))
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(module), (sample[0].requires_grad_(), sample[1]))
    for batch in batches(4):
        want, got = train(module, *batch), []
        assert routed(lambda: got.extend(train(graphed, *batch))) == 0  # noqa: B023, a replay calls no op
        assert all(torch.equal(a, b) for a, b in zip(got, want))


# --- graphs of torch.compile ------------------------------------------------------------------------------------------


def test_reduce_overhead_trains(routed):
    """Warmed up, recorded, then replayed: no op is called any more, and masks, plans and gradients are the step's own."""
    module = Weighted(layers=2)
    compiled = torch.compile(copy.deepcopy(module), mode="reduce-overhead", fullgraph=True)
    for turn, batch in enumerate(batches(6)):
        got = []
        torch.compiler.cudagraph_mark_step_begin()
        calls = routed(lambda: got.extend(train(compiled, *batch)))  # noqa: B023
        assert turn < 3 or calls == 0, f"step {turn} is no replay"
        for a, b in zip(got, train(module, *batch)):
            assert (a - b).abs().max() <= 2**-5 * b.abs().max(), f"step {turn}"
    with profiler.kernels_run() as kernels:
        train(compiled, *batch)
    assert kernels.starting_with("flashsdpa_fwd_sm90") == kernels.starting_with("flashsdpa_bwd_sm90") == 2, kernels
    assert kernels.starting_with("flashsdpa_mask_plan") > 0, kernels


def test_reduce_overhead_draws_dropout_anew():
    q, v = equal_weights()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def dropped(q, v):
        return F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)

    def draw():
        torch.compiler.cudagraph_mark_step_begin()
        out = dropped(q, v)
        return [out.detach().clone(), *torch.autograd.grad(out, v, v.detach())]

    for _ in range(3):
        draw()
    check_draws(draw)


# --- streams, threads -------------------------------------------------------------------------------------------------

SIDE_BY_SIDE = [
    Case("masked", 2, (8, 2), (515, 600), (64, 64), torch.bfloat16, mask="document"),
    Case("causal", 1, (8, 8), (700, 700), (128, 128), torch.float16, call=Call(is_causal=True)),
    Case("few queries", 3, (4, 4), (4, 5000), (96, 96), torch.bfloat16, mask="padding:bk"),
    Case("bias", 2, (4, 4), (300, 300), (64, 64), torch.bfloat16, mask="bias:hqk", mask_grad=True),
]


def late(step, x):
    """step, on tensors that hold NaN but while its stream works on them, which begins late."""
    values = [t.detach().clone() for t in (x.q, x.k, x.v)]

    def run():
        torch.cuda._sleep(200_000)
        with torch.no_grad():
            for t, value in zip((x.q, x.k, x.v), values):
                t.copy_(value)
        results = step()
        with torch.no_grad():
            for t in (x.q, x.k, x.v):
                t.fill_(NAN)
        return results

    return run


def alone(case):
    """(step, its results): step() waits for its own stream."""
    x = on_the_device(case)
    step = late(stepper(x, case.call), x)
    want = step()
    torch.cuda.synchronize()
    return step, want


def test_streams_side_by_side():
    """Four streams and a busy default one, which leaves NaN in what it frees: scratch and outputs belong to their stream."""
    steps = [alone(case) for case in SIDE_BY_SIDE]
    streams = [torch.cuda.Stream() for _ in steps]
    results = []
    for _ in range(20):
        torch.full((2**22,), NAN)
        for stream, (step, want) in zip(streams, steps):
            with torch.cuda.stream(stream):
                results.append((step(), want))
    torch.cuda.synchronize()
    for turn, (got, want) in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(got, want)), f"{SIDE_BY_SIDE[turn % 4]}, turn {turn // 4}"


class Workers:
    """Threads that start their loops together; what one raises, join() raises."""

    def __init__(self, *functions):
        self.barrier, self.errors = threading.Barrier(len(functions), timeout=60), []
        self.threads = [threading.Thread(target=self._run, args=(function,)) for function in functions]

    def _run(self, function):
        try:
            self.barrier.wait()
            function()
            torch.cuda.synchronize()
        except BaseException as error:
            self.errors.append(error)

    def join(self):
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def test_threads_with_streams_and_selections_of_their_own():
    """Ours in three threads by the process's default, in a fourth a scope of stock: the backward's threads serve all four."""
    x = on_the_device(SIDE_BY_SIDE[0])

    def ours(case):
        step, want = alone(case)

        def work():
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(15):
                    assert all(torch.equal(a, b) for a, b in zip(step(), want)), str(case)

        return work

    def stock():
        with sdpa_backend("stock"), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(15):
                q = x.q.detach().clone().requires_grad_()
                out = attend(q, x.k, x.v, x.mask, Call())
                assert out.grad_fn.name() != "FlashsdpaForwardBackward"
                torch.autograd.grad(out, q, x.grad_out)

    torch.cuda.synchronize()
    Workers(*map(ours, SIDE_BY_SIDE[1:]), stock).join()


# --- two devices ------------------------------------------------------------------------------------------------------


@two_devices
@pytest.mark.parametrize("case", SIDE_BY_SIDE, ids=str)
def test_tensors_of_a_device_that_is_not_the_current_one(case):
    def run(x, call):
        out, *grads = stepper(x, call)()
        assert torch.cuda.current_device() == 0 and {t.device.index for t in (out, *grads)} == {1}
        return Result(out, None, dict(zip(x.names(), grads)))

    x = on_the_device(case, "cuda:1")
    with torch.device("cuda:1"):
        check(x, case.call, run=run)
    on_the_first = stepper(on_the_device(case), case.call)()
    assert all(torch.equal(a, b.cpu()) for a, b in zip([t.cpu() for t in stepper(x, case.call)()], on_the_first))


@two_devices
def test_threads_on_two_devices():
    """Each thread on both in turn, its own current one being the other."""
    steps = [[stepper(on_the_device(case, f"cuda:{device}"), case.call) for device in (0, 1)] for case in SIDE_BY_SIDE]
    want = [[[t.cpu() for t in step()] for step in pair] for pair in steps]

    def worker(number):
        def work():
            torch.cuda.set_device(number % 2)
            for turn in range(10):
                device = turn % 2
                got = steps[number][device]()
                assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want[number][device]))
                assert torch.cuda.current_device() == number % 2

        return work

    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    Workers(*map(worker, range(len(steps)))).join()


@two_devices
def test_a_stream_and_a_graph_of_the_second_device():
    with torch.cuda.device(1), torch.device("cuda:1"):
        x = on_the_device(SIDE_BY_SIDE[0], "cuda:1")
        step = stepper(x, Call())
        want = step()
        results, replay = capture(step)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            assert all(torch.equal(a, b) for a, b in zip(step(), want))
        for t in results:
            t.fill_(NAN)
        replay()
        assert all(torch.equal(a, b) for a, b in zip(results, want))


@two_devices
def test_tensors_of_two_devices_are_refused_as_by_stock():
    q = normal("two", 1, 2, 70, 64)
    for selection in ("flashsdpa", "stock"):
        with sdpa_backend(selection), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, q.to("cuda:1"), q)
