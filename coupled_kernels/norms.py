"""Norms: every element is read once.

    partial[slot of lane l in this tile] = sum of x * x        (float32 or float64)
    zeros  [slot of lane l in this tile] = number of x == 0    (int16)

over the elements of lane l inside one tile. A tile may have lanes on its rows, on its columns, or on
both. Reads each element once; writes 6 bytes (10 in float64) a lane and tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coupled_kernels.rows import (
    TILE_ADDRESS,
    TILE_COL_SLOT,
    TILE_COLS,
    TILE_FIELDS,
    TILE_ROW_SLOT,
    TILE_ROW_STRIDE,
    TILE_ROWS,
)


@triton.jit
def load_tile(tiles, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """This program's row of `tiles` (int64, (programs, TILE_FIELDS)), and what it says of memory.

    Returns the row, the pointer to the tile's first element, rows, columns and row stride (elements),
    with the alignment that the tile's class guarantees.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * TILE_FIELDS
    pointer = tl.load(tile + TILE_ADDRESS).to(tl.pointer_type(DTYPE))
    rows = tl.load(tile + TILE_ROWS)
    cols = tl.load(tile + TILE_COLS)
    stride = tl.load(tile + TILE_ROW_STRIDE)
    if VECTOR > 1:
        pointer = tl.multiple_of(pointer, 16)
        cols = tl.multiple_of(cols, VECTOR)
        stride = tl.multiple_of(stride, VECTOR)
    return tile, pointer, rows, cols, stride


@triton.jit
def norms(
    tiles,
    partials,
    zeros,
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """`partials`, COMPUTE (slots,), and `zeros`, int16 (slots,), from `tiles`, int64 (programs, TILE_FIELDS)."""
    tile, pointer, rows, cols, stride = load_tile(tiles, DTYPE, VECTOR)
    row_slot = tl.load(tile + TILE_ROW_SLOT)
    col_slot = tl.load(tile + TILE_COL_SLOT)

    row = tl.arange(0, STEP)
    col = tl.arange(0, COLS)
    at = pointer + row.to(tl.int64)[:, None] * stride + col.to(tl.int64)[None, :]
    col_sums = tl.zeros((STEP, COLS), COMPUTE)
    col_zeros = tl.zeros((STEP, COLS), tl.int32)
    for top in range(0, rows, STEP * CHAIN):
        # Short chains of additions keep the rounding of a long column small.
        chain = tl.zeros((STEP, COLS), COMPUTE)
        for start in range(top, tl.minimum(top + STEP * CHAIN, rows), STEP):
            in_rows = start + row < rows
            inside = in_rows[:, None] & (col < cols)[None, :]
            x = tl.load(at, mask=inside, other=0).to(COMPUTE)
            at += stride * STEP
            square = x * x
            zero = (inside & (x == 0)).to(tl.int32)
            chain += square
            col_zeros += zero
            if row_slot >= 0:
                tl.store(partials + row_slot + start + row, tl.sum(square, 1), mask=in_rows)
                tl.store(zeros + row_slot + start + row, tl.sum(zero, 1).to(tl.int16), mask=in_rows)
        col_sums += chain
    if col_slot >= 0:
        tl.store(partials + col_slot + col, tl.sum(col_sums, 0), mask=col < cols)
        tl.store(zeros + col_slot + col, tl.sum(col_zeros, 0).to(tl.int16), mask=col < cols)
