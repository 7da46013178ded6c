"""Fold: partial sums become lane sums, lane sums become scores, in float64 and in a fixed order.

    lane_sum[l]   = sum of partial[slot] over the tiles of lane l
    lane_zeros[l] = sum of zeros[slot]   over the tiles of lane l
    score[c]      = sum of lane_sum[l]   over the lanes l of channel c in all voting pieces

Every channel of a cluster is summed in the same order, so identical channels tie exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coupled_kernels.rows import (
    CHUNK_BASE,
    CHUNK_ENTRIES,
    CHUNK_ENTRY,
    CHUNK_FIELDS,
    CHUNK_START,
    CHUNK_STOP,
    ENTRY_FIELDS,
    ENTRY_HIGH,
    ENTRY_LANE,
    ENTRY_LENGTH,
    ENTRY_LOW,
    ENTRY_STRIDE,
    RUN_FIELDS,
    RUN_LANE,
    RUN_LANES,
    RUN_PARTIALS,
    RUN_SLOT,
    RUN_START,
    RUN_STOP,
    RUN_WIDE,
)


@triton.jit
def fold_lanes(
    runs,
    partials,
    wide_partials,
    zeros,
    lane_sums,
    lane_zeros,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """`lane_sums`, float64, and `lane_zeros`, int32 or int64, (lanes,), from what `norms` left in its slots.

    `runs`, int64 (programs, RUN_FIELDS), says which slots; those of float64 sums are in `wide_partials`.
    """
    run = runs + tl.program_id(0).to(tl.int64) * RUN_FIELDS
    slot = tl.load(run + RUN_SLOT)
    count = tl.load(run + RUN_PARTIALS)
    lanes = tl.load(run + RUN_LANES)
    lane = tl.load(run + RUN_START) + tl.arange(0, LANES)
    inside = lane < tl.load(run + RUN_STOP)
    wide = tl.load(run + RUN_WIDE)
    depth = tl.arange(0, DEPTH)

    sums = tl.zeros((DEPTH, LANES), tl.float64)
    found = tl.zeros((DEPTH, LANES), tl.int64)
    for start in range(0, count, DEPTH):
        at = slot + (start + depth)[:, None] * lanes + lane[None, :]
        valid = (start + depth < count)[:, None] & inside[None, :]
        if wide != 0:
            sums += tl.load(wide_partials + at, mask=valid, other=0).to(tl.float64)
        else:
            sums += tl.load(partials + at, mask=valid, other=0).to(tl.float64)
        found += tl.load(zeros + at, mask=valid, other=0).to(tl.int64)
    out = tl.load(run + RUN_LANE) + lane
    tl.store(lane_sums + out, tl.sum(sums, 0), mask=inside)
    tl.store(lane_zeros + out, tl.sum(found, 0), mask=inside)


@triton.jit
def fold_channels(
    chunks,
    entries,
    lane_sums,
    scores,
    ENTRIES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """`scores`, float64 (channels of all clusters,), from `lane_sums`, float64 (lanes,).

    `chunks`, int64 (programs, CHUNK_FIELDS), names channels and their `entries`, int64 (n, ENTRY_FIELDS).
    """
    chunk = chunks + tl.program_id(0).to(tl.int64) * CHUNK_FIELDS
    channel = tl.load(chunk + CHUNK_START) + tl.arange(0, CHANNELS)
    inside = channel < tl.load(chunk + CHUNK_STOP)
    first = tl.load(chunk + CHUNK_ENTRY)
    count = tl.load(chunk + CHUNK_ENTRIES)

    sums = tl.zeros((ENTRIES, CHANNELS), tl.float64)
    for start in range(0, count, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        valid = index < count
        entry = entries + (first + index) * ENTRY_FIELDS
        stride = tl.load(entry + ENTRY_STRIDE, mask=valid, other=0)
        low = tl.load(entry + ENTRY_LOW, mask=valid, other=0)
        high = tl.load(entry + ENTRY_HIGH, mask=valid, other=0)
        length = tl.load(entry + ENTRY_LENGTH, mask=valid, other=0)
        lane = tl.load(entry + ENTRY_LANE, mask=valid, other=0)[:, None] + stride[:, None] * channel[None, :]
        for offset in range(tl.max(length)):
            here = (offset < length)[:, None] & inside[None, :]
            here = here & (lane + offset >= low[:, None]) & (lane + offset < high[:, None])
            sums += tl.load(lane_sums + lane + offset, mask=here, other=0)
    tl.store(scores + tl.load(chunk + CHUNK_BASE) + channel, tl.sum(sums, 0), mask=inside)
