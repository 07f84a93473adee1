"""A case from its model to the rows of the record: correct first, then timed."""

import contextlib
import dataclasses
import functools
import statistics

import torch

import torch_flashsdpa
from torch_flashsdpa import selection
from torch_flashsdpa.bench import measure
from torch_flashsdpa.profiling.replay import peak_flops

from . import compare, counting, timing

MODES = ("eager", "compiled", "compiled-whole")
RECOMPILATIONS = 64  # every length, mask and selection makes one of a block's code


def contexts(mode, backend):
    """{implementation: the context in which its steps run}. Eagerly our router is taken out for stock; compiled code is guarded
    on the selection, so there stock is selected."""
    stock = measure.stock if mode == "eager" else functools.partial(selection.sdpa_backend, "stock")
    return {"stock": stock, "flashsdpa": functools.partial(selection.sdpa_backend, backend)}


@contextlib.contextmanager
def in_mode(mode, case, module, compiler):
    """The case as the mode runs it. "compiled": each block of the module by itself; "compiled-whole": all of the result."""
    if mode == "eager":
        yield case
        return
    import torch._dynamo.config as config

    # A case that ran eagerly beyond the limit would bear the name of a compiled one.
    with config.patch(recompile_limit=RECOMPILATIONS, accumulated_recompile_limit=4096, fail_on_recompile_limit_hit=True):
        if mode == "compiled-whole":
            yield dataclasses.replace(case, result=torch.compile(case.result, backend=compiler, dynamic=False))
            return
        blocks = case.model.blocks_of(module)
        for block in blocks:
            block.compile(backend=compiler, dynamic=False)
        try:
            yield case
        finally:
            for block in blocks:
                block._compiled_call_impl = None


class Bench:
    """Measures cases on one device in one dtype, ours as selected by `backend`, over `rounds` pairs; with 0 it only compares.
    Cases in a row that have the same model share its module."""

    def __init__(self, device, dtype, size, backend="auto", rounds=20, compiler="inductor"):
        self.device, self.dtype, self.size = torch.device(device), dtype, size
        self.backend, self.rounds, self.compiler = backend, rounds, compiler
        self._model = self._made = None

    @contextlib.contextmanager
    def defaults(self):
        """New tensors are on the device and in the dtype of the run, from a fixed seed."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        torch.manual_seed(0)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(before)

    @functools.cached_property
    def peak(self):
        """FLOP/s of a matrix product in the run's dtype, measured here and now."""
        return peak_flops(self.dtype, self.device)

    def prepare(self, case):
        """(module, inputs, library)"""
        if self._model is not case.model:
            self._model = self._made = None  # before the next takes its memory
            with self.defaults():
                self._made = case.model.make(self.size)
            self._model = case.model
        with self.defaults():
            inputs = case.inputs(self.size)
        module, library = self._made
        return module.train(case.train), inputs, library

    def measure(self, case, modes):
        """The rows of a case: for each mode stock's, then ours. What fails is a row too, with the reason and without a time."""
        row = {"group": "models", "case": case.name, "size": self.size, "dtype": str(self.dtype).removeprefix("torch."),
               "pass": case.pass_name}  # fmt: skip
        if missing := case.model.missing():
            return [row | {"mode": mode, "impl": "flashsdpa", "note": f"not run: needs {', '.join(missing)}"} for mode in modes]
        rows = []
        with selection.router_in_place():
            try:
                module, inputs, row["library"] = self.prepare(case)
                with measure.stock():
                    flop, row["sdpa_calls"] = counting.count(case, module, inputs)
                    exact = compare.reference(case, module, inputs, self.dtype)
            except Exception as error:  # noqa: BLE001  the other cases shall run
                return [row | {"mode": mode, **_failure(error)} for mode in modes]
            for mode in modes:
                torch.cuda.empty_cache()
                try:
                    with in_mode(mode, case, module, self.compiler) as changed:
                        pair, right = self._compared(row | {"mode": mode}, changed, module, inputs, exact)
                        if right and self.rounds:
                            self._timed(*pair, changed, module, inputs, flop)
                        rows += pair
                except Exception as error:  # noqa: BLE001
                    rows.append(row | {"mode": mode, **_failure(error)})
        return rows

    def _compared(self, row, case, module, inputs, exact):
        """([stock's row, ours], whether ours is right)"""
        rows, found, results = [], [], []
        for impl, context in contexts(row["mode"], self.backend).items():
            before = torch_flashsdpa.routed_calls()
            with context():
                outcome = compare.outcome(case, module, inputs)
            errors = compare.errors(outcome, exact)
            rows.append(row | {"impl": impl, "routed": torch_flashsdpa.routed_calls() - before, "error": errors.result}
                        | ({"gradient_error": errors.gradient} if case.train else {}))  # fmt: skip
            found.append(errors)
            results.append(outcome.result.to(exact.result.dtype))
        rows[1]["max_difference"] = (results[1] - results[0]).abs().max().item()
        wrong = [compare.beyond(errors, found[0], self.dtype) for errors in found]
        for entry, text, word in zip(rows, wrong, ("wrong", "failed")):
            if text:
                entry["note"] = f"{word}: {text}"
        return rows, not wrong[1]

    def _timed(self, stock, ours, case, module, inputs, flop):
        """Adds to both rows what only a step that is right has."""
        step, chosen = timing.Step(case, module, inputs), contexts(ours["mode"], self.backend)
        times = timing.time_in_turns(step, chosen, self.rounds, self.device)
        for row in (stock, ours):
            ms = statistics.median(times[row["impl"]])
            row |= {"ms": ms, "tflops": flop / ms / 1e9, "mfu": flop / ms * 1e3 / self.peak}
            with chosen[row["impl"]]():
                row |= {"peak_mib": timing.peak_mib(step, self.device)} | timing.attention_seen(step, self.device)
        speedup, least = measure.ratio_with_bound(times)
        ours |= {"speedup": speedup, "speedup_lower_95": least, "slowdown_upper_95": 1 / least - 1, "pairs": self.rounds}


def _failure(error):
    text = str(error).strip().splitlines() or [""]
    return {"impl": "flashsdpa", "note": f"failed: {type(error).__name__}: {text[0]}"}
