"""What the public functions ask of their arguments before they look at a shape."""

import numbers

import torch


def check_tensors(*, any_layout=False, optional=False, **tensors):
    """TypeError for what is no tensor, RuntimeError for one without plain strided memory; None passes where `optional`."""
    for name, tensor in tensors.items():
        if tensor is None and optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {_short(tensor)}; give a tensor{' or None' if optional else ''}")
        if any_layout:
            continue
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise RuntimeError(f"{name} is nested or has layout {tensor.layout}; flashsdpa kernels take dense strided tensors")
        if tensor.is_quantized:
            raise RuntimeError(f"{name} is quantized ({tensor.dtype}); flashsdpa kernels take it dequantized")


def check_flags(**flags):
    """TypeError for what is no bool: any other value would pass for one, "no" for True."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, torch.SymBool)):
            raise TypeError(f"{name} is {_short(flag)}; give True or False")


def check_numbers(**named):
    """TypeError for what torch takes for no real number: it takes numpy's too, and tensors of one without a gradient."""
    for name, number in named.items():
        if isinstance(number, (int, float, torch.SymInt, torch.SymFloat, numbers.Real)):
            continue
        if not isinstance(number, torch.Tensor) or number.dim() > 0 or number.requires_grad or number.is_complex():
            raise TypeError(f"{name} is {_short(number)}; give a number")


def _short(value):
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 60 else f"a {type(value).__name__}"
