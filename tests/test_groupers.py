"""Groupers count channels as TorchAO's do, and views cover every element once, in its channel.

Views are checked against the oracle's index arithmetic, which knows nothing of `ChannelMap`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from coupled_kernels import NotAView, make_views
from coupled_prune.groupers import layout_of
from tests import oracle

LAYOUTS = [
    # grouper, arguments, shape, channels, elements a channel
    ("Dim0Grouper", {}, (6,), 6, 1),
    ("Dim0Grouper", {}, (6, 4), 6, 4),
    ("Dim0Grouper", {}, (6, 4, 3), 6, 12),
    ("Dim0Grouper", {}, (6, 4, 3, 2), 6, 24),
    ("Dim0Grouper", {}, (6, 0), 6, 0),
    ("Dim1Grouper", {}, (6, 4), 4, 6),
    ("Dim1Grouper", {}, (6, 4, 3), 12, 6),
    ("Dim1Grouper", {}, (6, 4, 3, 2), 24, 6),
    ("AttentionHeadGrouperDim0", {"num_heads": 3}, (6,), 3, 2),
    ("AttentionHeadGrouperDim0", {"head_dim": 3}, (6, 4), 2, 12),
    ("AttentionHeadGrouperDim0", {"num_heads": 3}, (6, 4, 3), 3, 24),
    ("AttentionHeadGrouperDim0", {"head_dim": 2}, (6, 4, 3, 2), 3, 48),
    ("AttentionHeadGrouperDim1", {"num_heads": 3}, (4, 6), 3, 8),
    ("AttentionHeadGrouperDim1", {"head_dim": 3}, (4, 6), 2, 12),
    ("ConvFilterGrouper", {}, (6, 4, 3), 24, 3),
    ("ConvFilterGrouper", {}, (6, 4, 3, 2), 24, 6),
    ("KElementGrouper", {"k": 2}, (6,), 3, 2),
    ("KElementGrouper", {"k": 4}, (6,), 2, 4),
    ("KElementGrouper", {"k": 2}, (6, 4), 12, 2),
    ("KElementGrouper", {"k": 3}, (6, 4), 12, 3),
    ("KElementGrouper", {"k": 9}, (6, 4), 6, 9),
    ("KElementGrouper", {"k": 5}, (6, 4, 3), 18, 5),
    ("KElementGrouper", {"k": 6}, (6, 4, 3, 2), 24, 6),
    ("ElemGrouper", {}, (6,), 6, 1),
    ("ElemGrouper", {}, (6, 4), 24, 1),
    ("ElemGrouper", {}, (6, 4, 3), 72, 1),
    ("ElemGrouper", {}, (6, 4, 3, 2), 144, 1),
    ("LayerGrouper", {}, (6,), 1, 6),
    ("LayerGrouper", {}, (6, 4), 1, 24),
    ("LayerGrouper", {}, (6, 4, 3), 1, 72),
    ("LayerGrouper", {}, (6, 4, 3, 2), 1, 144),
    ("AxisGrouper", {"axis": 0}, (6,), 6, 1),
    ("AxisGrouper", {"axis": 1, "block": 2}, (6, 4), 2, 12),
    ("AxisGrouper", {"axis": 1}, (6, 4, 3), 4, 18),
    ("AxisGrouper", {"axis": -1}, (6, 4, 3, 2), 2, 72),
    ("AxisGrouper", {"axis": 0, "tiles": 2}, (6, 4), 3, 8),
    ("AxisGrouper", {"axis": 1, "block": 2, "tiles": 2}, (3, 8), 2, 12),
    # start_dim and end_dim flatten ranks above two and leave matrices alone, as in TorchAO
    ("Dim0Grouper", {"start_dim": 0, "end_dim": 1}, (6, 4, 3, 2), 24, 6),
    ("Dim0Grouper", {"start_dim": 0, "end_dim": 1}, (6, 4), 6, 4),
    ("Dim0Grouper", {"start_dim": -2}, (6, 4, 3), 6, 12),
    ("Dim1Grouper", {"start_dim": 2}, (6, 4, 3, 2), 4, 36),
    ("Dim1Grouper", {"start_dim": 0, "end_dim": 1}, (6, 4, 3, 2), 3, 48),
    ("Dim1Grouper", {"start_dim": 1, "end_dim": 2}, (6, 4, 3, 2), 12, 12),
    ("Dim1Grouper", {"start_dim": 5}, (6, 4), 4, 6),
    ("KElementGrouper", {"k": 2, "start_dim": 0, "end_dim": 1}, (6, 4, 3), 48, 2),
    ("KElementGrouper", {"k": 4, "start_dim": 0, "end_dim": -2}, (3, 2, 2, 6), 24, 4),
]


def named(case):
    return " ".join(map(str, case)).replace("Grouper", "")


@pytest.mark.parametrize("case", LAYOUTS, ids=named)
def test_channels_of_a_shape(case):
    grouper, arguments, shape, channels, per_channel = case
    layout = layout_of(grouper, shape, arguments)
    assert (layout.channels, layout.per_channel) == (channels, per_channel)


@pytest.mark.parametrize("case", [case for case in LAYOUTS if 0 not in case[2]], ids=named)
def test_the_last_element_lies_in_the_last_channel(case):
    """The oracle's own arithmetic agrees on how many channels there are."""
    grouper, arguments, shape, channels, _ = case
    ids = {oracle.channel_of(i, shape, grouper, arguments) for i in np.ndindex(*shape)}
    assert ids == set(range(channels))


MEMORY = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    "permuted": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "first two swapped": lambda x: x.transpose(0, min(1, x.dim() - 1)).contiguous().transpose(0, min(1, x.dim() - 1)),
    "row-strided": lambda x: torch.cat([x, x], -1)[..., : x.size(-1)],
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
}


def covered(tensor, grouper, arguments):
    """Views of `tensor`; fails unless they cover each element once, in the channel the oracle says."""
    shape = tuple(tensor.shape)
    views = make_views(shape, tensor.stride(), layout_of(grouper, shape, arguments).channel_map)
    found = {}
    for view in views:
        for row, col in itertools.product(range(view.rows), range(view.cols)):
            place = view.offset + row * view.row_stride + col
            lane = col if view.axis else row
            assert place not in found, f"element {place} is covered twice"
            found[place] = (view.first + lane) // view.block % view.channels
        ids = view.lane_channels().tolist()
        assert ids == [(view.first + lane) // view.block % view.channels for lane in range(view.lanes)]
    expected = {
        int(np.dot(index, tensor.stride())): oracle.channel_of(index, shape, grouper, arguments)
        for index in np.ndindex(*shape)
    }
    assert found == expected
    return views


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("case", [case for case in LAYOUTS if 0 not in case[2]], ids=named)
def test_views_cover_every_element_once_in_its_channel(case, memory):
    grouper, arguments, shape, *_ = case
    tensor = MEMORY[memory](torch.zeros(shape))
    try:
        covered(tensor, grouper, arguments)
    except NotAView:
        # Channels of neighbours in memory are not those of lanes, whatever the block.
        neighbours = next(d for d in range(len(shape)) if tensor.stride(d) == 1 and shape[d] > 1)
        along = np.eye(len(shape), dtype=int)[neighbours]
        ids = [oracle.channel_of(tuple(i * along), shape, grouper, arguments) for i in range(shape[neighbours])]
        channels = case[3]
        assert not any(ids == [i // block % channels for i in range(len(ids))] for block in range(1, len(ids) + 1))


def test_an_empty_tensor_has_no_views():
    assert make_views((6, 0), (1, 1), layout_of("Dim0Grouper", (6, 0), {}).channel_map) == ()


CONV = (6, 4, 3, 3)
COUNTS = [
    # grouper, arguments, shape, memory, views, (rows, cols, axis) of the first
    ("Dim0Grouper", {}, (6, 4), "contiguous", 1, (6, 4, 0)),
    ("Dim1Grouper", {}, (6, 4), "contiguous", 1, (6, 4, 1)),
    ("Dim0Grouper", {}, (6, 4), "transposed", 1, (4, 6, 1)),
    ("Dim1Grouper", {}, (6, 4), "transposed", 1, (4, 6, 0)),
    ("Dim0Grouper", {}, (6, 4), "row-strided", 1, (6, 4, 0)),
    ("Dim1Grouper", {}, (6, 4), "row-strided", 1, (6, 4, 1)),
    ("Dim0Grouper", {}, (6,), "contiguous", 1, (1, 6, 1)),
    ("AttentionHeadGrouperDim0", {"head_dim": 2}, (6, 4), "contiguous", 1, (6, 4, 0)),
    ("AttentionHeadGrouperDim1", {"head_dim": 2}, (6, 4), "contiguous", 1, (6, 4, 1)),
    ("AttentionHeadGrouperDim1", {"num_heads": 2}, (6, 4), "transposed", 1, (4, 6, 0)),
    ("ConvFilterGrouper", {}, CONV, "contiguous", 1, (24, 9, 0)),
    ("ConvFilterGrouper", {}, CONV, "channels_last", 6, (9, 4, 1)),
    ("Dim0Grouper", {}, CONV, "contiguous", 1, (6, 36, 0)),
    ("Dim0Grouper", {}, CONV, "channels_last", 1, (6, 36, 0)),
    ("Dim1Grouper", {}, CONV, "contiguous", 1, (6, 36, 1)),
    ("AxisGrouper", {"axis": 1}, CONV, "contiguous", 1, (24, 9, 0)),
    ("AxisGrouper", {"axis": 1}, CONV, "channels_last", 1, (54, 4, 1)),
    ("AxisGrouper", {"axis": 0, "tiles": 2}, (6, 4), "contiguous", 1, (6, 4, 0)),
    ("AxisGrouper", {"axis": 1, "tiles": 2}, (6, 4), "contiguous", 1, (6, 4, 1)),
    ("AxisGrouper", {"axis": 1}, (5, 6, 4), "contiguous", 1, (5, 24, 1)),
    ("KElementGrouper", {"k": 2}, (6, 4), "contiguous", 1, None),
    ("LayerGrouper", {}, (6, 4, 3), "contiguous", 1, None),
    ("ElemGrouper", {}, (6, 4), "contiguous", 1, None),
]


@pytest.mark.parametrize("case", COUNTS, ids=named)
def test_the_usual_cases_take_few_views(case):
    grouper, arguments, shape, memory, count, first = case
    views = covered(MEMORY[memory](torch.zeros(shape)), grouper, arguments)
    assert len(views) == count
    if first is not None:
        assert (views[0].rows, views[0].cols, views[0].axis) == first


NOT_VIEWS = {
    "every second column": ((6, 4), (9, 2), "Dim0Grouper", {}, "no dimension is contiguous"),
    "every second column, columns": ((6, 4), (9, 2), "Dim1Grouper", {}, "no dimension is contiguous"),
    "interleaved": ((2, 3), (3, 2), "Dim0Grouper", {}, "no dimension is contiguous"),
    "columns of channels_last": (CONV, (36, 1, 12, 4), "Dim1Grouper", {}, "9 positions apart"),
    "too many": ((1025, 2, 3, 3), (18, 1, 6, 2), "ConvFilterGrouper", {}, "more than 1024"),
}


@pytest.mark.parametrize(("shape", "strides", "grouper", "arguments", "reason"), NOT_VIEWS.values(), ids=NOT_VIEWS)
def test_what_views_cannot_say_is_refused_with_the_reason(shape, strides, grouper, arguments, reason):
    with pytest.raises(NotAView, match=reason):
        make_views(shape, strides, layout_of(grouper, shape, arguments).channel_map)


def test_the_longest_list_allowed():
    """One view fewer than the case above is still a list of views."""
    tensor = torch.zeros(1024, 2, 2, 1).contiguous(memory_format=torch.channels_last)
    assert len(covered(tensor, "ConvFilterGrouper", {})) == 1024


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 1, 5), (0, 3, 6), (1, 1, 3), (1, 3, 4)])
@pytest.mark.parametrize(
    ("grouper", "arguments"),
    [
        ("Dim0Grouper", {}),
        ("Dim1Grouper", {}),
        ("AttentionHeadGrouperDim0", {"head_dim": 2}),
        ("AttentionHeadGrouperDim1", {"head_dim": 2}),
        ("AxisGrouper", {"axis": 0, "tiles": 2}),
    ],
)
def test_a_box_of_a_larger_tensor(grouper, arguments, dim, start, stop):
    """A shard knows its channels from the index of its first element in the whole tensor."""
    shape, origin = [6, 4], [0, 0]
    shape[dim], origin[dim] = stop - start, start
    channel_map = layout_of(grouper, (6, 4), arguments).channel_map
    (view,) = make_views(shape, (shape[1], 1), channel_map, origin)
    assert view.numel == np.prod(shape)
    lanes = view.lane_channels().numpy()
    found = np.empty(view.numel, dtype=np.int64)  # channel by place in memory
    for row, col in np.ndindex(view.rows, view.cols):
        found[view.offset + row * view.row_stride + col] = lanes[col if view.axis else row]
    for index in np.ndindex(*shape):
        whole = tuple(np.add(index, origin))
        assert found[np.ravel_multi_index(index, shape)] == oracle.channel_of(whole, (6, 4), grouper, arguments)
