"""The matrix (matrix.py) on the GPU: pairs of all options that its kernels serve, and the refusal of each that they do not."""

import matrix
import pytest
from covering import all_pairs, forbidden_pairs
from hopper import needs_hopper, on_the_gpu_with_gradients  # noqa: F401

pytestmark = needs_hopper
SERVED = 0.7  # at least this share of the pairs that the CPU serves


@pytest.mark.parametrize("number", range(2))
def test_every_pair_of_options(number):
    assert matrix.hold_all(matrix.served_rows("cuda", number), "cuda") > 200


def test_every_fault_beside_every_option():
    """Those of the CPU, and what only the CPU serves."""
    assert matrix.hold_all(matrix.refused_rows("cuda", 0), "cuda") > 200


def test_most_pairs_are_served():
    pairs = {device: all_pairs(matrix.options_on(device) | {"fault": ("",)}, forbidden_pairs(matrix.OPTIONS, matrix.rules_on(device)))
             for device in ("cpu", "cuda")}
    assert len(pairs["cuda"] & pairs["cpu"]) > SERVED * len(pairs["cpu"])
