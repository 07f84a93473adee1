"""What a benchmark of a whole model consists of, and what several models share."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Model:
    """A model of which some cases are measured.

    make(size) returns (module, the library it is from), in torch's default dtype on its default device. blocks: the classes of
    its repeated parts, of which mode "compiled" compiles each instance by itself.
    """

    name: str
    make: Callable
    blocks: tuple
    packages: tuple = ("transformers",)

    def missing(self):
        """The packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]

    def blocks_of(self, module):
        found = [part for part in module.modules() if type(part).__name__ in self.blocks]
        if not found:
            raise LookupError(f"{self.name} has no {' or '.join(self.blocks)}")
        return found


@dataclass(frozen=True)
class Case:
    """One step of a model.

    inputs(size) returns the tensors of the step by name, on torch's default device, floating ones in its default dtype.
    result(module, **inputs) returns the loss, a scalar, where `train`, else the output that a user of the model sees.
    """

    model: Model
    step: str
    inputs: Callable
    result: Callable
    train: bool

    @property
    def name(self):
        return f"{self.model.name}-{self.step}"

    @property
    def pass_name(self):
        return "fwd+bwd" if self.train else "fwd"


def transformers_model(model_class, config):
    """(module, library): of transformers, calling SDPA by its own name for it."""
    import transformers

    module = model_class._from_config(config, attn_implementation="sdpa", dtype=torch.get_default_dtype())
    return with_random_weights(module), f"transformers {transformers.__version__}"


def with_random_weights(module):
    """The module with weights under which attention matters: products keep the size of what they multiply, so that scores
    differ by about one, and tables of position biases have a spread of one."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "relative_position_bias" in name or "relative_attention_bias" in name:
                weight.normal_()
            elif weight.dim() > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
    return module


def real_lengths(batch, length):
    """How many tokens of each sequence are no padding: from all of them down to a share of 1 / batch."""
    return torch.arange(batch, 0, -1) * length // batch


def real_tokens(batch, length, padding):
    """(batch, length) bool: which tokens are no padding. padding: None, "right" or "left"."""
    real = torch.arange(length) < real_lengths(batch, length)[:, None]
    return {None: torch.ones_like(real), "right": real, "left": real.flip(1)}[padding]


def at_least_float32(tensor):
    """As losses want their inputs."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
