"""Peers: other ways to do the same projection, called alike.

In: validated clusters. Out: number of literal zeros after the projection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coupled_prune import Cluster, Member, budget, prune_


def coupled_prune_fast(clusters: list[Cluster]) -> int:
    return prune_(clusters, path="fast").zero_elts


def reference(clusters: list[Cluster]) -> int:
    return prune_(clusters, path="reference").zero_elts


@torch.no_grad()
def torchao_sequence(clusters: list[Cluster]) -> int:
    """TorchAO's dense operations: float32 copy, norm of a channel-major view, top-k, index write, `== 0`.

    Heads are taken as views, which spares this peer the copies TorchAO makes of them.
    """
    chosen: list[Tensor] = []
    for cluster in clusters:
        total: Tensor | float = 0.0
        for member in cluster.members:
            if member.scored:
                matrix = _channel_major(member).float()
                total = total + torch.linalg.vector_norm(matrix, dim=tuple(range(1, matrix.dim()))).square()
        scores = torch.as_tensor(total).sqrt()
        k = budget(cluster.min_sparsity, scores.numel())
        chosen.append(torch.topk(scores, k, largest=False, sorted=False).indices)
    zeros = 0
    counted: set[int] = set()
    for cluster, index in zip(clusters, chosen, strict=True):
        for member in cluster.members:
            _channel_major(member)[index] = 0.0
    for cluster in clusters:
        for member in cluster.members:
            if id(member.parameter) not in counted:
                counted.add(id(member.parameter))
                zeros += int((member.parameter == 0).sum())
    return zeros


def _channel_major(member: Member) -> Tensor:
    """A view with the channels first."""
    x, arguments = member.tensor, member.arguments
    if member.grouper in ("Dim0Grouper", "Dim1Grouper"):
        x = x.unsqueeze(1) if x.dim() == 1 else x
        return x.flatten(1).t() if member.grouper == "Dim1Grouper" else x
    axis = arguments.get("axis", 1 if member.grouper.endswith("1") else 0)
    block, tiles = arguments.get("block", arguments.get("head_dim", 1)), arguments.get("tiles", 1)
    packed = x.unflatten(axis, (tiles, x.size(axis) // (tiles * block), block))
    return packed.movedim(axis + 1, 0)


PEERS: dict[str, Callable[[list[Cluster]], int]] = {
    "coupled-prune": coupled_prune_fast,
    "torchao sequence": torchao_sequence,
    "reference": reference,
}
