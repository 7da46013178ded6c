"""Training of the demo: dense, or pruned on the way with `PruneOptimizer`; and what a model is worth.

In: a model and bytes. Out: the model trained in place, step by step, and its validation loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_prune.cluster import Cluster
from coupled_prune.demo.model import Sizes, windows
from coupled_prune.optimizer import PruneOptimizer
from coupled_prune.param_groups import get_param_groups


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, a scalar; both arguments are int64 (batch, length)."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Step:
    """One step of training: its loss in nats per byte, its phase, and the share of zeros after it."""

    loss: float
    phase: str
    sparsity: float


def pruning_optimizer(model: nn.Module, sizes: Sizes, sparsity: float) -> PruneOptimizer:
    """AdamW that prunes to `sparsity`: a tenth of the steps dense, half of them on the way, the rest to heal."""
    warmup = sizes.steps // 10
    return PruneOptimizer(
        torch.optim.AdamW(groups_of(model, sizes, sparsity), **ADAMW),
        warmup_steps=warmup,
        healing_start_step=max(warmup + 1, sizes.steps * 6 // 10),
    )


def dense_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """The same AdamW without pruning."""
    return torch.optim.AdamW(model.parameters(), **ADAMW)


ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor, sizes: Sizes, seed: int = 0
) -> Iterator[Step]:
    """Train `model` in place on `data`, uint8 (bytes,); yields every step."""
    generator = torch.Generator().manual_seed(seed)
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
        phase = optimizer.phase if isinstance(optimizer, PruneOptimizer) else "dense"
        optimizer.step()
        schedule.step()
        sparsity = optimizer.relative_sparsity if isinstance(optimizer, PruneOptimizer) else 0.0
        yield Step(loss.item(), phase, sparsity)


@torch.no_grad()
def validation_loss(model: nn.Module, data: Tensor, sizes: Sizes) -> float:
    """Loss in nats per byte over windows spread evenly over `data`, uint8 (bytes,)."""
    starts = torch.linspace(0, len(data) - sizes.context - 1, sizes.validation_windows, dtype=torch.float64).long()
    return loss_of(model, *windows(data, starts, sizes.context)).item()


def groups_of(model: nn.Module, sizes: Sizes, sparsity: float) -> list[dict[str, Any]]:
    """Parameter groups that prune the clusters of `clusters_of` while training.

    A matrix in two clusters has a stage for each: an up-projection holds residual channels on its columns
    and feed-forward channels on its rows.
    """

    def stage(key: str, grouper: str, **more: Any) -> dict[str, Any]:
        shared = {"min_sparsity": sparsity, "min_sparsity_schedule": True}
        return {"couple_key": key, "group_type": grouper, **shared, **more}

    def couple(*stages: dict[str, Any]) -> dict[str, Any]:
        nothing_by_itself = {"prox_type": "MinSparsityConstraint", "group_type": "LayerGrouper", "min_sparsity": 0.0}
        return {**nothing_by_itself, "coupled": list(stages)}

    reads, writes = stage("residual", "Dim1Grouper"), stage("residual", "Dim0Grouper")
    config = {
        ":.*embedding": couple(reads),
        ":.*norm": couple(stage("residual", "Dim0Grouper", scored=False)),
    }
    for i in range(sizes.layers):
        layer, heads, hidden = f":layers\\.{i}\\.", f"layers.{i}.heads", f"layers.{i}.feed_forward"
        on_rows = stage(heads, "AttentionHeadGrouperDim0", num_heads=sizes.heads)
        on_columns = stage(heads, "AttentionHeadGrouperDim1", num_heads=sizes.heads)
        config |= {
            f"{layer}attention\\.(query|key|value)": couple(reads, on_rows),
            f"{layer}attention\\.output": couple(writes, on_columns),
            f"{layer}feed_forward\\.(gate|up)": couple(reads, stage(hidden, "Dim0Grouper")),
            f"{layer}feed_forward\\.down": couple(writes, stage(hidden, "Dim1Grouper")),
        }
    return get_param_groups(model, config, verbose=False)


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
