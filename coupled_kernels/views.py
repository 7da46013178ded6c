"""Views: the only geometry the kernels know.

In: the shape and strides of a tensor, and a `ChannelMap` that says which channel each element
belongs to. Out: a few two-dimensional `View`s that cover every element exactly once. Nothing here
looks at data, so validation, the CPU path and the GPU kernels read one description.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# A longer list costs more in bookkeeping than a dense pass over the tensor.
MAX_VIEWS = 1024


class NotAView(ValueError):
    """The layout cannot be said as a short list of views; the message says why."""


@dataclass(frozen=True)
class ChannelMap:
    """Which channel an element belongs to, from its index alone.

    The element at index `i` of a tensor of shape `shape` lies at position `sum(steps[d] * i[d])`
    and belongs to channel `position // block % channels`. `steps` are the row-major strides of
    `shape`, or of a padded shape where channels do not tile the rows.
    """

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    block: int
    channels: int

    @classmethod
    def row_major(cls, shape: Sequence[int], block: int, channels: int) -> ChannelMap:
        shape = tuple(shape)
        # An empty dimension has no elements to place, so its extent may count as one.
        steps = [math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape))]
        return cls(shape, tuple(steps), max(block, 1), channels)

    @property
    def period(self) -> int:
        """Positions after which the channels repeat."""
        return self.block * self.channels

    def inside(self, dim: int) -> bool:
        """True where walking along the whole of `dim` never leaves a channel."""
        return self.block % (self.steps[dim] * max(self.shape[dim], 1)) == 0


@dataclass(frozen=True)
class View:
    """A matrix in one tensor's memory whose rows (axis 0) or columns (axis 1) are lanes.

    `offset` and `row_stride` count elements from the tensor's first one; columns have unit stride.
    Lane `l` belongs to channel `(first + l) // block % channels`.
    """

    offset: int
    rows: int
    cols: int
    row_stride: int
    axis: int
    first: int
    block: int
    channels: int

    @property
    def lanes(self) -> int:
        return self.cols if self.axis else self.rows

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def of(self, tensor: Tensor) -> Tensor:
        """The (rows, cols) matrix itself: an alias of `tensor` that shares its version counter."""
        start = tensor.storage_offset() + self.offset
        return tensor.detach().as_strided((self.rows, self.cols), (self.row_stride, 1), start)

    def lane_channels(self) -> Tensor:
        """Channel of every lane, int64 (lanes,), on the CPU."""
        lanes = torch.arange(self.first, self.first + self.lanes, device="cpu")
        return lanes.div_(self.block, rounding_mode="floor").remainder_(self.channels)


@dataclass(frozen=True)
class _Dim:
    size: int
    stride: int
    step: int


def make_views(
    shape: Sequence[int],
    strides: Sequence[int],
    channel_map: ChannelMap,
    start: Sequence[int] | None = None,
) -> tuple[View, ...]:
    """Views that cover a box of a tensor exactly once.

    `shape` and `strides` (elements) describe the box in memory; `start` is the index of its first
    element in the whole tensor that `channel_map` is about (default: the origin). Among the
    possible lists the one with the fewest views, then the fewest lanes, is returned.

    Raises `NotAView` with the reason where no short list exists.
    """
    return _make_views(tuple(shape), tuple(strides), channel_map, tuple(start or [0] * len(shape)))


@functools.lru_cache(maxsize=4096)
def _make_views(
    shape: tuple[int, ...], strides: tuple[int, ...], channel_map: ChannelMap, start: tuple[int, ...]
) -> tuple[View, ...]:
    if math.prod(shape) == 0:
        return ()
    position = sum(i * step for i, step in zip(start, channel_map.steps, strict=True))
    # Steps inside a channel may count as zero (such dimensions then merge with each other) or be
    # kept (they then merge with the lanes around them): a 3x3 filter bank wants either at times.
    candidates = []
    reason = NotAView("")
    for flatten_inside in (True, False):
        dims = [
            _Dim(size, stride, 0 if flatten_inside and channel_map.inside(d) else step % channel_map.period)
            for d, (size, stride, step) in enumerate(zip(shape, strides, channel_map.steps, strict=True))
            if size > 1
        ]
        try:
            candidates.append(_views_of_dims(dims, position, channel_map))
        except NotAView as error:
            reason = error
    if not candidates:
        raise reason
    return min(candidates, key=lambda views: (len(views), sum(view.lanes for view in views)))


def _views_of_dims(dims: list[_Dim], position: int, channel_map: ChannelMap) -> tuple[View, ...]:
    outer = sorted(dims, key=lambda dim: -dim.stride)
    outer = _merged(outer, lambda step, inner: step == inner)
    cols = _Dim(1, 1, 0)
    if outer and outer[-1].stride == 1:
        cols = outer.pop()
    elif len(outer) > 1:
        raise NotAView("no dimension is contiguous in memory")
    # Rows may run through several periods of the lanes: the channel is taken modulo `channels`.
    outer = _merged(outer, lambda step, inner: (step - inner) % channel_map.period == 0)

    usable = [dim for dim in outer if dim.step == 0 or (cols.step == 0 and channel_map.block % dim.step == 0)]
    rows = max(usable, key=lambda dim: dim.size, default=_Dim(1, cols.size * cols.stride, 0))
    if cols.step and channel_map.block % cols.step:
        raise NotAView(f"neighbouring elements are {cols.step} positions apart in channels of {channel_map.block}")
    outer = [dim for dim in outer if dim is not rows]
    count = math.prod(dim.size for dim in outer)
    if count > MAX_VIEWS:
        raise NotAView(f"it would take {count} views, more than {MAX_VIEWS}")

    axis = 1 if cols.step else 0
    unit = cols.step or rows.step
    template = View(0, rows.size, cols.size, rows.stride, axis, 0, 1, channel_map.channels)
    views = []
    for index in itertools.product(*(range(dim.size) for dim in outer)):
        offset = sum(i * dim.stride for i, dim in zip(index, outer, strict=True))
        here = position + sum(i * dim.step for i, dim in zip(index, outer, strict=True))
        if unit:
            first, block = here // unit, channel_map.block // unit
        else:  # the whole matrix lies in one channel
            first, block = here // channel_map.block * rows.size, rows.size
        first %= block * channel_map.channels
        views.append(replace(template, offset=offset, first=first, block=block))
    return tuple(views)


def _merged(dims: list[_Dim], fits: Callable[[int, int], bool]) -> list[_Dim]:
    """Neighbouring dimensions (outer to inner) that walk memory and lanes evenly become one."""
    merged: list[_Dim] = []
    for dim in dims:
        above = merged[-1] if merged else None
        if above and above.stride == dim.size * dim.stride and fits(above.step, dim.size * dim.step):
            merged[-1] = _Dim(above.size * dim.size, dim.stride, dim.step)
        else:
            merged.append(dim)
    return merged
