"""Metrics: how much of the regularized parameters is zero, from counts that the projections took.

In: the outcome of a pruning step. Out: `state[p]["sparsity_frac"]` and the two totals. Everything stays on
the device until a number is read; what a step skipped keeps its last value.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from coupled_prune import reference
from coupled_prune.pruner import Outcome
from coupled_prune.stages import Stages

State = MutableMapping[Tensor, dict[str, Any]]


class Metrics:
    """Totals of the last step in which every stage ran; `step` is the number of steps that were done then."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._zeros: list[Tensor | int] = []
        self._numel = self._factored = self._unfactored = 0

    @staticmethod
    def create(stages: Stages, state: State) -> None:
        """Give every parameter its keys: checkpoints need the same ones at any time."""
        for stage in stages.ordinary:
            for member in stage.members if stage.kind.svd else ():
                packed = member.arguments.get("npack", 1)
                count = torch.zeros(packed, dtype=torch.int32, device=member.parameter.device)
                state[member.parameter].setdefault("sv_count", count)
        for p in stages.parameters:
            if "sparsity_frac" not in state[p]:
                state[p]["sparsity_frac"] = reference.count_zeros(p).double() / max(p.numel(), 1)

    def record(self, state: State, outcome: Outcome, step: int, all_ran: bool) -> None:
        """Take the outcome of a step; the totals change only if every stage ran."""
        zeros: list[Tensor | int] = []
        numel = factored = unfactored = 0
        for p, rank in outcome.ranks:
            state[p]["sv_count"] = rank.count
            left = int(rank.count.sum())
            state[p]["sparsity_frac"] = torch.tensor(1 - left / rank.values, dtype=torch.float64, device=p.device)
            size = (rank.rows + rank.cols) * left
            zeros.append(max(p.numel() - size, 0))
            factored, unfactored = factored + size, unfactored + p.numel()
        for counts in outcome.counts:
            for p, fraction in zip(counts.parameters, (counts.zeros / counts.sizes).unbind(), strict=True):
                state[p]["sparsity_frac"] = fraction
            zeros.append(counts.zeros.sum())
            numel += sum(p.numel() for p in counts.parameters)
        if all_ran:
            self.step, self._zeros, self._numel = step, zeros, numel + unfactored
            self._factored, self._unfactored = factored, unfactored

    @property
    def relative_sparsity(self) -> float:
        """Zeros among all elements; of a matrix by singular values, what its factors save."""
        return sum(map(int, self._zeros)) / self._numel if self._numel else 0.0

    @property
    def relative_factored_frac(self) -> float:
        """Elements of the factors among those of all matrices by singular values."""
        return self._factored / self._unfactored if self._unfactored else 0.0
