"""Clusters with about as many channels as elements: element-wise and small-block groupers.

In: `FlatPiece`s (contiguous tensors, channels are consecutive runs of elements). The work goes
through ranges of channels, so float64 exists for one range at a time and never for all channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coupled_kernels.cpu import BLOCK, tree_sum
from coupled_kernels.pieces import FlatPiece


def measure_flat(
    pieces: Sequence[FlatPiece], tensors: Sequence[Tensor], channels: int, dtype: torch.dtype, zeros: Tensor
) -> Tensor:
    """Sums of squares of one cluster, `dtype` (channels,); literal zeros go to `zeros`, int64 (tensors,)."""
    scores = torch.zeros(channels, dtype=dtype, device=tensors[pieces[0].tensor].device)
    for channel_range in _ranges(pieces, channels):
        sums = torch.zeros(channel_range.stop - channel_range.start, dtype=torch.float64, device=scores.device)
        for piece in pieces:
            runs = _runs(piece, tensors)[channel_range]
            if piece.scored:
                sums += tree_sum(runs.double().square(), 1)
            if piece.counted:
                zeros[piece.tensor] += runs.numel() - torch.count_nonzero(runs)
        scores[channel_range] = sums
    return scores


def write_flat(pieces: Sequence[FlatPiece], tensors: Sequence[Tensor], chosen: Tensor, zeros: Tensor) -> None:
    """Set the chosen channels (bool, (channels,)) of one cluster to +0.0 and update `zeros`."""
    for channel_range in _ranges(pieces, chosen.numel()):
        for piece in pieces:
            runs = _runs(piece, tensors)[channel_range]
            zeros[piece.tensor] += torch.count_nonzero(runs)
            runs.masked_fill_(chosen[channel_range, None], 0)
            zeros[piece.tensor] -= torch.count_nonzero(runs)


def scale_flat(piece: FlatPiece, tensors: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply the elements of channel `c` by `factors[c]` (float32 or float64, (channels,))."""
    for channel_range in _ranges([piece], factors.numel()):
        lanes = factors[channel_range, None]
        _runs(piece, tensors)[channel_range].mul_(lanes).masked_fill_(lanes == 0, 0)


def _runs(piece: FlatPiece, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[piece.tensor].detach().view(-1, piece.block)


def _ranges(pieces: Sequence[FlatPiece], channels: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(piece.block for piece in pieces))
    for first in range(0, channels, step):
        yield slice(first, min(first + step, channels))
