"""Tile sizes and warps of the Triton kernels: one table, with the reasons next to the numbers.

The kernels write in place, so nothing here is found by autotuning, whose trial runs would apply the
writes several times. To try other sizes, replace an entry of `TILES` before a plan is built; results
stay within the contract for any sizes, and bit-identical for the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileShape:
    """A tile is `rows` x `cols` elements, walked `step` rows at a time by `warps` warps.

    `rows` and `step` are powers of two or multiples of `step`; `step` and `cols` are powers of two.
    """

    rows: int
    cols: int
    step: int
    warps: int


# Eight elements a thread and step: one or two 16-byte loads, about 70 registers, so that four programs
# share a multiprocessor and hide each other's reductions. A tile leaves 8 bytes of workspace a lane:
# 512 x 512 keeps that under 1.6 % of bfloat16 weights with lanes on both axes. `tall` is for matrices
# with few columns, where a wide tile would be mostly empty. Eight warps of 64 lanes stay within the
# 1024 threads of an AMD workgroup.
TILES: dict[str, TileShape] = {
    "wide": TileShape(rows=512, cols=512, step=4, warps=8),
    "tall": TileShape(rows=2048, cols=16, step=128, warps=8),
}
# Below this many columns a matrix is tall.
WIDE_COLUMNS = 64

# Additions of squares down a column before the chain is closed and added to the tile's total: the
# float32 chains of a tile are 8 and 16 long instead of 128.
CHAIN = 8

# Fold and account walk lanes and channels; these sizes only have to fill a warp or two.
FOLD_LANES = 128
FOLD_DEPTH = 8
FOLD_CHANNELS = 16
FOLD_ENTRIES = 64
# Neighbouring lanes of one channel that one entry of the channel fold covers.
FOLD_RUN = 16
# Scores a selection pass takes at once.
SELECT_CHUNK = 1024
