"""One coupled projection on demand: score all clusters, choose once, write all masks.

In: clusters. Out: the parameters pruned in place, and a `PruneResult`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coupled_prune import reference
from coupled_prune.budget import budget
from coupled_prune.cluster import Cluster
from coupled_prune.plan import ClusterPlan, Path, build_plan
from coupled_prune.projection import Projection
from coupled_prune.result import PruneResult
from coupled_prune.validate import check_clusters


def prune_(clusters: Cluster | Iterable[Cluster], path: Path = "auto") -> PruneResult:
    """Zero the weakest channels of every cluster, in place.

    All clusters score the same weights before anything is written, so their order changes nothing.
    `path`: "auto" takes views where they exist and the reference path elsewhere, "fast" refuses
    members without views, "reference" is the float64 oracle for all. On a GPU nothing waits for the
    device until a number of the result is read.

    Raises `ValueError` or `TypeError`, before any write, for anything invalid.
    """
    clusters = as_clusters(clusters)
    plan = build_plan(clusters, path)
    budgets = []
    for cluster_plan in plan.clusters:
        cluster, channels = cluster_plan.cluster, cluster_plan.channels
        budgets.append(budget(cluster.min_sparsity, channels, cluster.keep_multiple_of))
        if budgets[-1] == channels:
            warnings.warn(f"cluster {cluster.key!r}: all {channels} channels are zeroed", stacklevel=2)
    projection = Projection(plan)
    projection.measure()
    projection.select(budgets, reference.lowest if path == "reference" else None)
    projection.write()
    return projection.account(scored=True)


def apply_masks_(
    clusters: Cluster | Iterable[Cluster], masks: Mapping[str, Sequence[int]], path: Path = "auto"
) -> PruneResult:
    """Zero the channels named in `masks` (cluster key -> channel ids), in place, whatever their scores.

    `masks` is what `PruneResult.masks()` returned, here or on another copy of the model; every
    cluster needs an entry. Raises `ValueError` or `TypeError`, before any write.
    """
    clusters = as_clusters(clusters)
    if not isinstance(masks, Mapping):
        raise TypeError(f"masks must map cluster keys to channel ids, got {type(masks).__name__}")
    unknown = set(masks) - {cluster.key for cluster in clusters}
    if unknown:
        raise ValueError(f"masks name clusters that were not given: {', '.join(sorted(map(repr, unknown)))}")
    plan = build_plan(clusters, path)
    chosen = [_mask_of(cluster_plan, masks) for cluster_plan in plan.clusters]
    projection = Projection(plan)
    projection.measure()
    projection.choose(chosen)
    projection.write()
    return projection.account(scored=False)


def as_clusters(clusters: Cluster | Iterable[Cluster]) -> list[Cluster]:
    """One cluster or several as a validated list."""
    listed = list(clusters) if isinstance(clusters, Iterable) else [clusters]
    for cluster in listed:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"expected clusters, got {type(cluster).__name__}")
    check_clusters(listed)
    return listed


def _mask_of(cluster_plan: ClusterPlan, masks: Mapping[str, Sequence[int]]) -> Tensor:
    key, channels = cluster_plan.cluster.key, cluster_plan.channels
    if key not in masks:
        raise ValueError(f"cluster {key!r} has no entry in masks; an empty list leaves it as it is")
    mask = torch.zeros(channels, dtype=torch.bool, device="cpu")
    if not isinstance(masks[key], Sequence) or isinstance(masks[key], str):
        raise TypeError(f"cluster {key!r}: a mask is a list of channel ids, got {masks[key]!r}")
    for channel in masks[key]:
        if type(channel) is not int:
            raise TypeError(f"cluster {key!r}: channel ids are plain integers, got {channel!r}")
        if not 0 <= channel < channels:
            raise ValueError(f"cluster {key!r}: channel {channel} does not exist; it has channels 0 to {channels - 1}")
        mask[channel] = True
    return mask
