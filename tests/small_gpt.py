"""A small GPT on real text, trained by stock attention, whose gradients ours must reproduce on the way.

Loss curves forgive a wrong gradient; so at some steps, on the same weights and the same batch, each parameter's gradient is
compared: ours may be as far from that of stock's math backend as twice stock's own flash backend is.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashsdpa


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


# Stock's fused backends beside flash.
FUSED = {"cpu": (), "cuda": (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)}


class GPT(nn.Module):
    """Of bytes: (batch, length) -> (batch, length, 256)."""

    def __init__(self, length, width, heads, layers):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text):
        return self.head(self.blocks(self.tokens(text) + self.places))


def check_gradients(device, dtype, steps=(0, 50, 200), batch=4, length=130, width=128, heads=2, layers=2):
    """Trains up to the last of `steps`, where gradients are compared. Returns the losses of the first and the last."""
    torch.manual_seed(0)
    model = GPT(length, width, heads, layers).to(device)
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def gradients(backend):
        with backend, torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    losses = []
    for step in range(steps[-1] + 1):
        starts = torch.randint(0, len(text) - length - 1, (batch,))
        inputs, targets = (torch.stack([text[s + shift : s + shift + length] for s in starts]) for shift in (0, 1))
        loss, flash = gradients(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        if step in steps:
            losses.append(loss.item())
            math = gradients(sdpa_kernel(SDPBackend.MATH))[1]
            with torch_flashsdpa.record_dispatch() as seen:
                ours = gradients(torch_flashsdpa.sdpa_backend("flashsdpa", strict=True))[1]
            launches = sum(row["count"] for row in seen.rows if row["kind"] == "launch")
            assert launches == 2 * layers, seen.rows  # a forward and a backward each
            # One backend's rounding may by chance be math's for one parameter: a bias's gradient is a sum, and on CUDA stock's
            # own other backends are then 3.5 times as far off.
            fused = [flash] + [gradients(sdpa_kernel(backend))[1] for backend in FUSED[torch.device(device).type]]
            for (name, _), a, c, *others in zip(model.named_parameters(), ours, math, *fused):
                stock = max((b - c).norm() for b in others)
                floor = 8 * torch.finfo(torch.float32).eps * c.norm()
                assert (a - c).norm() <= 2 * stock + floor, f"step {step}, {name}"
        for parameter, gradient in zip(model.parameters(), flash):
            parameter.grad = gradient
        optimizer.step()
    return losses[0], losses[-1]
