"""Explain: which path each member takes, and why, without touching a weight.

In: clusters. Out: their plan as a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coupled_prune.budget import budget
from coupled_prune.cluster import Cluster
from coupled_prune.plan import Path, Plan, build_plan
from coupled_prune.prune import as_clusters
from coupled_prune.result import table
from coupled_prune.validate import label


@dataclass(frozen=True, eq=False)
class Explanation:
    """What a call would do; prints as a table with one row a member."""

    plan: Plan

    def path_of(self, key: str, member: int) -> str:
        """Path of member number `member` of cluster `key`: "fast", "flat" or "reference"."""
        paths = {cluster.cluster.key: [m.path for m in cluster.members] for cluster in self.plan.clusters}
        return paths[key][member]

    def __str__(self) -> str:
        rows = [("cluster", "member", "shape", "dtype", "grouper", "vote", "path", "why")]
        for plan in self.plan.clusters:
            for i, m in enumerate(plan.members):
                member = m.member
                rows.append(
                    (
                        plan.cluster.key,
                        label(member, i) if member.name is None else member.name,
                        "x".join(map(str, member.shape)),
                        str(member.parameter.dtype).removeprefix("torch."),
                        member.grouper,
                        "yes" if member.scored else "no",
                        m.path,
                        m.reason,
                    )
                )
        lines = [table(rows)]
        for plan in self.plan.clusters:
            k = budget(plan.cluster.min_sparsity, plan.channels, plan.cluster.keep_multiple_of)
            lines.append(f"{plan.cluster.key}: {k} of {plan.channels} channels will be zeroed")
        return "\n".join(lines)


def explain(clusters: Cluster | Iterable[Cluster], path: Path = "auto") -> Explanation:
    """Which path each member takes in `prune_(clusters, path)`, and why.

    Raises what `prune_` would raise for the same clusters.
    """
    return Explanation(build_plan(as_clusters(clusters), path))
