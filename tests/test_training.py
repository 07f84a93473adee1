"""A small GPT on real text: gradients as in training, beside stock's."""

import torch
from small_gpt import check_gradients


def test_gradients_of_a_small_gpt():
    first, last = check_gradients("cpu", torch.float32)
    assert last < 0.75 * first  # it did learn


def test_gradients_of_a_small_gpt_in_bfloat16():
    check_gradients("cpu", torch.bfloat16, steps=(0, 5))
