"""What a plan hands to the kernels: which view of which tensor adds to which scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coupled_kernels.views import View


@dataclass(frozen=True)
class Piece:
    """One view at work in one cluster.

    `tensor` indexes the tensors of the step, `member` tells memberships apart. `base` is the place of
    the cluster's channel 0 in the score vector of all clusters. A piece that is not `scored` is only
    written; a piece that is `counted` reports the literal zeros it holds (each element of a tensor is
    counted by exactly one piece). Squares are taken in `dtype`: float32, or float64 in a cluster with
    a float64 member.
    """

    tensor: int
    member: int
    view: View
    base: int
    scored: bool
    counted: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Segment:
    """A place `base:base + channels` in the score vector, of one cluster or of several ranked together in `dtype`."""

    base: int
    channels: int
    dtype: torch.dtype

    @property
    def slice(self) -> slice:
        return slice(self.base, self.base + self.channels)


@dataclass(frozen=True)
class FlatPiece:
    """A contiguous tensor whose channels are consecutive runs of `block` elements, in order."""

    tensor: int
    block: int
    scored: bool
    counted: bool
