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


@triton.jit
def account(runs, chosen, lane_zeros, chosen_lanes, zeros, FIELDS: tl.constexpr, LANES: tl.constexpr):
    run = runs + tl.program_id(0).to(tl.int64) * FIELDS
    lane = tl.load(run + 3) + tl.arange(0, LANES)
    inside = lane < tl.load(run + 4)
    at = tl.load(run + 6) + lane
    channel = (tl.load(run + 7) + lane) // tl.load(run + 8) % tl.load(run + 9)
    hit = tl.load(chosen + tl.load(run + 10) + channel, mask=inside, other=0) != 0
    tl.store(chosen_lanes + at, hit.to(tl.int8), mask=inside)
    tensor = tl.load(run + 11)
    if tensor >= 0:
        found = tl.load(lane_zeros + at, mask=inside, other=0)
        new = tl.where(hit, tl.load(run + 12) - found, 0) + found * tl.load(run + 13)
        tl.atomic_add(zeros + tensor, tl.sum(new, 0))


@triton.jit
def count(
    tiles,
    zeros,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    tile = tiles + tl.program_id(0).to(tl.int64) * FIELDS
    pointer, rows, cols, stride = load_tile(tile, DTYPE, VECTOR)
    row = tl.arange(0, STEP)
    col = tl.arange(0, COLS)
    at = pointer + row.to(tl.int64)[:, None] * stride + col.to(tl.int64)[None, :]
    found = tl.zeros((STEP, COLS), tl.int32)
    for start in range(0, rows, STEP):
        x = tl.load(at, mask=(start + row < rows)[:, None] & (col < cols)[None, :], other=1.0).to(COMPUTE)
        found += (x == 0).to(tl.int32)
        at += stride * STEP
    tl.atomic_add(zeros + tl.load(tile + 8), tl.sum(tl.sum(found, 1).to(tl.int64), 0))
