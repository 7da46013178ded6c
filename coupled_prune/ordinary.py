"""Ordinary projections: what one parameter group asks of its own parameters.

In: the stages that are due, with this step's targets and thresholds. Out: parameters projected in place
(channels chosen, where whole ones are zeroed). Channels go through views and kernels, single elements and
singular values through plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coupled_prune import reference
from coupled_prune.budget import budget
from coupled_prune.groupers import layout_of
from coupled_prune.member import Member
from coupled_prune.projection import Projection
from coupled_prune.stages import Ordinary
from coupled_prune.svd import Rank, groups_of, limit_ranks_, shrink_ranks_


@dataclass(frozen=True)
class Due:
    """A stage at one step: the effective `min_sparsity`, and `gamma`, the sum of learning rates so far."""

    stage: Ordinary
    target: float
    gamma: float | Tensor

    def threshold(self, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`reg_lambda * gamma` of each group of one tensor, (groups,).

        `gamma_index_slope` gives gamma half of an even rise from `1 - slope` to `1 + slope` over the groups.
        """
        slope = self.stage.gamma_index_slope
        rise = torch.ones(groups, device=device)
        if slope:
            rise = torch.linspace(1 - slope, 1 + slope, groups, device=device).div_(2).clamp_(min=0)
        return self.stage.reg_lambda * (self.gamma * rise.to(dtype))


def choose_channels(projection: Projection, due: Sequence[Due]) -> list[int]:
    """Choose the weakest channels of stages that zero whole ones: a budget for each tensor, or one for a group.

    Returns the budgets, by pool.
    """
    settings = {
        cluster.key: (one, scale)
        for one in due
        for cluster, scale in zip(one.stage.clusters, one.stage.scales, strict=True)
    }
    weights, budgets = [], []
    for pool in projection.plan.ranked:
        one, _ = settings[pool[0].cluster.key]
        channels = sum(planned.channels for planned in pool)
        budgets.append(budget(one.target, channels, pool[0].cluster.keep_multiple_of))
        for planned in pool:
            n, scale = max(planned.per_channel, 1), settings[planned.cluster.key][1]
            # Sums of squares compare as squares of scores; alone, each tensor compares with itself.
            squared = {"l2": 1, "rms": n, "param_cost": n**2}[one.stage.score_type]
            weights.append(scale**2 / squared if len(pool) > 1 else 1.0)
    projection.measure()
    if any(weight != 1 for weight in weights):
        projection.weigh(weights)
    projection.select(budgets)
    return budgets


def shrink_channels_(projection: Projection, due: Due) -> None:
    """Group lasso: `x <- x * max(1 - threshold * sqrt(n) / norm, 0)` for every channel of `n` elements."""
    thresholds = torch.cat(
        [
            math.sqrt(planned.per_channel) * due.threshold(planned.channels, torch.float64, projection.device)
            for planned in projection.plan.clusters
        ]
    )

    def factor(sums: Tensor) -> Tensor:
        norms = sums.sqrt()
        factors = torch.where(norms <= thresholds, 0, 1 - thresholds / norms)
        return factors.nan_to_num_(nan=1.0)  # a channel with NaN has no norm to go by

    projection.measure()
    projection.scale(factor)


def shrink_elements_(due: Due) -> None:
    """Lasso: `x <- sign(x) * max(|x| - threshold, 0)` for every element, as a factor `1 - threshold / |x|`."""
    for member in due.stage.members:
        x = member.parameter.detach()
        magnitude = x.abs() if x.dtype in (torch.float32, torch.float64) else x.float().abs()
        threshold = due.stage.reg_lambda * due.gamma
        if due.stage.gamma_index_slope:
            layout = layout_of(member.grouper, member.shape, member.arguments)
            threshold = layout.of_elements(due.threshold(layout.channels, magnitude.dtype, x.device))
        small = magnitude <= threshold
        x.mul_((1 - threshold / magnitude).to(magnitude.dtype))
        x.masked_fill_(small, 0)


def thin_elements_(due: Due) -> None:
    """Keep the `n_nonzero` largest elements of every group; among equals the later ones."""
    for member in due.stage.members:
        x, grouped = member.parameter.detach(), (member.grouper, member.arguments)
        magnitude = reference.by_channel(x.abs(), *grouped)  # padding is negative and goes first
        order = magnitude.sort(dim=1, stable=True).indices[:, : magnitude.size(1) - due.stage.n_nonzero]
        positions = reference.element_positions(x, *grouped).gather(1, order).flatten()
        dropped = torch.zeros(x.numel() + 1, dtype=torch.bool, device=x.device)  # the last is the padding's
        dropped[positions] = True
        x.masked_fill_(dropped[:-1].view(x.shape), 0)


def project_ranks_(due: Due) -> list[tuple[Tensor, Rank]]:
    """Singular values, soft or with a budget: each parameter and what is left of it."""
    return [(member.parameter, _project_rank(due, member)) for member in due.stage.members]


def _project_rank(due: Due, member: Member) -> Rank:
    if due.stage.kind.hard:
        return limit_ranks_(member, due.target)
    return shrink_ranks_(member, due.threshold(groups_of(member), torch.float32, member.parameter.device))
