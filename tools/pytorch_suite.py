#!/usr/bin/env python3
"""PyTorch's own tests of attention, with stock attention and with ours in force: what passes there must pass here.

    tools/pytorch_suite.py ~/pytorch/test                        # all of SUITE that the folder has
    tools/pytorch_suite.py ~/pytorch/test --only test_nn --most 0
    tools/pytorch_suite.py ~/pytorch/test --write results.json

The folder is the `test` folder of a PyTorch checkout whose version fits the installed torch; nothing of it is kept here.
Every file runs once as it is, and once for each --selection with TORCH_FLASHSDPA set, as a user without a line of our code
would: in a process of its own, from `import torch` on. A test that a crash or the time limit ended counts as failed, and
the file goes on after it. A difference is run once more, alone and on both sides, before it is reported: some tests
compare times, and some are at odds with their neighbours.

Exit code 1 if a difference is left, or if ours served no call at all.
"""

import argparse
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = "sdpa or sdp_ or scaled_dot or attention or Attention or attn or Transformer or transformer or mha or multi_head"
# Test file -> pytest's -k expression. A name in it is also looked for in the file's own name.
SUITE = {
    "test_transformers.py": "",
    "nn/test_multihead_attention.py": "",
    "test_nn.py": ATTENTION,
    "test_modules.py": ATTENTION,
    "test_ops.py": ATTENTION,
    "test_nestedtensor.py": ATTENTION,
    "test_jit.py": ATTENTION,
    "test_flop_counter.py": ATTENTION,
    "test_fake_tensor.py": ATTENTION,
    "test_expanded_weights.py": ATTENTION,
    "functorch/test_ops.py": ATTENTION,
    "functorch/test_vmap.py": ATTENTION,
    "functorch/test_aotdispatch.py": ATTENTION,
    "functorch/test_ac.py": ATTENTION,
    "functorch/test_aot_joint_with_descriptors.py": ATTENTION,
    "dynamo/test_activation_checkpointing.py": ATTENTION,
    "dynamo/test_ctx_manager.py": ATTENTION,
    "dynamo/test_misc.py": ATTENTION,
    "dynamo/test_repros.py": ATTENTION,
    "dynamo/test_regional_inductor.py": ATTENTION,
    "dynamo/test_sdpa.py": "",
    "export/test_export.py": ATTENTION,
    "higher_order_ops/test_invoke_subgraph.py": ATTENTION,
    "inductor/test_fused_attention.py": "",
    "inductor/test_torchinductor.py": ATTENTION,
    "test_decomp.py": ATTENTION,
    "test_meta.py": ATTENTION,
    "test_proxy_tensor.py": ATTENTION,
}
STOCK = "0"


class Plugin:
    """The side of a run that lives in pytest's process: runs the wanted tests and writes a line for each as it goes."""

    def __init__(self):
        self.log = open(os.environ["SUITE_LOG"], "a", buffering=1)
        self.most = int(os.environ["SUITE_MOST"])
        wanted = os.environ["SUITE_TESTS"]
        self.wanted = set(json.loads(Path(wanted).read_text())) if wanted else None
        self.selection = os.environ["TORCH_FLASHSDPA"]

    def served(self):
        if self.selection == STOCK:
            return 0
        import torch_flashsdpa

        return torch_flashsdpa.routed_calls()

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, items):
        if self.selection != STOCK:
            import torch_flashsdpa

            status = torch_flashsdpa.status()
            if status["backend"] != self.selection:
                raise SystemExit(f"TORCH_FLASHSDPA={self.selection} did not take effect: {status}")
        chosen = [item for item in items if self.wanted is None or item.nodeid in self.wanted]
        if self.wanted is None:
            chosen = at_most(chosen, self.most)
        items[:] = chosen
        self.write(tests=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid):
        self.before, self.began = self.served(), time.monotonic()
        self.write(start=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr)[-1500:] if report.longrepr else ""
            self.write(end=report.nodeid, outcome=report.outcome, text=text)

    def pytest_runtest_logfinish(self, nodeid):
        self.write(done=nodeid, served=self.served() - self.before, seconds=round(time.monotonic() - self.began, 2))

    def write(self, **line):
        self.log.write(json.dumps(line) + "\n")


def at_most(items, most):
    """Of the tests made from one function with different parameters, `most` of them, spread by a hash of their names."""
    families = {}
    for item in items:
        # PyTorch wraps a function once for each choice of parameters; below the wraps lies the same code.
        families.setdefault((item.cls, inspect.unwrap(item.function).__code__), []).append(item)
    chosen = set()
    for members in families.values():
        members.sort(key=lambda item: hashlib.sha1(item.nodeid.encode()).digest())
        chosen.update(members[: most or None])
    return [item for item in items if item in chosen]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the `test` folder of a PyTorch checkout")
    parser.add_argument("--selection", action="append", choices=("flashsdpa", "auto"), help="default: both")
    parser.add_argument("--only", action="append", help="files of SUITE whose path holds this; may be repeated")
    parser.add_argument("-k", default=None, help="pytest's -k in place of the suite's")
    parser.add_argument("--most", type=int, default=40, help="tests of one parametrised function; 0: all (default: 40)")
    parser.add_argument("--limit", type=int, default=1200, help="seconds for one file with one selection (default: 1200)")
    parser.add_argument("--write", type=Path, help="write all results as JSON")
    options = parser.parse_args()
    results, left, total = {}, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(options, Path(scratch))
        for path, expression in SUITE.items():
            if options.only and not any(word in path for word in options.only):
                continue
            if not (options.folder / path).exists():
                print(f"{path}: not in the folder")
                continue
            expression = expression if options.k is None else options.k
            stock = runner.file(path, expression, STOCK)
            results[path] = {"stock": stock}
            for selection in options.selection or ("flashsdpa", "auto"):
                ours = results[path][selection] = runner.file(path, expression, selection, list(stock))
                found = runner.confirmed(path, selection, differences(stock, ours))
                left += len(found)
                total += report(path, selection, stock, ours, found)
    if options.write:
        options.write.write_text(json.dumps(results, indent=1))
    print(f"{left} differences; ours served {total} calls")
    return 0 if total and not left else 1


class Runner:
    def __init__(self, options, scratch):
        self.options, self.scratch = options, scratch
        # torch finds us by our entry point, as in an installation, also from a checkout.
        info = scratch / "site" / "torch_flashsdpa-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-flashsdpa\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\nflashsdpa = torch_flashsdpa._autoload:autoload\n")

    def file(self, path, expression, selection, tests=None):
        """{test: {outcome, text, served, seconds}} of one file; restarts after a test that took the process down."""
        results, pending = {}, tests
        deadline = time.monotonic() + self.options.limit
        while pending is None or pending:
            found, listed = self.process(path, expression, selection, pending, deadline - time.monotonic())
            if listed is None:
                print(f"{path} with {selection}: no tests could be collected\n{found}")
                return results
            results.update(found)
            pending = [test for test in listed if test not in results]
            if not found or time.monotonic() >= deadline:
                break
        return results

    def process(self, path, expression, selection, tests, seconds):
        log, wanted = self.scratch / "log", self.scratch / "wanted"
        log.unlink(missing_ok=True)
        if tests is not None:
            wanted.write_text(json.dumps(tests))
        folder = self.options.folder.resolve()
        paths = [Path(__file__).resolve().parent, ROOT, self.scratch / "site", (folder / path).parent, folder]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "TORCH_FLASHSDPA": selection,
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin at barriers starve each other on a busy machine
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / f"inductor-{selection}"),
            "SUITE_LOG": str(log),
            "SUITE_TESTS": str(wanted) if tests is not None else "",
            "SUITE_MOST": str(self.options.most),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "pytorch_suite"]
        command += ["-p", "no:cacheprovider", "-k", expression, str(folder / path)]
        try:
            process = subprocess.run(command, env=environment, cwd=(folder / path).parent, capture_output=True, text=True,
                                     timeout=max(seconds, 1))
            end, output = f"the process ended with {process.returncode}", process.stdout[-2000:] + process.stderr[-2000:]
        except subprocess.TimeoutExpired:
            end, output = "the time limit", ""
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        results, running, listed = {}, None, None
        for line in lines:
            if "tests" in line:
                listed = line["tests"]
            elif "start" in line:
                running = line["start"]
            elif "end" in line:
                # A later phase can only make it worse: a teardown that fails, after a call that passed.
                results[line["end"]] = {"outcome": line["outcome"], "text": line["text"]}
            else:
                results.setdefault(line["done"], {"outcome": "failed", "text": "no report"}).update(
                    served=line["served"], seconds=line["seconds"])
                running = None
        if running is not None:
            results[running] = {"outcome": "failed", "text": f"{end}; {output}", "served": 0}
        if listed is None:
            return output or end, None
        return results, listed

    def confirmed(self, path, selection, found):
        """Those of the found differences that show again when a test runs alone."""
        left = []
        for test in found:
            stock = self.process(path, "", STOCK, [test], self.options.limit)[0]
            ours = self.process(path, "", selection, [test], self.options.limit)[0]
            if differences(stock, ours):
                left.append((test, ours[test]["text"]))
        return left


def differences(stock, ours):
    return [test for test, got in stock.items()
            if got["outcome"] == "passed" and ours.get(test, {"outcome": "not run"})["outcome"] != "passed"]


def report(path, selection, stock, ours, found):
    def count(results, outcome):
        return sum(r["outcome"] == outcome for r in results.values())

    served = sum(r.get("served", 0) for r in ours.values())
    sides = ("; ".join(f"{name}: {count(r, 'passed')} passed, {count(r, 'failed')} failed, {count(r, 'skipped')} skipped"
                       for name, r in (("stock", stock), (selection, ours))))
    print(f"{path}: {sides}; served {served} calls; {len(found)} differences", flush=True)
    for test, text in found:
        print(f"  {test}\n    " + text.replace("\n", "\n    "))
    return served


if __name__ == "__main__":
    sys.exit(main())


def pytest_configure(config):
    config.pluginmanager.register(Plugin())
