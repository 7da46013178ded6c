"""The reference path: dense, float64, one tensor at a time, written to be obviously right.

In: a tensor, a grouper's name and its arguments. Out: sums of squares, a mask, zeroed channels, a count.

It does without views: each grouper is the reshape its definition says. Everything fast is checked
against it, and layouts that no view list can say are pruned by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = -1


def by_channel(tensor: Tensor, grouper: str, arguments: Mapping[str, Any]) -> Tensor:
    """`tensor` as a (channels, elements per channel) matrix; short channels end in `PADDING`."""
    return _DEFINITIONS[grouper](tensor, **arguments)


def square_sums(tensor: Tensor, grouper: str, arguments: Mapping[str, Any]) -> Tensor:
    """Sum of squares of every channel, float64 (channels,)."""
    matrix = by_channel(tensor.detach().double(), grouper, arguments)
    if grouper == "KElementGrouper":
        matrix = matrix * (element_positions(tensor, grouper, arguments) != PADDING)
    # Rows of one contiguous matrix are summed alike; in other layouts the order may depend on the row.
    return matrix.square().contiguous().sum(1)


def lowest(scores: Tensor, k: int) -> Tensor:
    """Mask (bool) of the `k` lowest by (score, index): NaN last, +inf before it."""
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    mask[torch.sort(scores, stable=True).indices[:k]] = True
    return mask


def zero_(tensor: Tensor, grouper: str, arguments: Mapping[str, Any], mask: Tensor) -> None:
    """Set every element of the channels in `mask` (bool, (channels,)) to +0.0."""
    positions = element_positions(tensor, grouper, arguments)[mask].flatten()
    chosen = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    chosen[positions[positions != PADDING]] = True
    tensor.detach().masked_fill_(chosen.view(tensor.shape), 0.0)


def scale_(tensor: Tensor, grouper: str, arguments: Mapping[str, Any], factors: Tensor) -> None:
    """Multiply every element by the factor of its channel (float64, (channels,)); a factor of 0 writes +0.0."""
    positions = element_positions(tensor, grouper, arguments)
    by_element = torch.ones(tensor.numel() + 1, dtype=torch.float64, device=tensor.device)  # the last is the padding's
    by_element[positions] = factors.unsqueeze(1).expand(positions.shape)
    by_element = by_element[:-1].view(tensor.shape)
    tensor.detach().copy_((tensor.detach().double() * by_element).masked_fill_(by_element == 0, 0))


def count_zeros(tensor: Tensor) -> Tensor:
    """Number of elements that are literally zero, of either sign; int64, a scalar."""
    return tensor.numel() - torch.count_nonzero(tensor.detach())


def element_positions(tensor: Tensor, grouper: str, arguments: Mapping[str, Any]) -> Tensor:
    """Row-major position of each element in `tensor`, arranged by channel."""
    positions = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    return by_channel(positions, grouper, arguments)


def _flatten(x: Tensor, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    return x.flatten(start_dim, end_dim) if x.dim() > 2 else x


def _slices(x: Tensor, dim: int) -> Tensor:
    x = x.movedim(dim, 0)
    return x.reshape(x.size(0), math.prod(x.shape[1:]))


def _head_dim(size: int, num_heads: int | None, head_dim: int | None) -> int:
    return head_dim if head_dim is not None else size // (num_heads or 1)


def _axis(x: Tensor, axis: int, block: int = 1, tiles: int = 1) -> Tensor:
    lanes = _slices(x, axis)
    channels = lanes.size(0) // (block * tiles)
    tiled = lanes.reshape(tiles, channels, block, lanes.size(1)).transpose(0, 1)
    return tiled.reshape(channels, tiles * block * lanes.size(1))


def _k_element(x: Tensor, k: int, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    rows = _flatten(x, start_dim, end_dim) if x.dim() > 1 else x.unsqueeze(0)
    return F.pad(rows, (0, -rows.size(1) % k), value=PADDING).reshape(-1, k)


_DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "Dim0Grouper": lambda x, **flatten: _slices(_flatten(x, **flatten), 0),
    "Dim1Grouper": lambda x, **flatten: _slices(_flatten(x, **flatten), 1),
    "AttentionHeadGrouperDim0": lambda x, num_heads=None, head_dim=None: _axis(
        x, 0, _head_dim(x.size(0), num_heads, head_dim)
    ),
    "AttentionHeadGrouperDim1": lambda x, num_heads=None, head_dim=None: _axis(
        x, 1, _head_dim(x.size(1), num_heads, head_dim)
    ),
    "ConvFilterGrouper": lambda x: x.reshape(x.size(0) * x.size(1), math.prod(x.shape[2:])),
    "KElementGrouper": _k_element,
    "ElemGrouper": lambda x: x.reshape(-1, 1),
    "LayerGrouper": lambda x: x.reshape(1, -1),
    "AxisGrouper": _axis,
}
