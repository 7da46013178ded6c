"""Scale: every lane is multiplied by a factor of its own.

    x <- x * factor[lane of x]        (+0.0 where the factor is 0)

in the cluster's dtype, rounded once. Reads and writes each element once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coupled_kernels.norms import load_tile
from coupled_kernels.rows import TILE_COL_LANE, TILE_ROW_LANE


@triton.jit
def scale(
    tiles,
    factors,
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    """Scales `tiles`, int64 (programs, TILE_FIELDS), by `factors`, float64 (lanes,), of rows, columns or both."""
    tile, pointer, rows, cols, stride = load_tile(tiles, DTYPE, VECTOR)
    row_lane = tl.load(tile + TILE_ROW_LANE)
    col_lane = tl.load(tile + TILE_COL_LANE)
    row = tl.arange(0, STEP)
    col = tl.arange(0, COLS)
    at = pointer + row.to(tl.int64)[:, None] * stride + col.to(tl.int64)[None, :]
    # Where one side has no lanes, its factors are ones.
    row_lanes = tl.where(row_lane >= 0, rows, 0)
    by_col = tl.load(factors + col_lane + col, mask=col < tl.where(col_lane >= 0, cols, 0), other=1).to(COMPUTE)
    for start in range(0, rows, STEP):
        by_row = tl.load(factors + row_lane + start + row, mask=start + row < row_lanes, other=1).to(COMPUTE)
        factor = by_row[:, None] * by_col[None, :]
        inside = (start + row < rows)[:, None] & (col < cols)[None, :]
        x = tl.load(at, mask=inside, other=0).to(COMPUTE)
        # -1 * 0 and NaN * 0 are not +0.
        tl.store(at, tl.where(factor == 0, 0, x * factor).to(DTYPE), mask=inside)
        at += stride * STEP
