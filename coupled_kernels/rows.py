"""Rows of the tables that the Triton kernels walk: int64 fields, and the place of each for the kernels.

tile     a rectangle of memory that one program reads (norms) and writes (mask)
run      a run of lanes of one piece, whose partial sums are added and which is accounted for
entry    lanes that belong to consecutive channels of a cluster
chunk    consecutive channels of a cluster, and the entries that add up to them
segment  the place of one pool (a cluster, or several ranked together) in the score vector
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

NONE = -1


class Tile(NamedTuple):
    """`row_slot` and `row_lane` belong to the tile's first row where rows are lanes, else NONE; so do columns."""

    address: int
    rows: int
    cols: int
    row_stride: int
    row_slot: int
    col_slot: int
    row_lane: int
    col_lane: int
    tensor: int


class LaneRun(NamedTuple):
    """Lanes `start:stop` of a piece of `lanes` lanes; `tensor` is NONE where nothing is to be counted."""

    slot: int
    partials: int
    lanes: int
    start: int
    stop: int
    wide: int
    lane: int
    first: int
    block: int
    channels: int
    base: int
    tensor: int
    size: int
    counted: int


class Entry(NamedTuple):
    """Channel `c` has the lanes `lane + c * stride + (0 .. length - 1)`, as far as they lie in `low:high`."""

    lane: int
    stride: int
    low: int
    high: int
    length: int


class Chunk(NamedTuple):
    """Channels `start:stop` of the cluster at `base`, which add up `entries` entries from `entry` on."""

    base: int
    start: int
    stop: int
    entry: int
    entries: int


class SegmentRow(NamedTuple):
    """One pool; `wide` is 1 where scores are ranked as float64."""

    base: int
    channels: int
    wide: int


def _place(row: Any, field: str) -> tl.constexpr:
    return tl.constexpr(row._fields.index(field))


# What kernels add to a row's address. Triton takes numbers from outside a kernel only as module constants.
TILE_FIELDS = tl.constexpr(len(Tile._fields))
TILE_ADDRESS = _place(Tile, "address")
TILE_ROWS = _place(Tile, "rows")
TILE_COLS = _place(Tile, "cols")
TILE_ROW_STRIDE = _place(Tile, "row_stride")
TILE_ROW_SLOT = _place(Tile, "row_slot")
TILE_COL_SLOT = _place(Tile, "col_slot")
TILE_ROW_LANE = _place(Tile, "row_lane")
TILE_COL_LANE = _place(Tile, "col_lane")
TILE_TENSOR = _place(Tile, "tensor")
RUN_FIELDS = tl.constexpr(len(LaneRun._fields))
RUN_SLOT = _place(LaneRun, "slot")
RUN_PARTIALS = _place(LaneRun, "partials")
RUN_LANES = _place(LaneRun, "lanes")
RUN_START = _place(LaneRun, "start")
RUN_STOP = _place(LaneRun, "stop")
RUN_WIDE = _place(LaneRun, "wide")
RUN_LANE = _place(LaneRun, "lane")
RUN_FIRST = _place(LaneRun, "first")
RUN_BLOCK = _place(LaneRun, "block")
RUN_CHANNELS = _place(LaneRun, "channels")
RUN_BASE = _place(LaneRun, "base")
RUN_TENSOR = _place(LaneRun, "tensor")
RUN_SIZE = _place(LaneRun, "size")
RUN_COUNTED = _place(LaneRun, "counted")
ENTRY_FIELDS = tl.constexpr(len(Entry._fields))
ENTRY_LANE = _place(Entry, "lane")
ENTRY_STRIDE = _place(Entry, "stride")
ENTRY_LOW = _place(Entry, "low")
ENTRY_HIGH = _place(Entry, "high")
ENTRY_LENGTH = _place(Entry, "length")
CHUNK_FIELDS = tl.constexpr(len(Chunk._fields))
CHUNK_BASE = _place(Chunk, "base")
CHUNK_START = _place(Chunk, "start")
CHUNK_STOP = _place(Chunk, "stop")
CHUNK_ENTRY = _place(Chunk, "entry")
CHUNK_ENTRIES = _place(Chunk, "entries")
SEGMENT_FIELDS = tl.constexpr(len(SegmentRow._fields))
SEGMENT_BASE = _place(SegmentRow, "base")
SEGMENT_CHANNELS = _place(SegmentRow, "channels")
SEGMENT_WIDE = _place(SegmentRow, "wide")
