"""Groupers: from a name, its arguments and a shape to the channel of every element.

In: a grouper name (TorchAO's names and keyword arguments) and the shape of a parameter, or of the
range of it that a member names. Out: a `Layout`. Only shapes are read, never data.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coupled_kernels import ChannelMap

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Channels of one shape.

    `axes` are the dimensions along which the grouper tells elements apart: two memberships clash
    where they share elements and one of these. `per_channel` is the number of elements a channel.
    """

    channel_map: ChannelMap
    axes: frozenset[int]
    per_channel: int

    @property
    def channels(self) -> int:
        return self.channel_map.channels

    def of_elements(self, values: Tensor) -> Tensor:
        """`values`, (channels,), of every element's channel: broadcasts against the shape, small where it can be."""
        shape, steps = self.channel_map.shape, self.channel_map.steps
        position = torch.zeros([1] * len(shape), dtype=torch.int64, device=values.device)
        for dim in self.axes:
            places = torch.arange(shape[dim], device=values.device) * steps[dim]
            position = position + places.view([-1 if d == dim else 1 for d in range(len(shape))])
        return values[position // self.channel_map.block % self.channels]


def layout_of(grouper: str, shape: Sequence[int], arguments: Mapping[str, Any]) -> Layout:
    """Layout of `shape` under `grouper`.

    Raises `ValueError` for an unknown grouper or a shape or value it does not fit, and `TypeError`
    for arguments it does not take or lacks.
    """
    if grouper not in GROUPERS:
        raise ValueError(f"unknown grouper {grouper!r}; known are {', '.join(GROUPERS)}")
    parameters = _parameters(grouper)
    for key, required in parameters.items():
        if required and key not in arguments:
            raise TypeError(f"{grouper} needs the argument {key!r}; its arguments are {', '.join(parameters)}")
    for key, value in arguments.items():
        if key not in parameters:
            listed = ", ".join(parameters) or "none"
            raise TypeError(f"{grouper} takes no argument {key!r}; its arguments are {listed}")
        if value is not None and type(value) is not int:
            raise TypeError(f"{grouper}: {key} must be an integer, got {value!r}")
    return _layout(grouper, tuple(shape), tuple(arguments.items()))


def argument_names(grouper: str) -> tuple[str, ...]:
    """Keyword arguments of a grouper; none of one that does not exist."""
    return tuple(_parameters(grouper)) if grouper in GROUPERS else ()


@functools.cache
def _parameters(grouper: str) -> dict[str, bool]:
    """Its keyword arguments, which come after the shape; True where one has to be given."""
    _, *parameters = inspect.signature(GROUPERS[grouper]).parameters.items()
    return {name: parameter.default is parameter.empty for name, parameter in parameters}


@functools.lru_cache(maxsize=4096)
def _layout(grouper: str, shape: Shape, arguments: tuple[tuple[str, int | None], ...]) -> Layout:
    try:
        return GROUPERS[grouper](shape, **dict(arguments))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{grouper}: {error}") from None


def _dims(shape: Shape, dim: int, start_dim: int, end_dim: int) -> Layout:
    groups = _flattened(shape, start_dim, end_dim)
    if dim >= len(groups):
        raise ValueError(f"needs {dim + 1} dimensions, got shape {shape}")
    axes = groups[dim]
    return _row_major(shape, axes, block=math.prod(shape[axes[-1] + 1 :]), channels=math.prod(shape[d] for d in axes))


def _dim0(shape: Shape, start_dim: int = 1, end_dim: int = -1) -> Layout:
    return _dims(shape, 0, start_dim, end_dim)


def _dim1(shape: Shape, start_dim: int = 1, end_dim: int = -1) -> Layout:
    return _dims(shape, 1, start_dim, end_dim)


def _heads(shape: Shape, dim: int, num_heads: int | None, head_dim: int | None) -> Layout:
    if (num_heads is None) == (head_dim is None):
        got = "neither" if num_heads is None else f"{num_heads=} and {head_dim=}"
        raise TypeError(f"takes num_heads or head_dim, exactly one; got {got}")
    if len(shape) <= dim:
        raise ValueError(f"needs {dim + 1} dimensions, got shape {shape}")
    if dim == 1 and len(shape) != 2:
        raise ValueError(f"needs a matrix, got shape {shape}; AxisGrouper takes any rank")
    what, value = ("num_heads", num_heads) if head_dim is None else ("head_dim", head_dim)
    value = _positive(value, what)
    if shape[dim] % value:
        raise ValueError(f"dimension {dim} of size {shape[dim]} is not divisible by {what}={value}")
    # Of an empty dimension, heads have no size; one keeps their number at none.
    head_dim = max(shape[dim] // value, 1) if head_dim is None else value
    return _axis(shape, dim, block=head_dim)


def _heads0(shape: Shape, num_heads: int | None = None, head_dim: int | None = None) -> Layout:
    return _heads(shape, 0, num_heads, head_dim)


def _heads1(shape: Shape, num_heads: int | None = None, head_dim: int | None = None) -> Layout:
    return _heads(shape, 1, num_heads, head_dim)


def _conv_filter(shape: Shape) -> Layout:
    if len(shape) not in (3, 4):
        raise ValueError(f"needs 3 or 4 dimensions, got shape {shape}")
    return _row_major(shape, (0, 1), block=math.prod(shape[2:]), channels=shape[0] * shape[1])


def _k_element(shape: Shape, k: int, start_dim: int = 1, end_dim: int = -1) -> Layout:
    k = _positive(k, "k")
    groups = _flattened(shape, start_dim, end_dim) if len(shape) > 1 else [(), (0,)]
    if len(groups) != 2:
        raise ValueError(f"needs a matrix after flattening, got shape {shape} as {len(groups)} groups")
    rows, cols = (math.prod(shape[d] for d in group) for group in groups)
    chunks = -(-cols // k)
    # The last chunk of a row may be short; positions are those of rows padded to whole chunks.
    plain = ChannelMap.row_major(shape, k, rows * chunks)
    steps = tuple(step // max(cols, 1) * chunks * k if d in groups[0] else step for d, step in enumerate(plain.steps))
    return Layout(replace(plain, steps=steps), frozenset(range(len(shape))), k)


def _elem(shape: Shape) -> Layout:
    return _row_major(shape, range(len(shape)), block=1, channels=math.prod(shape))


def _layer(shape: Shape) -> Layout:
    return _row_major(shape, range(len(shape)), block=math.prod(shape), channels=1)


def _axis(shape: Shape, axis: int, block: int = 1, tiles: int = 1) -> Layout:
    axis = dimension(axis, shape, "axis")
    block, tiles = _positive(block, "block"), _positive(tiles, "tiles")
    if shape[axis] % (block * tiles):
        raise ValueError(f"dimension {axis} of size {shape[axis]} is not divisible by block * tiles = {block * tiles}")
    after = math.prod(shape[axis + 1 :])
    return _row_major(shape, (axis,), block=block * after, channels=shape[axis] // (block * tiles))


# TorchAO's names, and one more: any axis of any rank, with `block` neighbours a channel and the
# channels repeated `tiles` times along the axis (packed gate|up).
GROUPERS: dict[str, Callable[..., Layout]] = {
    "Dim0Grouper": _dim0,
    "Dim1Grouper": _dim1,
    "AttentionHeadGrouperDim0": _heads0,
    "AttentionHeadGrouperDim1": _heads1,
    "ConvFilterGrouper": _conv_filter,
    "KElementGrouper": _k_element,
    "ElemGrouper": _elem,
    "LayerGrouper": _layer,
    "AxisGrouper": _axis,
}


def dimension(value: Any, shape: Sequence[int], what: str) -> int:
    """`value` as a dimension of `shape`, negative ones counted from the end."""
    if not isinstance(value, int):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    if not -len(shape) <= value < len(shape):
        raise ValueError(f"{what} {value} is out of range for shape {tuple(shape)}")
    return value % len(shape)


def _positive(value: Any, what: str) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}")
    return value


def _flattened(shape: Shape, start_dim: int, end_dim: int) -> list[tuple[int, ...]]:
    """Dimensions of `shape` after flattening, each as the original ones it is made of."""
    if not shape:
        raise ValueError("needs at least one dimension, got a scalar")
    if len(shape) <= 2:  # as in TorchAO, where a matrix is taken as it is
        return [(d,) for d in range(len(shape))]
    start, end = dimension(start_dim, shape, "start_dim"), dimension(end_dim, shape, "end_dim")
    if start > end:
        raise ValueError(f"start_dim {start_dim} comes after end_dim {end_dim} in shape {shape}")
    before = [(d,) for d in range(start)]
    return [*before, tuple(range(start, end + 1)), *((d,) for d in range(end + 1, len(shape)))]


def _row_major(shape: Shape, axes: Sequence[int], block: int, channels: int) -> Layout:
    per_channel = math.prod(shape) // channels if channels else 0
    return Layout(ChannelMap.row_major(shape, block, channels), frozenset(axes), per_channel)
