"""The Triton path: one step's launches, in order, on tables that were uploaded when the plan was made.

In: pieces and the tensors they point into. Out: scores (`measure`), chosen channels (`select`), and
counts of zeros (`write`); or scaled channels (`scale`), all as device tensors; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

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
from coupled_kernels.scale import scale
from coupled_kernels.select import select
from coupled_kernels.tiles import TileClass, build_tables

_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class GpuStep:
    """One step over all clusters of a plan on one device."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        fillers: Sequence[Piece],
        tensors: Sequence[Tensor],
        segments: Sequence[Segment],
        pools: Sequence[Segment],
    ) -> None:
        self.tuning = tuning.current()
        tables = build_tables(pieces, fillers, tensors, segments, pools)
        self._uploaded: list[Tensor] = []
        self._streams: set[torch.cuda.Stream] = set()
        self.device = tensors[0].device
        self.channels = sum(segment.channels for segment in segments)
        self.lanes, self.slots = tables.lanes, tables.slots
        longest = max((run.size for run in tables.lane_runs), default=0)
        self.zeros_dtype = torch.int32 if longest < 2**31 else torch.int64
        self.row_tiles, self.other_tiles, self.all_tiles = {}, {}, {}
        for c in dict.fromkeys([*tables.row_tiles, *tables.other_tiles]):
            by_rows, others = tables.row_tiles.get(c, []), tables.other_tiles.get(c, [])
            self.all_tiles[c] = self._upload([*by_rows, *others])
            self.row_tiles[c], self.other_tiles[c] = self.all_tiles[c].split([len(by_rows), len(others)])
        self.wide = any(c.compute == torch.float64 for c in self.all_tiles)
        self.recounted = {c: self._upload(rows) for c, rows in tables.recounted.items()}
        self._lane_runs = tables.lane_runs
        self.lane_runs, self.entries = self._upload(tables.lane_runs), self._upload(tables.entries)
        self.chunks, self.pools = self._upload(tables.chunks), self._upload(tables.pools)
        # All of them are kept: a captured graph goes on reading the ones it was captured with.
        self._budgets: dict[tuple[int, ...], Tensor] = {}

    @property
    def workspace(self) -> int:
        """Bytes of the device that a step needs besides its results: tables, partial sums and counts."""
        slot = 2 + 4 + (8 if self.wide else 0)
        lane = 8 + self.zeros_dtype.itemsize
        return sum(table.nbytes for table in self._uploaded) + slot * self.slots + lane * self.lanes

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Has the allocator keep the tables until `stream` is done with them, should the step be dropped before."""
        if stream not in self._streams:
            self._streams.add(stream)
            for table in self._uploaded:
                table.record_stream(stream)

    def measure(self) -> Tensor:
        """Sum of squares of every channel, float64 (channels,); also keeps the zeros of every lane."""
        partials, zeros = self._empty(self.slots, torch.float32), self._empty(self.slots, torch.int16)
        wide_partials = self._empty(self.slots, torch.float64) if self.wide else partials
        lane_sums, self.lane_zeros = self._empty(self.lanes, torch.float64), self._empty(self.lanes, self.zeros_dtype)
        scores = self._empty(self.channels, torch.float64)
        for c, tiles in self.all_tiles.items():
            own = wide_partials if c.compute == torch.float64 else partials
            self._launch_tiles(norms, c, tiles, own, zeros, COMPUTE=_TYPES[c.compute], CHAIN=self.tuning.chain)
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
            ENTRIES=self.tuning.fold_entries,
            CHANNELS=self.tuning.fold_channels,
            warps=4,
        )
        return scores

    def select(self, scores: Tensor, budgets: Sequence[int] | Tensor) -> Tensor:
        """Mask, bool (channels,), of the lowest scores of each pool, as many as `budgets` says.

        Integers are uploaded once; a tensor, int64 (pools,) on the device, is read when the kernel runs.
        """
        if not isinstance(budgets, Tensor):
            key = tuple(budgets)
            if key not in self._budgets:
                self._budgets[key] = self._upload(key)
            budgets = self._budgets[key]
        chosen = self._empty(self.channels, torch.int8)
        launch(
            select,
            len(self.pools),
            self.device,
            scores,
            self.pools,
            budgets,
            chosen,
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
            LANES=self.tuning.fold_lanes,
            warps=4,
        )
        for c, tiles in self.row_tiles.items():
            self._launch_tiles(mask_rows, c, tiles, chosen_lanes)
        for c, tiles in self.other_tiles.items():
            self._launch_tiles(mask_any, c, tiles, chosen_lanes, zeros, COMPUTE=_TYPES[c.compute])
        for c, tiles in self.recounted.items():
            self._launch_tiles(count, c, tiles, zeros, COMPUTE=_TYPES[c.compute])

    def scale(self, factors: Tensor) -> None:
        """Multiply the elements of channel `c` by `factors[c]`, float64 (channels,)."""
        lane_factors = factors[self._lane_channels]
        for c, tiles in self.all_tiles.items():
            self._launch_tiles(scale, c, tiles, lane_factors, COMPUTE=_TYPES[c.compute])

    @cached_property
    def _lane_channels(self) -> Tensor:
        """Place of every lane's channel in the score vector, int64 (lanes,)."""
        places = torch.empty(self.lanes, dtype=torch.int64, device="cpu")
        for run in self._lane_runs:
            lane = torch.arange(run.start, run.stop, device="cpu")
            places[run.lane + lane] = run.base + (run.first + lane) // run.block % run.channels
        return self._upload(places.tolist())

    def _launch_tiles(
        self, kernel: object, tile_class: TileClass, tiles: Tensor, *arguments: Tensor, **constants: object
    ) -> None:
        shape = tile_class.shape
        launch(
            kernel,
            len(tiles),
            self.device,
            tiles,
            *arguments,
            DTYPE=_TYPES[tile_class.dtype],
            VECTOR=tile_class.vector,
            STEP=shape.step,
            COLS=shape.cols,
            warps=shape.warps,
            **constants,
        )

    def _upload(self, rows: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True)
        self._uploaded.append(table)
        self._streams.clear()  # they know nothing of this one
        return table

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)
