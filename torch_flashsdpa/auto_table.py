"""The table behind "auto": for recorded calls, how many times faster than stock ours was. tools/make_auto_table.py
writes it from benchmarks/results; the router looks a call up in it."""

import functools
import hashlib
import json
import warnings
from pathlib import Path

PATH = Path(__file__).parent / "data" / "auto_table.json"


@functools.cache
def _text():
    try:
        return PATH.read_text()
    except OSError as error:
        warnings.warn(f"torch_flashsdpa: the table of \"auto\" cannot be read ({error})", RuntimeWarning, stacklevel=2)
        return '{"rows": []}'


def rows():
    """Rows {device, isa, dtype, kind, dim, seq_q, seq_k, grad, ratio}; ratio is stock time over ours."""
    return json.loads(_text())["rows"]


@functools.cache
def digest():
    """A short name of the table's content: decisions of "auto" that were compiled depend on it."""
    return hashlib.sha256(_text().encode()).hexdigest()[:8]
