"""A plan at work. The stages follow the data: measure (read), select, write, account.

In: a `Plan`. Out: the parameters projected in place, and a `PruneResult`, which reads the device only when
it is read itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from coupled_kernels import lowest, make_step, measure_flat, scale_flat, write_flat
from coupled_prune import reference
from coupled_prune.plan import ClusterPlan, Plan
from coupled_prune.result import ClusterResult, PruneResult


class Projection:
    """One plan at work. Clusters with a segment share one score vector; those on the flat path have their own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = plan.parameters[0].device if plan.parameters else torch.device("cpu")
        # What is only counted needs a step as well.
        work = plan.pieces or plan.fillers
        self.step = make_step(plan.pieces, plan.fillers, plan.parameters, plan.segments, plan.pools) if work else None
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

    def weigh(self, weights: Sequence[float]) -> None:
        """Multiply the sums of every cluster by a weight, so that clusters of one pool compare."""
        in_segments = [torch.empty(0, dtype=torch.float64, device="cpu")]
        for cluster, weight in zip(self.plan.clusters, weights, strict=True):
            if cluster.segment:
                in_segments.append(torch.full((cluster.channels,), weight, dtype=torch.float64, device="cpu"))
            else:
                self.flat_scores[cluster.cluster.key] *= weight
        self.scores *= torch.cat(in_segments).to(self.device, non_blocking=True)

    def select(self, budgets: Sequence[int], oracle: Callable[[Tensor, int], Tensor] | None = None) -> None:
        """Choose the lowest scores, `budgets` in the order of the pools; with `oracle` where there is one."""
        ranked = list(zip(self.plan.ranked, budgets, strict=True))
        self.untouched = {cluster.cluster.key for clusters, k in ranked for cluster in clusters if k == 0}
        in_segments = [k for clusters, k in ranked if clusters[0].segment]
        if self.step:
            self.chosen = self.step.select(self.scores, in_segments)
        else:
            self.chosen = torch.zeros(self.scores.shape, dtype=torch.bool, device=self.device)
            for pool, k in zip(self.plan.pools, in_segments, strict=True):
                self.chosen[pool.slice] = (oracle or lowest)(self.scores[pool.slice].to(pool.dtype), k)
        for clusters, k in ranked:
            if not clusters[0].segment:
                keys = [cluster.cluster.key for cluster in clusters]
                scores = [self.flat_scores[key] for key in keys]
                mask = lowest(torch.cat(scores) if len(scores) > 1 else scores[0], k)
                self.flat_chosen.update(zip(keys, mask.split([len(s) for s in scores]), strict=True))

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

    def scale(self, factor: Callable[[Tensor], Tensor]) -> None:
        """Multiply every channel by `factor` of its sum of squares; `zeros` are counted when all is written.

        `factor` maps the sums of all clusters one after the other, (channels,), to as many factors.
        """
        plan, self.untouched = self.plan, set()
        factors = factor(torch.cat([self._sums(cluster).double() for cluster in plan.clusters]))
        by_cluster = factors.split([cluster.channels for cluster in plan.clusters])
        if self.step:
            in_segments = [f for f, cluster in zip(by_cluster, plan.clusters, strict=True) if cluster.segment]
            self.step.scale(torch.cat(in_segments))
            self._tell_autograd()
        for cluster, own in zip(plan.clusters, by_cluster, strict=True):
            for m in cluster.members:
                if m.flat:
                    scale_flat(m.flat, plan.parameters, own.to(cluster.dtype))
                elif m.path == "reference":
                    reference.scale_(m.member.tensor, m.member.grouper, m.member.arguments, own)
        self.zeros = torch.stack([reference.count_zeros(parameter) for parameter in plan.parameters])

    def _sums(self, cluster: ClusterPlan) -> Tensor:
        return self.scores[cluster.segment.slice] if cluster.segment else self.flat_scores[cluster.cluster.key]

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

    def masks(self) -> dict[str, Tensor]:
        """Chosen channels of every cluster, bool (channels,), by its key."""
        return {
            cluster.cluster.key: self.chosen[cluster.segment.slice]
            if cluster.segment
            else self.flat_chosen[cluster.cluster.key]
            for cluster in self.plan.clusters
        }

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
