"""Data and model of the demo: Python's own sources, and a small byte-level transformer for them.

In: sizes and a seed. Out: bytes to train on and to validate with, and a model with its first weights.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
PACKAGES = ("asyncio", "email", "json")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model (`hidden` is the width of a feed-forward block) and of its training."""

    width: int = 192
    layers: int = 3
    heads: int = 8
    hidden: int = 512
    context: int = 128
    batch: int = 16
    steps: int = 300
    validation_windows: int = 256

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


QUICK = Sizes(width=64, layers=2, heads=4, hidden=160, context=64, batch=8, steps=40, validation_windows=32)


def read_sources(root: FilePath | None = None) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's own sources, the last tenth apart: two uint8 tensors, (bytes,).

    Raises `FileNotFoundError` where Python came without its sources.
    """
    root = root or FilePath(sysconfig.get_paths()["stdlib"])
    files = sorted([*root.glob("*.py"), *(file for package in PACKAGES for file in root.glob(f"{package}/*.py"))])
    text = b"\n".join(file.read_bytes() for file in files)
    if not text:
        raise FileNotFoundError(f"no Python sources in {root}; the demo trains on the standard library's")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (windows, context), of the windows of `data` at `starts`."""
    taken = data[starts.unsqueeze(1) + torch.arange(context + 1)].long()
    return taken[:, :-1], taken[:, 1:]


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    turns: Tensor  # cosines and sines, (2, context, head_dim / 2)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, sizes.width, bias=False)
        self.value = nn.Linear(sizes.width, sizes.width, bias=False)
        self.output = nn.Linear(sizes.width, sizes.width, bias=False)
        frequencies = 1e4 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(sizes.context), frequencies)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(self.rotated(query), self.rotated(key), value, is_causal=True)
        return self.output(heads.transpose(1, 2).flatten(-2))

    def rotated(self, x: Tensor) -> Tensor:
        """(batch, heads, length, head_dim), each pair of lanes turned by its position."""
        cos, sin = self.turns[:, : x.size(-2)]
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and feed-forward block, each reading the normed residual stream and adding to it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.feed_forward_norm = nn.RMSNorm(sizes.width)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Residual stream in and out: (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A byte-level transformer in the style of Llama; `seed` fixes its first weights."""

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.unembedding = nn.Linear(sizes.width, BYTES, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * sizes.width**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes, int64 (batch, length) -> logits of the next byte, (batch, length, 256)."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.unembedding(self.norm(x))
