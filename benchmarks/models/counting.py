"""What a step has to compute: the FLOP of its matrix products, and of its attention over the pairs that take part."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from torch_flashsdpa.profiling import replay


class WithoutAttention(TorchFunctionMode):
    """Counts calls of scaled_dot_product_attention and their FLOP. In their place it puts a sum that has their shape and passes
    gradients on, so that whoever counts the step sees everything else, whichever kernel would have served."""

    def __init__(self):
        super().__init__()
        self.calls, self.flop = 0, 0.0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self._attention(*args, **(kwargs or {}))

    def _attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **_):
        self.calls += 1
        keep = attn_mask
        if keep is not None and keep.dtype != torch.bool:
            keep = keep > torch.finfo(keep.dtype).min  # transformers writes the least number where others write -inf
        shapes = {"query": query, "key": key, "value": value}
        call = SimpleNamespace(**{name: SimpleNamespace(shape=t.shape) for name, t in shapes.items()}, is_causal=is_causal,
                               needs_grad=False)  # fmt: skip
        self.flop += replay.flop(call, keep)
        given = (query, key, value) + ((attn_mask,) if attn_mask is not None and attn_mask.requires_grad else ())
        return sum(t.sum() for t in given).expand(*query.shape[:-1], value.size(-1))


def count(case, module, inputs):
    """(FLOP of a step, calls of attention in its forward). Model FLOP: attention's backward is
    twice its forward, without the scores that it computes once more; padding counts in the matrix products alone."""
    module.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as products, WithoutAttention() as attention, torch.set_grad_enabled(case.train):
        result = case.result(module, **inputs)
        if case.train:
            result.backward()
    module.zero_grad(set_to_none=True)
    return products.get_total_flops() + attention.flop * (3 if case.train else 1), attention.calls
