"""torch's compile caches on disk: another process, or another thread, with another selection must not get our graph."""

import json

import pytest

PROGRAM = """
import json, os, sys, threading
import torch, torch.nn.functional as F
from torch._dynamo.utils import counters

selection, thread = {selection!r}, {thread!r}
if selection is not None:
    import torch_flashsdpa
    torch_flashsdpa.enable(selection)
function = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), fullgraph=True)
x = torch.randn(1, 2, 8, 8)  # without a gradient: a training graph is stored only after its backward
expected = torch.nn.functional.softmax(x @ x.mT / 8**0.5, -1) @ x

def run():
    torch.testing.assert_close(function(x), expected)

if thread:
    worker = threading.Thread(target=run); worker.start(); worker.join()
else:
    run()
calls = torch_flashsdpa.routed_calls() if selection is not None else 0
print(json.dumps([calls, counters["aot_autograd"]["autograd_cache_hit"]]))
"""


@pytest.mark.timeout(280)
def test_processes_share_a_cache_but_not_a_selection(run_python, tmp_path):
    """Each line is a process: (selection, compiled in a worker thread) -> (our executions, cache hits)."""
    story = [
        (None, False, [0, 0]),  # never imports the package, fills the cache
        ("flashsdpa", False, [1, 0]),  # must not take the graph above
        ("flashsdpa", True, [1, 1]),  # finds it, although the thread that compiles is not the one that called enable()
        ("stock", False, [0, None]),  # must not take ours
        (None, False, [0, 1]),  # nor does a process without the package, where our op does not exist
    ]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    seen = []
    for selection, thread, _ in story:
        out = run_python(PROGRAM.format(selection=selection, thread=thread), env=environment)
        seen.append(json.loads(out.splitlines()[-1]))
    for (selection, thread, expected), got in zip(story, seen):
        assert got == [g if e is None else e for e, g in zip(expected, got)], (selection, thread, seen)


def test_tag_keeps_the_users_own():
    import torch

    from torch_flashsdpa import _dynamo_compat

    # Not monkeypatch: it undoes by deleting, after which torch's config no longer knows the name.
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for text in ("a", "b", "b"):
            _dynamo_compat.set_cache_tag(text)
        assert torch.compiler.config.cache_key_tag == "mine+flashsdpa[b]"
