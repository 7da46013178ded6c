"""One pruning step's projections: ordinary ones first, then the coupled ones on their result.

In: what is due. Out: parameters projected in place, and an `Outcome`. Plans are kept for every set of
clusters that was due together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coupled_prune import ordinary, reference
from coupled_prune.budget import budget
from coupled_prune.cluster import Cluster
from coupled_prune.ordinary import Due
from coupled_prune.plan import Plan, build_plan
from coupled_prune.projection import Projection
from coupled_prune.stages import Coupled
from coupled_prune.svd import Rank


@dataclass(frozen=True, eq=False)
class Counts:
    """Literal zeros, int64, of parameters with `sizes` elements, float64, each once: both (parameters,)."""

    parameters: list[Tensor]
    zeros: Tensor
    sizes: Tensor


@dataclass
class Outcome:
    """What one step's projections left.

    `counts`: literal zeros, by device. `ranks`: by parameter. `masks`: bool (channels,) by cluster key. `zeros` are
    the counts of each batch; a later one replaces what an earlier one says of the same parameter.
    """

    counts: list[Counts] = field(default_factory=list)
    zeros: list[tuple[Sequence[Tensor], Tensor]] = field(default_factory=list)
    ranks: list[tuple[Tensor, Rank]] = field(default_factory=list)
    masks: dict[str, Tensor] = field(default_factory=dict)


class Pruner:
    """Runs stages; `before_write` sees every projection that zeroes whole channels before it does."""

    def __init__(self) -> None:
        self._plans: dict[tuple, list[Plan]] = {}
        self._latest: dict[tuple, tuple[list[Tensor], Tensor, Tensor]] = {}
        self._all_zeroed: set[str] = set()

    def run(
        self,
        ordinary_due: Sequence[Due],
        coupled_due: Sequence[tuple[Coupled, float]],
        before_write: Callable[[Projection], None],
    ) -> Outcome:
        """Project in place; a coupled stage comes with its effective target."""
        outcome = Outcome()
        budgeted = [due for due in ordinary_due if due.stage.kind.channels]
        pools: list[Sequence[Cluster]] = []
        for due in budgeted:
            together = due.stage.prox_type == "GlobalMinSparsityConstraint"
            pools += [due.stage.clusters] if together else [(cluster,) for cluster in due.stage.clusters]
        for plan in self._plans_of(pools):
            projection = Projection(plan)
            self._warn(plan, ordinary.choose_channels(projection, budgeted))
            self._write(projection, before_write, outcome)
        for due in ordinary_due:
            self._run_other(due, outcome)

        targets = {stage.cluster.key: target for stage, target in coupled_due}
        for plan in self._plans_of([(stage.cluster,) for stage, _ in coupled_due]):
            projection = Projection(plan)
            projection.measure()
            budgets = [
                budget(targets[planned.cluster.key], planned.channels, planned.cluster.keep_multiple_of)
                for planned in plan.clusters
            ]
            self._warn(plan, budgets)
            projection.select(budgets)
            self._write(projection, before_write, outcome)
        outcome.counts = [self._counts(outcome, device) for device in {zeros.device for _, zeros in outcome.zeros}]
        return outcome

    def _counts(self, outcome: Outcome, device: torch.device) -> Counts:
        batches = [(parameters, zeros) for parameters, zeros in outcome.zeros if zeros.device == device]
        counted = [p for parameters, _ in batches for p in parameters]
        key = tuple(map(id, counted))
        if key not in self._latest:
            places = {id(p): place for place, p in enumerate(counted)}
            parameters = [counted[place] for place in places.values()]
            sizes = torch.tensor([p.numel() for p in parameters], dtype=torch.float64, device="cpu").clamp_(min=1)
            index = torch.tensor(list(places.values()), device="cpu")
            self._latest[key] = parameters, index.to(device), sizes.to(device)
        parameters, index, sizes = self._latest[key]
        return Counts(parameters, torch.cat([zeros for _, zeros in batches])[index], sizes)

    def _run_other(self, due: Due, outcome: Outcome) -> None:
        prox_type, parameters = due.stage.prox_type, [member.parameter for member in due.stage.members]
        if prox_type == "ProxGroupLasso":
            for plan in self._plans_of([(cluster,) for cluster in due.stage.clusters]):
                projection = Projection(plan)
                ordinary.shrink_channels_(projection, due)
                outcome.zeros.append((plan.parameters, projection.zeros))
        elif due.stage.kind.svd:
            outcome.ranks += ordinary.project_ranks_(due)
        elif not due.stage.kind.channels and parameters:
            (ordinary.shrink_elements_ if prox_type == "ProxLasso" else ordinary.thin_elements_)(due)
            outcome.zeros += [([p], reference.count_zeros(p).view(1)) for p in parameters]

    @staticmethod
    def _write(projection: Projection, before_write: Callable[[Projection], None], outcome: Outcome) -> None:
        before_write(projection)
        projection.write()
        outcome.zeros.append((projection.plan.parameters, projection.zeros))
        outcome.masks.update(projection.masks())

    def _warn(self, plan: Plan, budgets: Sequence[int]) -> None:
        """Warn once of every pool that loses all of its channels."""
        for pool, k in zip(plan.ranked, budgets, strict=True):
            key, channels = pool[0].cluster.key, sum(planned.channels for planned in pool)
            if k == channels and key not in self._all_zeroed:
                self._all_zeroed.add(key)
                warnings.warn(f"cluster {key!r}: all {channels} channels are zeroed", stacklevel=6)

    def _plans_of(self, pools: Sequence[Sequence[Cluster]]) -> list[Plan]:
        """Plans, one a device, of clusters by pool."""
        key = tuple(tuple(map(id, pool)) for pool in pools)
        if key not in self._plans:
            by_device: dict[torch.device, list[Sequence[Cluster]]] = {}
            for pool in pools:
                if pool:
                    by_device.setdefault(pool[0].members[0].parameter.device, []).append(pool)
            self._plans[key] = [
                build_plan([cluster for pool in own for cluster in pool], pooled=[len(pool) for pool in own])
                for own in by_device.values()
            ]
        return self._plans[key]
