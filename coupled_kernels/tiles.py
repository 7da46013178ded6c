"""Tiles: pieces cut up for the Triton kernels, as tables of int64 rows.

In: `Piece`s, fillers (views that are only counted) and the tensors. Out: `Tables`. Of the tensors only
shapes, dtypes and addresses are read, and nothing is launched.

A *slot* is where a tile leaves the partial sum of one lane; a piece that is cut into `partials` tiles
along its lanes has `partials * lanes` of them. Lane numbers run through all pieces, one after the
other. Where pieces cross in one tensor they are cut along one grid, so that one tile serves both.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from coupled_kernels import tuning
from coupled_kernels.pieces import Piece, Segment
from coupled_kernels.rows import NONE, Chunk, Entry, LaneRun, SegmentRow, Tile
from coupled_kernels.tuning import TileShape
from coupled_kernels.views import View


@dataclass(frozen=True)
class TileClass:
    """Tiles that one compiled kernel serves; `vector` elements make a 16-byte access, or 1 if unaligned."""

    dtype: torch.dtype
    compute: torch.dtype
    vector: int
    shape: TileShape


@dataclass
class Tables:
    """Everything a step launches on. `row_tiles` have lanes on rows only and need no load to be masked."""

    row_tiles: dict[TileClass, list[Tile]] = field(default_factory=dict)
    other_tiles: dict[TileClass, list[Tile]] = field(default_factory=dict)
    recounted: dict[TileClass, list[Tile]] = field(default_factory=dict)
    lane_runs: list[LaneRun] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    pools: list[SegmentRow] = field(default_factory=list)
    slots: int = 0
    lanes: int = 0


class _Placed(NamedTuple):
    """A piece as a rectangle of a sheet: rows `top:bottom`, columns `left:right`."""

    piece: Piece
    top: int
    left: int

    @property
    def bottom(self) -> int:
        return self.top + self.piece.view.rows

    @property
    def right(self) -> int:
        return self.left + self.piece.view.cols

    def covers(self, row: int, col: int) -> bool:
        return self.top <= row < self.bottom and self.left <= col < self.right


class _Sheet(NamedTuple):
    """Pieces of one tensor on one grid: row `r`, column `c` lies at `offset + r * stride + c`."""

    offset: int
    stride: int
    placed: tuple[_Placed, ...]


def build_tables(
    pieces: Sequence[Piece],
    fillers: Sequence[Piece],
    tensors: Sequence[Tensor],
    segments: Sequence[Segment],
    pools: Sequence[Segment],
) -> Tables:
    """Tables for one step; valid as long as the tensors stay where they are."""
    tables = Tables()
    alone = {tensor for tensor, own in _by_tensor(pieces).items() if len({piece.member for piece in own}) == 1}
    pieces = [_recut(piece) if piece.tensor in alone else piece for piece in pieces]
    first_lane: dict[Piece, int] = {}
    filled = {piece.tensor for piece in fillers}
    for tensor, own in _by_tensor(pieces).items():
        # Where a piece writes what a filler counts, or masks cross without a grid in common, the zeros are
        # known only when all is written.
        written_fillers = tensor in filled and not all(piece.counted for piece in own)
        joint = None if written_fillers else _joint_sheet(own)
        sheets = [joint] if joint else [_sheet_of(piece) for piece in own]
        recount = written_fillers or (not joint and len({piece.member for piece in own}) > 1)
        for sheet in sheets:
            _add_sheet(tables, sheet, tensors[tensor], first_lane, recount)
        if recount:
            fillers = [*fillers, *(piece for piece in own if piece.counted)]
    for piece in fillers:
        _add_recount(tables, piece, tensors[piece.tensor])
    tables.pools += [SegmentRow(pool.base, pool.channels, int(pool.dtype == torch.float64)) for pool in pools]
    for segment in segments:
        _add_channels(tables, segment, [p for p in pieces if p.scored and p.base == segment.base], first_lane)
    return tables


def _by_tensor(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    by_tensor: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    return by_tensor


def _recut(piece: Piece) -> Piece:
    """A few very long rows, one after the other in memory, as many rows of a length that fills tiles well.

    A lane becomes several lanes of its channel: their sums are folded side by side instead of in one chain.
    """
    view, longest = piece.view, tuning.current().longest_row
    if view.axis or view.cols <= longest or not (view.rows == 1 or view.row_stride == view.cols):
        return piece
    step = 8 if view.cols % 8 == 0 else 1  # rows of a multiple of 16 bytes where they were before
    cols = next((cols for cols in range(longest, longest // 2, -step) if view.cols % cols == 0), view.cols)
    parts = view.cols // cols
    return replace(
        piece,
        view=replace(
            view,
            rows=view.rows * parts,
            cols=cols,
            row_stride=cols,
            first=view.first * parts,
            block=view.block * parts,
        ),
    )


def _sheet_of(piece: Piece) -> _Sheet:
    return _Sheet(piece.view.offset, piece.view.row_stride, (_Placed(piece, 0, 0),))


def _joint_sheet(pieces: Sequence[Piece]) -> _Sheet | None:
    """All pieces of a tensor on one grid, or None where they have none or need none in common."""
    if len({piece.member for piece in pieces}) < 2:
        return None
    strides = {piece.view.row_stride for piece in pieces if piece.view.rows > 1}
    if len(strides) > 1:
        return None
    stride = strides.pop() if strides else max(piece.view.offset + piece.view.cols for piece in pieces)
    placed = tuple(_Placed(piece, *divmod(piece.view.offset, stride)) for piece in pieces)
    if any(p.right > stride for p in placed):
        return None
    for i, p in enumerate(placed):
        for q in placed[:i]:
            meet = max(p.top, q.top) < min(p.bottom, q.bottom) and max(p.left, q.left) < min(p.right, q.right)
            if meet and p.piece.view.axis == q.piece.view.axis:
                return None
    return _Sheet(0, stride, placed)


def _cuts(spans: Sequence[tuple[int, int]], step: int) -> list[tuple[int, int]]:
    """Consecutive ranges of at most `step`, with cuts wherever a span begins or ends."""
    ends = sorted({end for span in spans for end in span})
    return [
        (start, min(start + step, after))
        for before, after in itertools.pairwise(ends)
        for start in range(before, after, step)
    ]


def _class_of(tensor: Tensor, sheet: _Sheet, rows: list[tuple[int, int]], cols: list[tuple[int, int]]) -> TileClass:
    size = tensor.element_size()
    places = [tensor.data_ptr() + sheet.offset * size, *(end * size for span in cols for end in span)]
    if rows[-1][1] - rows[0][0] > 1 or rows[0][0]:
        places.append(sheet.stride * size)
    aligned = all(place % 16 == 0 for place in places)
    wide = any(p.piece.dtype == torch.float64 for p in sheet.placed) or tensor.dtype == torch.float64
    return TileClass(
        tensor.dtype,
        torch.float64 if wide else torch.float32,
        16 // size if aligned else 1,
        _shape_of(sheet),
    )


def _shape_of(sheet: _Sheet) -> TileShape:
    width = max(p.piece.view.cols for p in sheet.placed)
    sizes = tuning.current()
    return sizes.wide if width >= sizes.wide_columns else sizes.tall


def _grid(sheet: _Sheet) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    shape = _shape_of(sheet)
    return (
        _cuts([(p.top, p.bottom) for p in sheet.placed], shape.rows),
        _cuts([(p.left, p.right) for p in sheet.placed], shape.cols),
    )


def _add_sheet(tables: Tables, sheet: _Sheet, tensor: Tensor, first_lane: dict[Piece, int], recount: bool) -> None:
    rows, cols = _grid(sheet)
    tile_class = _class_of(tensor, sheet, rows, cols)
    first_slot: dict[Piece, int] = {}
    first_span: dict[Piece, int] = {}  # tile row (column) where a piece with lanes on columns (rows) begins
    for p in sheet.placed:
        view = p.piece.view
        spans, low, high = (rows, p.top, p.bottom) if view.axis else (cols, p.left, p.right)
        first_span[p.piece] = bisect.bisect_left(spans, (low,))
        partials = bisect.bisect_left(spans, (high,)) - first_span[p.piece]
        first_lane[p.piece], first_slot[p.piece] = tables.lanes, tables.slots
        _add_lane_runs(tables, p.piece, partials, tile_class, recount)
        tables.lanes += view.lanes
        tables.slots += view.lanes * partials
    for i, (top, bottom) in enumerate(rows):
        for j, (left, right) in enumerate(cols):
            over = {p.piece.view.axis: p for p in sheet.placed if p.covers(top, left)}
            if not over:
                continue
            slots, lanes = [NONE, NONE], [NONE, NONE]
            for axis, p in over.items():
                lane = left - p.left if axis else top - p.top
                partial = (i if axis else j) - first_span[p.piece]
                slots[axis] = first_slot[p.piece] + partial * p.piece.view.lanes + lane
                lanes[axis] = first_lane[p.piece] + lane
            tile = Tile(
                address=_address(tensor, sheet, top, left),
                rows=bottom - top,
                cols=right - left,
                row_stride=sheet.stride,
                row_slot=slots[0],
                col_slot=slots[1],
                row_lane=lanes[0],
                col_lane=lanes[1],
                tensor=sheet.placed[0].piece.tensor,
            )
            kind = tables.row_tiles if lanes[1] == NONE else tables.other_tiles
            kind.setdefault(tile_class, []).append(tile)


def _add_recount(tables: Tables, piece: Piece, tensor: Tensor) -> None:
    sheet = _sheet_of(piece)
    rows, cols = _grid(sheet)
    tiles = tables.recounted.setdefault(_class_of(tensor, sheet, rows, cols), [])
    for top, bottom in rows:
        for left, right in cols:
            address, size = _address(tensor, sheet, top, left), (bottom - top, right - left)
            tiles.append(Tile(address, *size, sheet.stride, NONE, NONE, NONE, NONE, piece.tensor))


def _address(tensor: Tensor, sheet: _Sheet, row: int, col: int) -> int:
    return tensor.data_ptr() + (sheet.offset + row * sheet.stride + col) * tensor.element_size()


def _add_lane_runs(tables: Tables, piece: Piece, partials: int, tile_class: TileClass, recount: bool) -> None:
    view = piece.view
    for start in range(0, view.lanes, tuning.current().fold_lanes):
        tables.lane_runs.append(
            LaneRun(
                slot=tables.slots,
                partials=partials,
                lanes=view.lanes,
                start=start,
                stop=min(start + tuning.current().fold_lanes, view.lanes),
                wide=int(tile_class.compute == torch.float64),
                lane=tables.lanes,
                first=view.first,
                block=view.block,
                channels=view.channels,
                base=piece.base,
                tensor=NONE if recount else piece.tensor,
                size=view.numel // view.lanes,
                counted=int(piece.counted),
            )
        )


def _add_channels(tables: Tables, segment: Segment, pieces: Sequence[Piece], first_lane: dict[Piece, int]) -> None:
    first_entry = len(tables.entries)
    for piece in pieces:
        tables.entries.extend(_entries(piece.view, first_lane[piece]))
    for start in range(0, segment.channels, tuning.current().fold_channels):
        stop = min(start + tuning.current().fold_channels, segment.channels)
        tables.chunks.append(Chunk(segment.base, start, stop, first_entry, len(tables.entries) - first_entry))


def _entries(view: View, lane: int) -> Iterator[Entry]:
    """Lanes of consecutive channels: one entry for each round through the channels and run in a block."""
    period = view.block * view.channels
    for turn in range((view.first + view.lanes - 1) // period + 1):
        for run in range(0, view.block, tuning.current().fold_run):
            start = lane + turn * period - view.first + run
            yield Entry(start, view.block, lane, lane + view.lanes, min(tuning.current().fold_run, view.block - run))
