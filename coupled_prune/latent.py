"""Latent weights: what the base optimizer steps from while the model sees pruned weights.

In: parameters around a projection. Out: the same parameters, brought back before the next base step.
"Full" storage is a copy of every parameter in `state[p]["latent"]`, as in TorchAO. "Compact" storage keeps
only the values that were zeroed, for parameters of which only whole channels are.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coupled_kernels import View
from coupled_prune.plan import MemberPlan
from coupled_prune.projection import Projection
from coupled_prune.reference import element_positions
from coupled_prune.stages import Stages

State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(frozen=True, eq=False)
class _Zeroed:
    """Values of lanes `lanes` of a view, or (without one) of the elements at `lanes` in row-major order."""

    view: View | None
    lanes: Tensor
    values: Tensor

    def restore_(self, parameter: Tensor) -> None:
        if self.view:
            self.view.of(parameter).index_copy_(self.view.axis, self.lanes, self.values)
        else:
            parameter.detach().put_(self.lanes, self.values)


class Latents:
    """The latent weights of an optimizer; `compact` says how they are stored."""

    def __init__(self, compact: bool) -> None:
        self.compact = compact
        self._zeroed: dict[Tensor, list[_Zeroed]] = {}
        # Full copies that a checkpoint brought; they go with the next step.
        self._loaded: dict[Tensor, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the values in compact storage, without the numbers of their lanes."""
        zeroed = [part.values for parts in self._zeroed.values() for part in parts]
        return sum(values.nbytes for values in [*zeroed, *self._loaded.values()])

    def full(self, stages: Stages) -> list[Tensor]:
        """Parameters with a full copy in the state."""
        if not self.compact:
            return list(stages.parameters)
        return [p for p in stages.parameters if id(p) in stages.elementwise]

    def create(self, stages: Stages, state: State) -> None:
        """Give every parameter that needs one its full copy."""
        for p in self.full(stages):
            if "latent" not in state[p]:
                state[p]["latent"] = p.detach().clone()

    def restore_(self, stages: Stages, state: State) -> None:
        """Bring latent weights back into the parameters."""
        copies = [(p, state[p]["latent"]) for p in self.full(stages) if "latent" in state.get(p, {})]
        copies += self._loaded.items()
        if copies:
            torch._foreach_copy_([p.detach() for p, _ in copies], [latent for _, latent in copies])
        for p, zeroed in self._zeroed.items():
            for part in reversed(zeroed):
                part.restore_(p)

    def keep(self, stages: Stages, state: State) -> None:
        """Keep the parameters as they are: the base optimizer has stepped, nothing is projected yet."""
        self.create(stages, state)
        parameters = self.full(stages)
        if parameters:
            torch._foreach_copy_([state[p]["latent"] for p in parameters], [p.detach() for p in parameters])

    def before_write(self, stages: Stages, projection: Projection) -> None:
        """Keep what `projection` is about to zero of parameters without a full copy."""
        if not self.compact:
            return
        masks = projection.masks()
        for cluster in projection.plan.clusters:
            for member in cluster.members:
                parameter = member.member.parameter
                if id(parameter) not in stages.elementwise:
                    parts = _zeroed_by(member, parameter, masks[cluster.cluster.key])
                    self._zeroed.setdefault(parameter, []).extend(parts)

    def forget(self) -> None:
        """Drop what compact storage keeps."""
        self._zeroed.clear()
        self._loaded.clear()

    def load(self, parameter: Tensor, latent: Tensor) -> None:
        """Take a full copy from a checkpoint, for a parameter in compact storage."""
        self._loaded[parameter] = latent

    def as_full(self, parameter: Tensor) -> Tensor:
        """The latent weights of one parameter in compact storage, as a tensor of its own."""
        if parameter in self._loaded:
            return self._loaded[parameter].clone()
        # With the parameter's own strides, which views are about.
        latent = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        latent.copy_(parameter.detach())
        for part in reversed(self._zeroed.get(parameter, [])):
            part.restore_(latent)
        return latent


def _zeroed_by(member: MemberPlan, parameter: Tensor, chosen: Tensor) -> list[_Zeroed]:
    if not member.pieces:
        positions = element_positions(parameter, "ElemGrouper", {}).view(parameter.shape)
        if member.member.range:
            dim, start, stop = member.member.range
            positions = positions.narrow(dim, start, stop - start)
        by_channel = element_positions(member.member.tensor, member.member.grouper, member.member.arguments)[chosen]
        lanes = positions.flatten()[by_channel[by_channel >= 0]]
        return [_Zeroed(None, lanes, parameter.detach().take(lanes))]
    parts = []
    for piece in member.pieces:
        lanes = chosen[piece.view.lane_channels().to(chosen.device)].nonzero().squeeze(1)
        parts.append(_Zeroed(piece.view, lanes, piece.view.of(parameter).index_select(piece.view.axis, lanes)))
    return parts
