"""Stages: what the parameter groups ask for, as data.

In: validated settings (`settings` makes these). Out: nothing happens here; `optimizer` runs them, ordinary
projections first, coupled ones on their result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from coupled_prune.cluster import Cluster
from coupled_prune.member import Member

COUPLED = "CoupledMinSparsityConstraint"


@dataclass(frozen=True)
class ProxType:
    """A projection by TorchAO's name. `hard` ones have a budget, soft ones shrink by `reg_lambda * gamma`.

    `channels`: it zeroes whole channels, the weakest first, so that masks of channels say all.
    `svd`: it acts on singular values. `needs` is the setting that has no default.
    """

    hard: bool
    channels: bool = False
    svd: bool = False
    needs: str | None = None


PROX_TYPES = {
    "ProxLasso": ProxType(hard=False),
    "ProxGroupLasso": ProxType(hard=False),
    "ProxNuclearNorm": ProxType(hard=False, svd=True),
    "MinSparsityConstraint": ProxType(hard=True, channels=True, needs="min_sparsity"),
    "GlobalMinSparsityConstraint": ProxType(hard=True, channels=True, needs="min_sparsity"),
    COUPLED: ProxType(hard=True, channels=True, needs="min_sparsity"),
    "MinRankConstraint": ProxType(hard=True, svd=True, needs="min_sparsity"),
    "NMSparseConstraint": ProxType(hard=True, needs="n_nonzero"),
}


@dataclass(frozen=True, eq=False)
class Ordinary:
    """The projection of one parameter group, on each of its parameters that require a gradient.

    `members` are these with their groupers, `clusters` the same as clusters of one (of one channel where the
    grouper makes singular values). `ramped` is `min_sparsity_schedule`, `scales` what
    `score_group_count_ref` makes of the scores of each.
    """

    group: int
    prox_type: str
    clusters: tuple[Cluster, ...]
    prox_freq: int
    reg_lambda: float
    gamma_index_slope: float
    min_sparsity: float
    ramped: bool
    score_type: str
    scales: tuple[float, ...]
    n_nonzero: int
    through_heal: bool
    members: tuple[Member, ...]

    @property
    def kind(self) -> ProxType:
        return PROX_TYPES[self.prox_type]


@dataclass(frozen=True, eq=False)
class Coupled:
    """A cluster whose members come from any parameter groups; `ramped` is `min_sparsity_schedule`."""

    cluster: Cluster
    ramped: bool
    prox_freq: int


@dataclass(frozen=True, eq=False)
class Stages:
    """All stages of an optimizer."""

    ordinary: tuple[Ordinary, ...]
    coupled: tuple[Coupled, ...]

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """Every parameter that some stage projects, once."""
        return tuple({id(m.parameter): m.parameter for m in self._members()}.values())

    @cached_property
    def names(self) -> dict[int, str]:
        """Name of a parameter by its id."""
        return {id(m.parameter): m.name or "" for m in self._members()}

    @cached_property
    def memberships(self) -> dict[int, list[tuple[str, Member]]]:
        """By id of a parameter: cluster key and member of each projection of whole channels, in order."""
        memberships: dict[int, list[tuple[str, Member]]] = {id(p): [] for p in self.parameters}
        for cluster in self._channelwise():
            for member in cluster.members:
                memberships[id(member.parameter)].append((cluster.key, member))
        return memberships

    @cached_property
    def elementwise(self) -> frozenset[int]:
        """Ids of parameters with a projection that masks of channels do not describe."""
        members = (m for stage in self.ordinary if not stage.kind.channels for m in stage.members)
        return frozenset(id(member.parameter) for member in members)

    @cached_property
    def through_heal(self) -> frozenset[int]:
        """Ids of parameters whose projection is repeated during healing instead of freezing zeros."""
        return frozenset(id(m.parameter) for stage in self.ordinary if stage.through_heal for m in stage.members)

    def _channelwise(self) -> Sequence[Cluster]:
        ordinary = [cluster for stage in self.ordinary if stage.kind.channels for cluster in stage.clusters]
        return [*ordinary, *(stage.cluster for stage in self.coupled)]

    def _members(self) -> Sequence[Member]:
        clusters = [cluster for stage in self.ordinary for cluster in stage.clusters]
        clusters += [stage.cluster for stage in self.coupled]
        return [member for cluster in clusters for member in cluster.members]
