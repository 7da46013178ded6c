"""Mask: chosen lanes become +0.0.

`mask_rows` serves tiles whose lanes are rows: whole rows of zeros in 16-byte stores, no loads of
weights. `mask_any` serves all others: predicated stores, and where chosen rows and chosen columns
cross, the crossing is looked at before it is overwritten, so that the count of zeros stays exact:

    zeros[tensor] += zeros in the crossing - chosen rows * chosen columns
"""

from __future__ import annotations

import triton
import triton.language as tl

from coupled_kernels.norms import load_tile
from coupled_kernels.rows import TILE_COL_LANE, TILE_ROW_LANE, TILE_TENSOR


@triton.jit
def mask_rows(
    tiles,
    chosen,
    DTYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    """Zeroes the rows that `chosen`, int8 (lanes,), names in `tiles`, int64 (programs, TILE_FIELDS)."""
    tile, pointer, rows, cols, stride = load_tile(tiles, DTYPE, VECTOR)
    lanes = chosen + tl.load(tile + TILE_ROW_LANE)
    row = tl.arange(0, STEP)
    col = tl.arange(0, COLS)
    at = pointer + row.to(tl.int64)[:, None] * stride + col.to(tl.int64)[None, :]
    zero = tl.zeros((STEP, COLS), DTYPE)
    for start in range(0, rows, STEP):
        hit = tl.load(lanes + start + row, mask=start + row < rows, other=0) != 0
        tl.store(at, zero, mask=hit[:, None] & (col < cols)[None, :])
        at += stride * STEP


@triton.jit
def mask_any(
    tiles,
    chosen,
    zeros,
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    """Zeroes the rows and columns that `chosen`, int8 (lanes,), names; corrects `zeros`, int64 (tensors,)."""
    tile, pointer, rows, cols, stride = load_tile(tiles, DTYPE, VECTOR)
    row_lane = tl.load(tile + TILE_ROW_LANE)
    col_lane = tl.load(tile + TILE_COL_LANE)
    tensor = tl.load(tile + TILE_TENSOR)
    row = tl.arange(0, STEP)
    col = tl.arange(0, COLS)
    at = pointer + row.to(tl.int64)[:, None] * stride + col.to(tl.int64)[None, :]
    zero = tl.zeros((STEP, COLS), DTYPE)
    in_cols = col < cols
    hit_cols = tl.load(chosen + col_lane + col, mask=in_cols, other=0) != 0
    crossed = tl.zeros((STEP,), tl.int64)
    for start in range(0, rows, STEP):
        in_rows = start + row < rows
        hit = in_rows[:, None] & hit_cols[None, :]
        if row_lane >= 0:
            hit_rows = tl.load(chosen + row_lane + start + row, mask=in_rows, other=0) != 0
            crossing = hit_rows[:, None] & hit_cols[None, :]
            x = tl.load(at, mask=crossing, other=1.0).to(COMPUTE)
            crossed += tl.sum((crossing & (x == 0)).to(tl.int32) - crossing.to(tl.int32), 1)
            hit = hit | (hit_rows[:, None] & in_cols[None, :])
        tl.store(at, zero, mask=hit)
        at += stride * STEP
    if row_lane >= 0:
        # Integer atomics: the sum does not depend on their order.
        tl.atomic_add(zeros + tensor, tl.sum(crossed, 0))
