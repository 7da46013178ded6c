"""Account: from chosen channels to chosen lanes, and to the number of literal zeros of each tensor.

    chosen_lane[l] = chosen[channel of l]
    zeros[tensor] += zeros of its counted lanes + sum over chosen lanes of (size - zeros of the lane)

which together with what `mask_any` adds for crossings is the final count, without a second pass over
the weights. `count` is that second pass, for the few elements it is needed for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coupled_kernels.norms import load_tile
from coupled_kernels.rows import (
    RUN_BASE,
    RUN_BLOCK,
    RUN_CHANNELS,
    RUN_COUNTED,
    RUN_FIELDS,
    RUN_FIRST,
    RUN_LANE,
    RUN_SIZE,
    RUN_START,
    RUN_STOP,
    RUN_TENSOR,
    TILE_TENSOR,
)


@triton.jit
def account(runs, chosen, lane_zeros, chosen_lanes, zeros, LANES: tl.constexpr):
    """`chosen_lanes`, int8 (lanes,), from `chosen`, int8 (channels,); adds to `zeros`, int64 (tensors,).

    `runs`, int64 (programs, RUN_FIELDS), and `lane_zeros`, int32 or int64 (lanes,), are those of `fold_lanes`.
    """
    run = runs + tl.program_id(0).to(tl.int64) * RUN_FIELDS
    lane = tl.load(run + RUN_START) + tl.arange(0, LANES)
    inside = lane < tl.load(run + RUN_STOP)
    at = tl.load(run + RUN_LANE) + lane
    channel = (tl.load(run + RUN_FIRST) + lane) // tl.load(run + RUN_BLOCK) % tl.load(run + RUN_CHANNELS)
    hit = tl.load(chosen + tl.load(run + RUN_BASE) + channel, mask=inside, other=0) != 0
    tl.store(chosen_lanes + at, hit.to(tl.int8), mask=inside)
    tensor = tl.load(run + RUN_TENSOR)
    if tensor >= 0:
        found = tl.load(lane_zeros + at, mask=inside, other=0).to(tl.int64)
        new = tl.where(hit, tl.load(run + RUN_SIZE) - found, 0) + found * tl.load(run + RUN_COUNTED)
        tl.atomic_add(zeros + tensor, tl.sum(new, 0))


@triton.jit
def count(
    tiles,
    zeros,
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    """Adds the literal zeros of `tiles`, int64 (programs, TILE_FIELDS), to `zeros`, int64 (tensors,)."""
    tile, pointer, rows, cols, stride = load_tile(tiles, DTYPE, VECTOR)
    row = tl.arange(0, STEP)
    col = tl.arange(0, COLS)
    at = pointer + row.to(tl.int64)[:, None] * stride + col.to(tl.int64)[None, :]
    found = tl.zeros((STEP, COLS), tl.int32)
    for start in range(0, rows, STEP):
        x = tl.load(at, mask=(start + row < rows)[:, None] & (col < cols)[None, :], other=1.0).to(COMPUTE)
        found += (x == 0).to(tl.int32)
        at += stride * STEP
    tl.atomic_add(zeros + tl.load(tile + TILE_TENSOR), tl.sum(tl.sum(found, 1).to(tl.int64), 0))
