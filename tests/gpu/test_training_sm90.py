"""A small GPT on real text: gradients as in training, beside stock's."""

import pytest
import torch
from hopper import needs_hopper
from small_gpt import check_gradients

pytestmark = needs_hopper


@pytest.mark.parametrize("width, heads", ((128, 2), (256, 2), (512, 2)))  # head dims 64, 128, 256
def test_gradients_of_a_small_gpt(width, heads):
    first, last = check_gradients("cuda", torch.bfloat16, batch=8, length=515, width=width, heads=heads)
    assert last < 0.75 * first  # it did learn
