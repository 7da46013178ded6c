"""One coupled projection: score all clusters, choose once, write all masks.

In: clusters. Out: the parameters pruned in place, and a `PruneResult`. The stages follow the data:
measure (read), select, write, account.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coupled_kernels import lowest, make_step, measure_flat, write_flat
from coupled_prune import reference
from coupled_prune.budget import budget
from coupled_prune.cluster import Cluster
from coupled_prune.plan import ClusterPlan, Path, Plan, build_plan
from coupled_prune.result import ClusterResult, PruneResult
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
    projection = _Projection(plan)
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
    projection = _Projection(plan)
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


class _Projection:
    """One plan at work. Clusters with a segment share one score vector; those on the flat path have their own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = plan.parameters[0].device if plan.parameters else torch.device("cpu")
        # What is only counted needs a step as well.
        work = plan.pieces or plan.fillers
        self.step = make_step(plan.pieces, plan.fillers, plan.parameters, plan.segments) if work else None
        self.zeros = torch.zeros(len(plan.parameters), dtype=torch.int64, device=self.device)
        self.flat_scores: dict[str, Tensor] = {}
        self.flat_chosen: dict[str, Tensor] = {}

    def measure(self) -> None:
        """Sums of squares: `scores`, float64, of all segments; `flat_scores` of the other clusters."""
        plan = self.plan
        if self.step:
            self.scores = self.step.measure()
        else:
            channels = sum(segment.channels for segment in plan.segments)
            self.scores = torch.zeros(channels, dtype=torch.float64, device=self.device)
        for cluster in plan.clusters:
            if not cluster.segment:
                self.flat_scores[cluster.cluster.key] = measure_flat(
                    cluster.flat, plan.parameters, cluster.channels, cluster.dtype, self.zeros
                )
                continue
            for m in cluster.members:
                if m.path == "reference" and m.member.scored:
                    sums = reference.square_sums(m.member.tensor, m.member.grouper, m.member.arguments)
                    self.scores[cluster.segment.slice] += sums

    def select(self, budgets: Sequence[int], oracle: Callable[[Tensor, int], Tensor] | None) -> None:
        """Choose the lowest scores, `budgets` in the order of the clusters; with `oracle` where there is one."""
        self.untouched = {c.cluster.key for c, k in zip(self.plan.clusters, budgets, strict=True) if k == 0}
        in_segments = [k for cluster, k in zip(self.plan.clusters, budgets, strict=True) if cluster.segment]
        if self.step:
            self.chosen = self.step.select(self.scores, in_segments)
        else:
            self.chosen = torch.zeros(self.scores.shape, dtype=torch.bool, device=self.device)
            for segment, k in zip(self.plan.segments, in_segments, strict=True):
                ranked = self.scores[segment.slice].to(segment.dtype)
                self.chosen[segment.slice] = (oracle or lowest)(ranked, k)
        for cluster, k in zip(self.plan.clusters, budgets, strict=True):
            if not cluster.segment:
                self.flat_chosen[cluster.cluster.key] = lowest(self.flat_scores[cluster.cluster.key], k)

    def choose(self, masks: Sequence[Tensor]) -> None:
        """Take masks, bool (channels,), in the order of the clusters."""
        vector = [torch.zeros(0, dtype=torch.bool, device="cpu")]
        self.untouched = {c.cluster.key for c, mask in zip(self.plan.clusters, masks, strict=True) if not mask.any()}
        for cluster, mask in zip(self.plan.clusters, masks, strict=True):
            if cluster.segment:
                vector.append(mask)
            else:
                self.flat_chosen[cluster.cluster.key] = mask.to(self.device)
        self.chosen = torch.cat(vector).to(self.device)

    def write(self) -> None:
        """Write all masks; `zeros` becomes the number of literal zeros of each parameter."""
        plan = self.plan
        if self.step:
            self.step.write(self.chosen, self.zeros)
            self._tell_autograd()
        for cluster in plan.clusters:
            if cluster.cluster.key in self.untouched:
                continue
            if not cluster.segment:
                write_flat(cluster.flat, plan.parameters, self.flat_chosen[cluster.cluster.key], self.zeros)
                continue
            for m in cluster.members:
                if m.path == "reference":
                    mask = self.chosen[cluster.segment.slice]
                    reference.zero_(m.member.tensor, m.member.grouper, m.member.arguments, mask)
        for parameter in plan.counted_afterwards:
            self.zeros[parameter] = reference.count_zeros(plan.parameters[parameter])

    def _tell_autograd(self) -> None:
        """Kernels write behind torch's back: a graph that saved a weight has to notice."""
        written = {
            m.parameter
            for cluster in self.plan.clusters
            for m in cluster.members
            if m.pieces and cluster.cluster.key not in self.untouched
        }
        tensors = (self.plan.parameters[parameter] for parameter in written)
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])

    def account(self, scored: bool) -> PruneResult:
        """Results that read the device only when they are read themselves."""
        clusters = []
        for cluster in self.plan.clusters:
            key = cluster.cluster.key
            if cluster.segment:
                chosen, sums, where = self.chosen, self.scores, cluster.segment.slice
            else:
                chosen, sums, where = self.flat_chosen[key], self.flat_scores[key], slice(None)
            clusters.append(
                ClusterResult(
                    key=key,
                    members=len(cluster.members),
                    channels=cluster.channels,
                    score_type=cluster.cluster.score_type,
                    per_channel=cluster.per_channel,
                    dtype=cluster.dtype,
                    where=where,
                    chosen=chosen,
                    sums=sums if scored else None,
                )
            )
        return PruneResult(clusters, self.plan.parameters, self.plan.names, self.zeros)
