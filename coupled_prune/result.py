"""Results: masks, scores and exact counts of one projection.

In: the tensors that a projection left on its device. Out: numbers, lists and tables, when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ClusterResult:
    """One cluster after a projection.

    `chosen` and `sums` hold the masks and the sums of squares (None where a stored mask was applied) of
    one or more clusters, of which this one is at `where`; nothing is read before it is asked for.
    """

    key: str
    members: int
    channels: int
    score_type: str
    per_channel: int
    dtype: torch.dtype
    where: slice
    chosen: Tensor
    sums: Tensor | None

    @property
    def mask(self) -> Tensor:
        """bool (channels,): True where the channel was zeroed."""
        return self.chosen[self.where]

    @property
    def scores(self) -> Tensor | None:
        """Scores in the cluster's score type, float32 (float64 in a cluster with a float64 member), (channels,).

        `l2` is sqrt(S), `rms` sqrt(S / n), `param_cost` sqrt(S) / n, with n elements a channel in all
        voting members. `None` where a stored mask was applied.
        """
        if self.sums is None:
            return None
        n = max(self.per_channel, 1)
        scores = self.sums[self.where].to(self.dtype).sqrt()
        return scores / {"l2": 1, "rms": n**0.5, "param_cost": n}[self.score_type]

    @property
    def zero_channels(self) -> int:
        return int(torch.count_nonzero(self.mask))

    @property
    def ids(self) -> list[int]:
        """The zeroed channels as plain integers, ascending."""
        return self.mask.nonzero().squeeze(1).tolist()

    @property
    def nonfinite(self) -> list[int]:
        """Channels whose score is NaN or infinite; they are the last to be zeroed."""
        scores = self.scores
        return [] if scores is None else (~scores.isfinite()).nonzero().squeeze(1).tolist()


@dataclass(frozen=True, eq=False)
class ParameterResult:
    """One parameter after a projection: its literal zeros, whoever made them, of its elements."""

    parameter: Tensor
    name: str | None
    zero_elts: int
    numel: int

    @property
    def sparsity(self) -> float:
        return self.zero_elts / self.numel if self.numel else 0.0


class PruneResult(Mapping[str, ClusterResult]):
    """What one call did: a mapping from cluster key to `ClusterResult`, and exact element counts.

    `sparsity` is the share of literal zeros among all elements of all parameters, each counted once;
    the share of channels is in each cluster.
    """

    def __init__(
        self,
        clusters: Sequence[ClusterResult],
        parameters: Sequence[Tensor],
        names: Sequence[str | None],
        zeros: Tensor,
    ) -> None:
        self._clusters = {cluster.key: cluster for cluster in clusters}
        self._parameters, self._names, self._zeros = parameters, names, zeros

    @cached_property
    def parameters(self) -> list[ParameterResult]:
        """Each parameter once, however many clusters it belongs to."""
        return [
            ParameterResult(parameter, name, zero_elts, parameter.numel())
            for parameter, name, zero_elts in zip(self._parameters, self._names, self._zeros.tolist(), strict=True)
        ]

    def __getitem__(self, key: str) -> ClusterResult:
        return self._clusters[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clusters)

    def __len__(self) -> int:
        return len(self._clusters)

    @property
    def zero_elts(self) -> int:
        return sum(parameter.zero_elts for parameter in self.parameters)

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def sparsity(self) -> float:
        return self.zero_elts / self.numel if self.numel else 0.0

    def masks(self) -> dict[str, list[int]]:
        """Zeroed channel ids by cluster key, as plain integers: JSON goes out and in."""
        return {key: cluster.ids for key, cluster in self.items()}

    def __str__(self) -> str:
        rows = [("cluster", "members", "channels", "zeroed", "share")]
        notes = []
        for key, cluster in self.items():
            zeroed = cluster.zero_channels
            share = f"{zeroed / cluster.channels:.1%}"
            rows.append((key, str(cluster.members), str(cluster.channels), str(zeroed), share))
            if cluster.nonfinite:
                notes.append(f"{key}: channels with NaN or infinite scores: {shortened(cluster.nonfinite)}")
        total = f"{len(self.parameters)} parameters: {self.zero_elts:,} of {self.numel:,} elements are zero"
        return "\n".join([table(rows), *notes, f"{total} ({self.sparsity:.1%})"])


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows as aligned text; the first is the heading, the first column is flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]))
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def shortened(ids: list[int]) -> str:
    """A list of channel ids that stays on one line."""
    return ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
