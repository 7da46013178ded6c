"""Tile sizes and warps of the Triton kernels, and where the flat path begins: one table, with the reasons.

The kernels write in place, so nothing here is found by autotuning, whose trial runs would apply the
writes several times. To try other sizes:

    with tuning.override(wide=TileShape(rows=256, cols=512, step=4, warps=4)):
        prune_(clusters)

Results stay within the contract for any sizes, and are bit-identical for the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class TileShape:
    """A tile is `rows` x `cols` elements, walked `step` rows at a time by `warps` warps.

    `step` and `cols` are powers of two, `rows` is a multiple of `step`; neither `rows` nor `cols` exceeds
    32767, since zeros of a lane in a tile are counted in int16.
    """

    rows: int
    cols: int
    step: int
    warps: int


@dataclass(frozen=True)
class Tuning:
    # Eight elements a thread and step: one or two 16-byte loads, about 70 registers, so that several
    # programs share a multiprocessor and hide each other's reductions. A tile leaves 6 bytes of
    # workspace a lane: 512 x 512 keeps that at 1.2 % of bfloat16 weights with lanes on both axes.
    wide: TileShape = TileShape(rows=512, cols=512, step=4, warps=8)
    # For matrices of fewer than `wide_columns` columns, where a wide tile would be mostly empty.
    tall: TileShape = TileShape(rows=2048, cols=16, step=128, warps=8)
    wide_columns: int = 64
    # Contiguous rows longer than this (a multiple of 8) are cut into several lanes of the same channel: a
    # single lane leaves a partial sum in each of its tiles, and these are added one after the other.
    longest_row: int = 1 << 15
    # Steps that are added up before they join a column's total: the float32 chains of a tile are 8 and
    # 16 additions long instead of 128.
    chain: int = 8
    # Fold and account walk lanes and channels; blocks only have to fill a few warps.
    fold_lanes: int = 128
    fold_depth: int = 8
    fold_channels: int = 16
    fold_entries: int = 64
    # Neighbouring lanes of one channel that one entry of the channel fold covers.
    fold_run: int = 16
    # Scores that a pass of the selection takes at once.
    select_chunk: int = 1024
    # A cluster of contiguous runs with at least this many channels and fewer elements a channel is worked
    # through in ranges of channels: float64 for all of them at once would take a fair share of the weights.
    flat_channels: int = 1 << 16
    flat_elements: int = 64


# A wave of an AMD GPU has 64 lanes: half the waves are as many threads.
TUNINGS = {
    "cuda": Tuning(),
    "hip": Tuning(wide=TileShape(512, 512, 4, 4), tall=TileShape(2048, 16, 128, 4)),
}
_current = TUNINGS["hip" if torch.version.hip else "cuda"]


def current() -> Tuning:
    """The tuning that plans are made with."""
    return _current


@contextmanager
def override(**changes: Any) -> Iterator[Tuning]:
    """Other values, by the names of `Tuning`, for plans that are made inside the context."""
    global _current
    before, _current = _current, replace(_current, **changes)
    try:
        yield _current
    finally:
        _current = before
