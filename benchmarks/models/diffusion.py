"""The attention blocks of a latent-diffusion UNet at its three resolutions: self-attention, then cross-attention to a text.
Written here, since the packages that have them are large; the calls are those of Stable Diffusion 1.5."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, Model, at_least_float32, with_random_weights

HEADS = {"full": 8, "small": 2}
CONTEXT, CONTEXT_LENGTH = {"full": 768, "small": 48}, 77  # the text encoder's output: 77 tokens
# Head dim: side of the latent image, (side * side) tokens.
SIDES = {"full": {40: 64, 80: 32, 160: 16}, "small": {40: 8, 80: 6, 160: 4}}
LATENTS = {"full": 16, "small": 2}
DEPTH = 2


class Attention(nn.Module):
    """Of `width` = heads * head dim, to tokens of `source` features."""

    def __init__(self, width, source, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(width, width, bias=False), *(nn.Linear(source, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x, source):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), self.k(source), self.v(source)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class UNetBlock(nn.Module):
    """Self-attention among the tokens of an image, cross-attention to the text, a gated MLP: x (batch, tokens, width)."""

    def __init__(self, width, context, heads):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself, self.text = Attention(width, width, heads), Attention(width, context, heads)
        self.gated, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x, context):
        normed = self.norms[0](x)
        x = x + self.itself(normed, normed)
        x = x + self.text(self.norms[1](x), context)
        value, gate = self.gated(self.norms[2](x)).chunk(2, -1)
        return x + self.out(value * F.gelu(gate))


class UNetBlocks(nn.Module):
    def __init__(self, width, context, heads):
        super().__init__()
        self.blocks = nn.ModuleList(UNetBlock(width, context, heads) for _ in range(DEPTH))

    def forward(self, x, context):
        for block in self.blocks:
            x = block(x, context)
        return x


def latents(size, dim):
    tokens = SIDES[size][dim] ** 2
    return {"x": torch.randn(LATENTS[size], tokens, HEADS[size] * dim),
            "context": torch.randn(LATENTS[size], CONTEXT_LENGTH, CONTEXT[size])}  # fmt: skip


def noisy_latents(size, dim):
    inputs = latents(size, dim)
    return inputs | {"noise": torch.randn_like(inputs["x"])}


def features(module, x, context):
    return module(x, context)


def noise_loss(module, x, context, noise):
    return F.mse_loss(at_least_float32(module(x, context)), at_least_float32(noise))


def make(size, dim):
    return with_random_weights(UNetBlocks(HEADS[size] * dim, CONTEXT[size], HEADS[size])), "none"


CASES = []
for _dim in SIDES["full"]:
    _model = Model(f"unet-d{_dim}", partial(make, dim=_dim), ("UNetBlock",), ())
    CASES += [Case(_model, "train", partial(noisy_latents, dim=_dim), noise_loss, train=True),
              Case(_model, "infer", partial(latents, dim=_dim), features, train=False)]  # fmt: skip
