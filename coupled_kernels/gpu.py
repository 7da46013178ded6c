"""The Triton path: one step's launches, in order, on tables that were uploaded when the plan was made.

In: pieces and the tensors they point into. Out: scores (`measure`), chosen channels (`select`), and
counts of zeros (`write`), all as device tensors; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from coupled_kernels import tuning
from coupled_kernels.account import account, count
from coupled_kernels.fold import fold_channels, fold_lanes
from coupled_kernels.launch import launch
from coupled_kernels.mask import mask_any, mask_rows
from coupled_kernels.norms import norms
from coupled_kernels.pieces import Piece, Segment
from coupled_kernels.select import select
from coupled_kernels.tiles import Chunk, Entry, LaneRun, Tables, Tile, TileClass, build_tables

_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
SEGMENT_FIELDS = 3


def _classes(tables: Tables) -> list[TileClass]:
    return list(dict.fromkeys([*tables.row_tiles, *tables.other_tiles]))


class GpuStep:
    """One step over all clusters of a plan on one device."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        fillers: Sequence[Piece],
        tensors: Sequence[Tensor],
        segments: Sequence[Segment],
    ) -> None:
        self.tuning = tuning.current()
        tables = build_tables(pieces, fillers, tensors, segments)
        self.device = tensors[0].device
        self.channels = sum(segment.channels for segment in segments)
        self.lanes, self.slots = tables.lanes, tables.slots
        self.wide = any(tile_class.compute == torch.float64 for tile_class in _classes(tables))
        self.row_tiles = {c: self._upload(rows) for c, rows in tables.row_tiles.items()}
        self.other_tiles = {c: self._upload(rows) for c, rows in tables.other_tiles.items()}
        self.all_tiles = {
            c: self._upload([*tables.row_tiles.get(c, []), *tables.other_tiles.get(c, [])]) for c in _classes(tables)
        }
        self.recounted = {c: self._upload(rows) for c, rows in tables.recounted.items()}
        self.lane_runs, self.entries = self._upload(tables.lane_runs), self._upload(tables.entries)
        self.chunks = self._upload(tables.chunks)
        self.segments = self._upload([(s.base, s.channels, int(s.dtype == torch.float64)) for s in segments])
        self._budgets: dict[tuple[int, ...], Tensor] = {}

    @property
    def workspace(self) -> int:
        """Bytes of partial sums and counts that a step needs besides its results."""
        return self.slots * (16 if self.wide else 8) + self.lanes * 17

    def measure(self) -> Tensor:
        """Sum of squares of every channel, float64 (channels,); also keeps the zeros of every lane."""
        partials, zeros = self._empty(self.slots, torch.float32), self._empty(self.slots, torch.int32)
        wide_partials = self._empty(self.slots, torch.float64) if self.wide else partials
        lane_sums, self.lane_zeros = self._empty(self.lanes, torch.float64), self._empty(self.lanes, torch.int64)
        scores = self._empty(self.channels, torch.float64)
        for tile_class, tiles in self.all_tiles.items():
            own = wide_partials if tile_class.compute == torch.float64 else partials
            self._launch_tiles(norms, tile_class, tiles, own, zeros, COMPUTE=None, CHAIN=self.tuning.chain)
        launch(
            fold_lanes,
            len(self.lane_runs),
            self.device,
            self.lane_runs,
            partials,
            wide_partials,
            zeros,
            lane_sums,
            self.lane_zeros,
            FIELDS=len(LaneRun._fields),
            DEPTH=self.tuning.fold_depth,
            LANES=self.tuning.fold_lanes,
            warps=4,
        )
        launch(
            fold_channels,
            len(self.chunks),
            self.device,
            self.chunks,
            self.entries,
            lane_sums,
            scores,
            CHUNK_FIELDS=len(Chunk._fields),
            ENTRY_FIELDS=len(Entry._fields),
            ENTRIES=self.tuning.fold_entries,
            CHANNELS=self.tuning.fold_channels,
            warps=4,
        )
        return scores

    def select(self, scores: Tensor, budgets: Sequence[int] | Tensor) -> Tensor:
        """Mask, bool (channels,), of the lowest scores of each cluster, as many as `budgets` says.

        Integers are uploaded once; a tensor, int64 (clusters,) on the device, is read when the kernel runs.
        """
        if not isinstance(budgets, Tensor):
            key = tuple(budgets)
            if key not in self._budgets:
                self._budgets = {key: self._upload(key)}
            budgets = self._budgets[key]
        chosen = self._empty(self.channels, torch.int8)
        launch(
            select,
            len(self.segments),
            self.device,
            scores,
            self.segments,
            budgets,
            chosen,
            FIELDS=SEGMENT_FIELDS,
            CHUNK=self.tuning.select_chunk,
            warps=4,
        )
        return chosen.view(torch.bool)

    def write(self, chosen: Tensor, zeros: Tensor) -> None:
        """Set chosen channels (bool (channels,)) to +0.0; adds each tensor's literal zeros to `zeros`, int64."""
        chosen_lanes = self._empty(self.lanes, torch.int8)
        launch(
            account,
            len(self.lane_runs),
            self.device,
            self.lane_runs,
            chosen.view(torch.int8),
            self.lane_zeros,
            chosen_lanes,
            zeros,
            FIELDS=len(LaneRun._fields),
            LANES=self.tuning.fold_lanes,
            warps=4,
        )
        for tile_class, tiles in self.row_tiles.items():
            self._launch_tiles(mask_rows, tile_class, tiles, chosen_lanes)
        for tile_class, tiles in self.other_tiles.items():
            self._launch_tiles(mask_any, tile_class, tiles, chosen_lanes, zeros, COMPUTE=None)
        for tile_class, tiles in self.recounted.items():
            self._launch_tiles(count, tile_class, tiles, zeros, COMPUTE=None)

    def _launch_tiles(
        self, kernel: object, tile_class: TileClass, tiles: Tensor, *arguments: Tensor, **constants: object
    ) -> None:
        if "COMPUTE" in constants:
            constants["COMPUTE"] = _TYPES[tile_class.compute]
        shape = tile_class.shape
        launch(
            kernel,
            len(tiles),
            self.device,
            tiles,
            *arguments,
            FIELDS=len(Tile._fields),
            DTYPE=_TYPES[tile_class.dtype],
            VECTOR=tile_class.vector,
            STEP=shape.step,
            COLS=shape.cols,
            warps=shape.warps,
            **constants,
        )

    def _upload(self, rows: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)
