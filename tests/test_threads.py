"""Threads: the kernels run on torch's own pool, as many as torch.set_num_threads says, and several callers at once."""

import os
import threading
from pathlib import Path

import pytest
import torch
from cases import Case, inputs
from oracle import Call, check, ops, run_op

TASKS = Path("/proc/self/task")


def cpu_time():
    """Nanoseconds that each thread of this process has run: {thread id: ns}."""
    times = {}
    for task in TASKS.iterdir():
        try:
            times[task.name] = int((task / "schedstat").read_text().split()[0])
        except OSError:  # it ended meanwhile
            pass
    return times


def busy_threads(function, share=0.2):
    """How many threads did at least `share` of the work of function()."""
    before = cpu_time()
    function()
    spent = [t - before.get(name, 0) for name, t in cpu_time().items()]
    return sum(t > share * sum(spent) for t in spent)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


WORK = {  # (batch, query heads, queries, keys): what there is to share out
    "heads": (1, 4, 512, 512),
    "batch": (4, 1, 512, 512),
    "query blocks": (1, 1, 1024, 1024),
    "keys of one query": (1, 1, 1, 400_000),  # the forward alone splits keys
}


@pytest.mark.skipif(not (TASKS / str(os.getpid()) / "schedstat").exists(), reason="needs /proc/<pid>/task/<tid>/schedstat")
@pytest.mark.parametrize("work, direction", [(w, d) for w in WORK for d in ("forward", "backward")
                                            if (w, d) != ("keys of one query", "backward")])
def test_two_threads_really_run(work, direction, threads):
    if os.cpu_count() < 2:
        pytest.skip("one processor")
    batch, heads, seq_q, seq_k = WORK[work]
    q, k, v = (torch.randn(batch, heads, s, 64) for s in (seq_q, seq_k, seq_k))
    out, lse = ops().forward(q, k, v)

    def run():
        for _ in range(6):
            if direction == "forward":
                ops().forward(q, k, v)
            else:
                ops().backward(out, None, q, k, v, out, lse, output_mask=[True, True, True, False, False])

    for count in (2, 1):
        threads(count)
        run()  # torch starts its pool
        assert busy_threads(run) == count, f"with torch.set_num_threads({count})"


@pytest.mark.parametrize("count", (1, 2, 3, 5))
def test_any_number_of_threads_is_right(count, threads):
    threads(count)
    for case in (Case("threads", batch=1, heads=(3, 1), seq=(130, 300), mask="random:hqk", lse_grad=True),
                 Case("decode", heads=(2, 1), seq=(1, 3000), dtype=torch.bfloat16, lse_grad=True),
                 Case("bias", batch=3, heads=(2, 2), seq=(70, 130), mask="bias:qk", mask_grad=True, call=Call(is_causal=True))):
        check(inputs(case), case.call)


def test_callers_on_several_threads_do_not_disturb_each_other():
    """Each with its own sizes, forward and backward, all at once: scratch is not shared."""
    cases = [Case(f"caller{i}", heads=(2, 1), seq=(65 + 64 * i, 130), dim=(16 + 40 * i, 24), dtype=dtype, lse_grad=True)
             for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float16))]
    tensors = [inputs(case) for case in cases]
    want = [run_op(x, Call()) for x in tensors]
    wrong = []

    def work(x, expected):
        for _ in range(15):
            got = run_op(x, Call())
            same = torch.equal(got.out, expected.out) and all(torch.equal(got.grads[n], expected.grads[n]) for n in got.grads)
            if not same:
                wrong.append(x.q.dtype)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(tensors, want)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_inside_a_parallel_region():
    """A custom data loader or graph executor may call from a worker of torch's pool: no deadlock, the same numbers."""
    x = inputs(Case("nested", heads=(4, 2), seq=(130, 130)))
    want = ops().forward(x.q, x.k, x.v)[0]
    futures = [torch.jit.fork(lambda q, k, v: ops().forward(q, k, v)[0], x.q, x.k, x.v) for _ in range(4)]
    assert all(torch.equal(torch.jit.wait(f), want) for f in futures)
