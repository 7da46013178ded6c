"""The demo behind `python -m coupled_prune`: train a small transformer, prune its shared channels, report.

Read from top to bottom: data, model, training, clusters, report. Everything is made from one seed.
"""

from __future__ import annotations

import copy
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_kernels import backend
from coupled_prune.cluster import Cluster
from coupled_prune.plan import Path
from coupled_prune.prune import prune_
from coupled_prune.result import PruneResult

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
    steps: int = 400
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


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, a scalar; both arguments are int64 (batch, length)."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(model: nn.Module, data: Tensor, sizes: Sizes, seed: int = 0) -> Iterator[float]:
    """Train `model` in place on `data`, uint8 (bytes,); yields the loss of every step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1)
    rise = max(sizes.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, 1 - 0.95 * step / sizes.steps)
    )
    for _ in range(sizes.steps):
        starts = torch.randint(len(data) - sizes.context, (sizes.batch,), generator=generator)
        loss = loss_of(model, *windows(data, starts, sizes.context))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


@torch.no_grad()
def validation_loss(model: nn.Module, data: Tensor, sizes: Sizes) -> float:
    """Loss in nats per byte over windows spread evenly over `data`, uint8 (bytes,)."""
    starts = torch.linspace(0, len(data) - sizes.context - 1, sizes.validation_windows, dtype=torch.float64).long()
    return loss_of(model, *windows(data, starts, sizes.context)).item()


def clusters_of(model: nn.Module, sizes: Sizes, sparsity: float) -> list[Cluster]:
    """One cluster for the residual stream, and for each layer one of feed-forward channels and one of heads.

    A matrix that reads the stream holds the residual channels on its input axis (`Dim1Grouper`), one
    that writes it on its output axis (`Dim0Grouper`). Norm gains follow without a vote: their
    elements are near one and say nothing about how much a channel carries.
    """
    residual = {
        "embedding.weight": "Dim1Grouper",
        "*norm.weight": {"grouper": "Dim0Grouper", "scored": False},
        "*.attention.[qkv]*.weight": "Dim1Grouper",
        "*.attention.output.weight": "Dim0Grouper",
        "*.feed_forward.gate.weight": "Dim1Grouper",
        "*.feed_forward.up.weight": "Dim1Grouper",
        "*.feed_forward.down.weight": "Dim0Grouper",
        "unembedding.weight": "Dim1Grouper",
    }
    clusters = [Cluster.from_names(model, "residual", residual, sparsity)]
    for i in range(sizes.layers):
        feed_forward = {
            f"layers.{i}.feed_forward.gate.weight": "Dim0Grouper",
            f"layers.{i}.feed_forward.up.weight": "Dim0Grouper",
            f"layers.{i}.feed_forward.down.weight": "Dim1Grouper",
        }
        heads = {
            f"layers.{i}.attention.[qkv]*.weight": {"grouper": "AttentionHeadGrouperDim0", "num_heads": sizes.heads},
            f"layers.{i}.attention.output.weight": {"grouper": "AttentionHeadGrouperDim1", "num_heads": sizes.heads},
        }
        clusters.append(Cluster.from_names(model, f"layers.{i}.feed_forward", feed_forward, sparsity))
        clusters.append(Cluster.from_names(model, f"layers.{i}.heads", heads, sparsity))
    return clusters


@dataclass(frozen=True)
class Pruned:
    """A pruned copy of a model, what was done to it, and the milliseconds that the call took."""

    model: nn.Module
    result: PruneResult
    milliseconds: float


def pruned(model: nn.Module, sizes: Sizes, sparsity: float, path: Path, calls: int = 3) -> Pruned:
    """Prune copies of `model`, which stays as it is: one to warm up, then `calls`, of which the fastest counts."""
    runs = []
    for _ in range(1 + calls):
        twin = copy.deepcopy(model)
        clusters = clusters_of(twin, sizes, sparsity)
        start = time.perf_counter()
        result = prune_(clusters, path=path)
        runs.append(Pruned(twin, result, 1e3 * (time.perf_counter() - start)))
    return min(runs[1:], key=lambda run: run.milliseconds)


@dataclass(frozen=True)
class Report:
    """Validation losses in nats per byte around one projection, and the same projection on both paths."""

    before: float
    after: float
    fast: Pruned
    reference: Pruned

    @property
    def different(self) -> list[str]:
        """Clusters in which the two paths chose different channels."""
        fast, reference = self.fast.result.masks(), self.reference.result.masks()
        return [key for key in fast if fast[key] != reference[key]]

    @property
    def remark(self) -> str:
        """What the times mean."""
        if backend(torch.device("cpu")) == "triton":
            return "which says nothing: the Triton kernels ran in the interpreter"
        ratio = self.reference.milliseconds / self.fast.milliseconds
        return f"ratio {ratio:.1f} (at this size fixed costs rule; the ratio grows with the weights)"

    def __str__(self) -> str:
        fast, reference = self.fast.milliseconds, self.reference.milliseconds
        choice = (
            f"the fast and the reference path chose DIFFERENT channels in {', '.join(self.different)}"
            if self.different
            else f"the fast and the reference path chose the same channels in all {len(self.fast.result)} clusters"
        )
        losses = [
            f"validation loss {when} pruning: {loss:.4f} nats per byte (perplexity {math.exp(loss):.2f} per byte)"
            for when, loss in (("before", self.before), ("after ", self.after))
        ]
        return "\n".join(
            [
                str(self.fast.result),
                "",
                *losses,
                "One-shot pruning costs loss; pruning during training, then healing, is what keeps it: that comes with",
                "the optimizer in a later version.",
                "",
                choice,
                f"time: fast path {fast:.1f} ms, reference path {reference:.1f} ms, {self.remark}",
            ]
        )


def report(model: nn.Module, validation: Tensor, sizes: Sizes, sparsity: float) -> Report:
    """Prune copies of `model` on both paths; `validation` is uint8 (bytes,)."""
    fast, reference = (pruned(model, sizes, sparsity, path) for path in ("fast", "reference"))
    before, after = (validation_loss(m, validation, sizes) for m in (model, fast.model))
    return Report(before, after, fast, reference)
