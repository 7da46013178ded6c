"""Clusters of real models: the one list of sizes that benchmarks measure.

Each entry builds the tensors of a model family at its real widths, with the number of layers cut so
that it fits a small machine, and couples them as the model does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coupled_prune import Cluster, Member


@dataclass(frozen=True)
class Decoder:
    """Widths of a Llama-style decoder; `vocabulary` rows of embedding (cut where the real one is huge)."""

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int


TINYLLAMA = Decoder(2048, 5632, 32, 4, 64, layers=2, vocabulary=16000)
QWEN = Decoder(896, 4864, 14, 2, 64, layers=4, vocabulary=32000)
LLAMA3 = Decoder(4096, 14336, 32, 8, 128, layers=1, vocabulary=4096)


def _decoder(size: Decoder, tensor: Callable[..., Tensor], sparsity: float) -> list[Cluster]:
    embedding, norm = tensor(size.vocabulary, size.hidden), tensor(size.hidden)
    residual = [Member(embedding, "Dim1Grouper"), Member(norm, "Dim0Grouper", scored=False)]
    clusters = []
    for layer in range(size.layers):
        q = tensor(size.heads * size.head_dim, size.hidden)
        k, v = (tensor(size.kv_heads * size.head_dim, size.hidden) for _ in "kv")
        o = tensor(size.hidden, size.heads * size.head_dim)
        gate, up = (tensor(size.feed_forward, size.hidden) for _ in range(2))
        down = tensor(size.hidden, size.feed_forward)
        residual += [Member(p, "Dim1Grouper") for p in (q, k, v, gate, up)]
        residual += [Member(p, "Dim0Grouper") for p in (o, down)]
        group = size.heads // size.kv_heads * size.head_dim
        heads = [Member(p, "AttentionHeadGrouperDim0", head_dim=size.head_dim) for p in (k, v)]
        heads += [Member(q, "AttentionHeadGrouperDim0", head_dim=group)]
        heads += [Member(o, "AttentionHeadGrouperDim1", head_dim=group)]
        clusters.append(Cluster(f"layers.{layer}.heads", heads, sparsity))
        hidden = [Member(gate, "Dim0Grouper"), Member(up, "Dim0Grouper"), Member(down, "Dim1Grouper")]
        clusters.append(Cluster(f"layers.{layer}.feed_forward", hidden, sparsity))
    return [Cluster("residual", residual, sparsity), *clusters]


def _encoder(
    width: int, layers: int, head_dim: int, tensor: Callable[..., Tensor], sparsity: float, conv1d: bool
) -> list[Cluster]:
    """GPT-2 (weights stored input by output) and ViT (output by input), both with packed q|k|v."""
    reads, writes = ("Dim0Grouper", "Dim1Grouper") if conv1d else ("Dim1Grouper", "Dim0Grouper")
    out = 1 if conv1d else 0  # dimension of the outputs of a weight

    def weight(outputs: int, inputs: int) -> Tensor:
        return tensor(inputs, outputs) if conv1d else tensor(outputs, inputs)

    residual, clusters = [Member(tensor(1024, width), "Dim1Grouper")], []
    for layer in range(layers):
        qkv, proj = weight(3 * width, width), weight(width, width)
        up, down = weight(4 * width, width), weight(width, 4 * width)
        qkv_bias, proj_bias, up_bias, down_bias = (tensor(n * width) for n in (3, 1, 4, 1))
        residual += [Member(p, reads) for p in (qkv, up)] + [Member(p, writes) for p in (proj, down)]
        residual += [Member(p, "Dim0Grouper", scored=False) for p in (proj_bias, down_bias)]
        heads = [
            Member(p, "AxisGrouper", axis=axis, block=head_dim, tiles=3, scored=p is qkv)
            for p, axis in ((qkv, out), (qkv_bias, 0))
        ]
        heads.append(Member(proj, "AxisGrouper", axis=1 - out, block=head_dim))
        clusters.append(Cluster(f"h.{layer}.heads", heads, sparsity))
        hidden = [Member(up, writes), Member(up_bias, "Dim0Grouper", scored=False), Member(down, reads)]
        clusters.append(Cluster(f"h.{layer}.feed_forward", hidden, sparsity))
    return [Cluster("residual", residual, sparsity), *clusters]


def _stream(size: Decoder, tensor: Callable[..., Tensor], sparsity: float) -> list[Cluster]:
    """The residual stream alone: the dense row of the table of figures."""
    return _decoder(size, tensor, sparsity)[:1]


MODELS: dict[str, Callable[[Callable[..., Tensor], float], list[Cluster]]] = {
    "tinyllama-1.1b": lambda tensor, s: _decoder(TINYLLAMA, tensor, s),
    "tinyllama-1.1b residual": lambda tensor, s: _stream(TINYLLAMA, tensor, s),
    "qwen2.5-0.5b": lambda tensor, s: _decoder(QWEN, tensor, s),
    "llama-3-8b": lambda tensor, s: _decoder(LLAMA3, tensor, s),
    "gpt-2": lambda tensor, s: _encoder(768, 12, 64, tensor, s, conv1d=True),
    "vit-b/16": lambda tensor, s: _encoder(768, 12, 64, tensor, s, conv1d=False),
}


def build(model: str, dtype: torch.dtype, sparsity: float = 0.25, device: str = "cpu") -> list[Cluster]:
    """Clusters of `model` with weights from a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        # A normal weight below 1e-30 would be a zero in disguise; real weights have none.
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    return MODELS[model](tensor, sparsity)


def parameters(clusters: list[Cluster]) -> list[Tensor]:
    """Each parameter once."""
    return list({id(m.parameter): m.parameter for cluster in clusters for m in cluster.members}.values())
