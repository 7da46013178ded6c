"""One coupled projection: score all clusters, choose once, write all masks.

In: clusters. Out: the parameters pruned in place, and a `PruneResult`. The stages follow the data:
measure (read), select, write, account.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

import coupled_kernels
from coupled_prune import reference
from coupled_prune.budget import budget
from coupled_prune.cluster import Cluster
from coupled_prune.plan import ClusterPlan, Path, Plan, build_plan
from coupled_prune.result import ClusterResult, ParameterResult, PruneResult
from coupled_prune.validate import check_clusters


def prune_(clusters: Cluster | Iterable[Cluster], path: Path = "auto") -> PruneResult:
    """Zero the weakest channels of every cluster, in place.

    All clusters score the same weights before anything is written, so their order changes nothing.
    `path`: "auto" takes views where they exist and the reference path elsewhere, "fast" refuses
    members without views, "reference" is the float64 oracle for all.

    Raises `ValueError` or `TypeError`, before any write, for anything invalid.
    """
    clusters = as_clusters(clusters)
    plan = build_plan(clusters, path)
    sums, zeros = _measure(plan)
    chosen = torch.zeros(plan.channels, dtype=torch.bool, device=sums[0].device if sums else None)
    for cluster_plan, scores in zip(plan.clusters, sums, strict=True):
        cluster = cluster_plan.cluster
        k = budget(cluster.min_sparsity, cluster_plan.channels, cluster.keep_multiple_of)
        if k == cluster_plan.channels:
            warnings.warn(f"cluster {cluster.key!r}: all {k} channels are zeroed", stacklevel=2)
        lowest = reference.lowest if path == "reference" else coupled_kernels.lowest
        chosen[cluster_plan.slice] = lowest(scores, k)
    _write(plan, chosen, zeros)
    return _account(plan, sums, chosen, zeros)


def apply_masks_(
    clusters: Cluster | Iterable[Cluster], masks: Mapping[str, Sequence[int]], path: Path = "auto"
) -> PruneResult:
    """Zero the channels named in `masks` (cluster key -> channel ids), in place, without scoring.

    `masks` is what `PruneResult.masks()` returned, here or on another copy of the model; every
    cluster needs an entry. Raises `ValueError` or `TypeError`, before any write.
    """
    clusters = as_clusters(clusters)
    plan = build_plan(clusters, path)
    unknown = set(masks) - {cluster.key for cluster in clusters}
    if unknown:
        raise ValueError(f"masks name clusters that were not given: {', '.join(map(repr, sorted(unknown)))}")
    chosen = torch.cat([_mask_of(cluster_plan, masks) for cluster_plan in plan.clusters])
    _, zeros = _measure(plan)
    _write(plan, chosen, zeros)
    return _account(plan, None, chosen, zeros)


def as_clusters(clusters: Cluster | Iterable[Cluster]) -> list[Cluster]:
    """One cluster or several as a validated list."""
    listed = [clusters] if isinstance(clusters, Cluster) else list(clusters)
    for cluster in listed:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"expected clusters, got {type(cluster).__name__}")
    check_clusters(listed)
    return listed


def _mask_of(cluster_plan: ClusterPlan, masks: Mapping[str, Sequence[int]]) -> Tensor:
    key, channels = cluster_plan.cluster.key, cluster_plan.channels
    if key not in masks:
        raise ValueError(f"cluster {key!r} has no entry in masks; an empty list leaves it as it is")
    mask = torch.zeros(channels, dtype=torch.bool)
    for channel in masks[key]:
        if type(channel) is not int:
            raise TypeError(f"cluster {key!r}: channel ids are plain integers, got {channel!r}")
        if not 0 <= channel < channels:
            raise ValueError(f"cluster {key!r}: channel {channel} does not exist; it has channels 0 to {channels - 1}")
        mask[channel] = True
    return mask


@torch.no_grad()
def _measure(plan: Plan) -> tuple[list[Tensor], list[int]]:
    """Sum of squares of each cluster's channels, in its ranking dtype, and zeros of each parameter."""
    zeros = [0] * len(plan.parameters)
    device = plan.parameters[0].device if plan.parameters else None
    scores = torch.zeros(plan.channels, dtype=torch.float64, device=device)
    coupled_kernels.measure([*plan.pieces, *plan.fillers], plan.parameters, scores, zeros)
    sums = []
    for cluster in plan.clusters:
        if cluster.flat:
            sums.append(
                coupled_kernels.measure_flat(cluster.flat, plan.parameters, cluster.channels, cluster.dtype, zeros)
            )
            continue
        for m in cluster.members:
            if m.path == "reference" and m.member.scored:
                scores[cluster.slice] += reference.square_sums(m.member.tensor, m.member.grouper, m.member.arguments)
        sums.append(scores[cluster.slice].to(cluster.dtype))
    return sums, zeros


@torch.no_grad()
def _write(plan: Plan, chosen: Tensor, zeros: list[int]) -> None:
    coupled_kernels.write(plan.pieces, plan.parameters, chosen, zeros)
    for cluster in plan.clusters:
        mask = chosen[cluster.slice]
        if cluster.flat:
            coupled_kernels.write_flat(cluster.flat, plan.parameters, mask, zeros)
        for m in cluster.members:
            if m.path == "reference":
                reference.zero_(m.member.tensor, m.member.grouper, m.member.arguments, mask)
    for parameter in plan.counted_afterwards:
        zeros[parameter] = reference.count_zeros(plan.parameters[parameter])


def _account(plan: Plan, sums: list[Tensor] | None, chosen: Tensor, zeros: list[int]) -> PruneResult:
    clusters = [
        ClusterResult(
            plan_.cluster.key,
            chosen[plan_.slice],
            None if sums is None else _scores(sums[i], plan_),
            len(plan_.members),
        )
        for i, plan_ in enumerate(plan.clusters)
    ]
    parameters = [
        ParameterResult(parameter, name, zero_elts, parameter.numel())
        for parameter, name, zero_elts in zip(plan.parameters, plan.names, zeros, strict=True)
    ]
    return PruneResult(clusters, parameters)


def _scores(sums: Tensor, plan: ClusterPlan) -> Tensor:
    n = max(plan.per_channel, 1)
    scores = sums.sqrt()
    return {"l2": scores, "rms": scores / n**0.5, "param_cost": scores / n}[plan.cluster.score_type]
