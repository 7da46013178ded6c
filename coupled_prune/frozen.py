"""The frozen set: what stays zero during healing.

In: the masks of the last pruning step. Out: `state[p]["frozen"]`, packed bits that a checkpoint carries,
and `Frozen`, which zeroes the set in gradients and weights. A parameter of which only whole channels are
zeroed has one bit a channel, for each of its projections in order; any other has one bit an element, its
literal zeros of that moment. A live weight that passes through zero later is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from coupled_prune import reference
from coupled_prune.groupers import layout_of
from coupled_prune.member import Member
from coupled_prune.stages import Stages

State = MutableMapping[Tensor, dict[str, Any]]
KEY = "frozen"


def pack(bits: Tensor) -> Tensor:
    """bool (n,) as uint8 (ceil(n / 8),), the first bit of a byte in its lowest place."""
    padded = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8, device=bits.device)
    padded[: bits.numel()] = bits
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, n: int) -> Tensor:
    """uint8 (ceil(n / 8),) as bool (n,)."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(1) >> places & 1).flatten()[:n].bool()


def create(stages: Stages, state: State) -> None:
    """Give every parameter its bits, all unset: checkpoints need the same keys and shapes at any time."""
    for p in stages.parameters:
        if KEY not in state[p] and id(p) not in stages.through_heal:
            bits = p.numel() if id(p) in stages.elementwise else sum(_channels(m) for _, m in stages.memberships[id(p)])
            state[p][KEY] = torch.zeros(-(-bits // 8), dtype=torch.uint8, device=p.device)


def freeze(stages: Stages, state: State, masks: Mapping[str, Tensor] | None) -> None:
    """Fix the set: `masks`, bool (channels,) by cluster key, or without them what is zero in the weights now."""
    if masks is None:
        masks = _masks_of_weights(stages)
    packed: dict[tuple[str, ...], Tensor] = {}
    for p in stages.parameters:
        if id(p) in stages.through_heal:
            continue
        if id(p) in stages.elementwise:
            state[p][KEY] = pack((p.detach() == 0).flatten())
            continue
        keys = tuple(key for key, _ in stages.memberships[id(p)])
        if keys not in packed:  # members of the same clusters share their bits
            packed[keys] = pack(torch.cat([masks[key] for key in keys]))
        state[p][KEY] = packed[keys]


def masks(stages: Stages, state: State) -> dict[str, Tensor]:
    """Masks of all clusters whose bits are in `state`, bool (channels,) by key."""
    found: dict[str, Tensor] = {}
    for p in stages.parameters:
        if id(p) not in stages.elementwise and KEY in state.get(p, {}):
            found.update({key: mask for key, _, mask in _masks_of(stages, state, p)})
    return found


class Frozen:
    """The set as masks that broadcast against parameters and gradients."""

    def __init__(self, stages: Stages, state: State) -> None:
        self._state = state
        self._masks: list[tuple[Tensor, list[tuple[Member, Tensor]]]] = []
        self._elementwise: list[Tensor] = []
        for p in stages.parameters:
            if KEY not in state.get(p, {}):
                continue
            if id(p) in stages.elementwise:
                if state[p][KEY].any():
                    self._elementwise.append(p)
                continue
            masks = [
                (member, _of_elements(member, mask)) for _, member, mask in _masks_of(stages, state, p) if mask.any()
            ]
            if masks:
                self._masks.append((p, masks))

    def zero_weights_(self) -> None:
        """Set the frozen elements of all parameters to +0.0."""
        self._zero([p.detach() for p, _ in self._masks], [p.detach() for p in self._elementwise])

    def zero_gradients_(self) -> None:
        """Set the gradients of frozen elements to +0.0, NaN included; gradients that are not dense stay."""
        self._zero([_dense_gradient(p) for p, _ in self._masks], [_dense_gradient(p) for p in self._elementwise])

    def _zero(self, by_channel: list[Tensor | None], by_element: list[Tensor | None]) -> None:
        for x, (_, masks) in zip(by_channel, self._masks, strict=True):
            if x is not None:
                for member, mask in masks:
                    _range_of(x, member).masked_fill_(mask, 0)
        for x, p in zip(by_element, self._elementwise, strict=True):
            if x is not None:
                x.masked_fill_(unpack(self._state[p][KEY], p.numel()).view(p.shape), 0)


def _dense_gradient(p: Tensor) -> Tensor | None:
    dense = p.grad is not None and p.grad.layout == torch.strided
    return p.grad.detach() if dense and p.grad is not None else None


def _range_of(x: Tensor, member: Member) -> Tensor:
    if member.range is None:
        return x
    dim, start, stop = member.range
    return x.narrow(dim, start, stop - start)


def _channels(member: Member) -> int:
    return layout_of(member.grouper, member.shape, member.arguments).channels


def _of_elements(member: Member, mask: Tensor) -> Tensor:
    return layout_of(member.grouper, member.shape, member.arguments).of_elements(mask)


def _masks_of(stages: Stages, state: State, p: Tensor) -> list[tuple[str, Member, Tensor]]:
    """Cluster key, member and mask of each projection of a parameter, from its bits."""
    memberships = stages.memberships[id(p)]
    channels = [_channels(member) for _, member in memberships]
    masks = unpack(state[p][KEY], sum(channels)).split(channels)
    return [(key, member, mask) for (key, member), mask in zip(memberships, masks, strict=True)]


def _masks_of_weights(stages: Stages) -> dict[str, Tensor]:
    """Channels that are zero in every member, by cluster key."""
    found: dict[str, Tensor] = {}
    for p in stages.parameters:
        for key, member in stages.memberships[id(p)]:
            nonzero = member.tensor.ne(0).to(torch.int8)
            dead = ~reference.by_channel(nonzero, member.grouper, member.arguments).gt(0).any(1)
            found[key] = found[key] & dead if key in found else dead
    return found
