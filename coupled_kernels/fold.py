"""Fold: partial sums become lane sums, lane sums become scores, in float64 and in a fixed order.

    lane_sum[l]   = sum of partial[slot] over the tiles of lane l
    lane_zeros[l] = sum of zeros[slot]   over the tiles of lane l
    score[c]      = sum of lane_sum[l]   over the lanes l of channel c in all voting pieces

Every channel of a cluster is summed in the same order, so identical channels tie exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold_lanes(
    runs,
    partials,
    wide_partials,
    zeros,
    lane_sums,
    lane_zeros,
    FIELDS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    run = runs + tl.program_id(0).to(tl.int64) * FIELDS
    slot = tl.load(run)
    count = tl.load(run + 1)
    lanes = tl.load(run + 2)
    lane = tl.load(run + 3) + tl.arange(0, LANES)
    inside = lane < tl.load(run + 4)
    wide = tl.load(run + 5)
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
    out = tl.load(run + 6) + lane
    tl.store(lane_sums + out, tl.sum(sums, 0), mask=inside)
    tl.store(lane_zeros + out, tl.sum(found, 0), mask=inside)


@triton.jit
def fold_channels(
    chunks,
    entries,
    lane_sums,
    scores,
    CHUNK_FIELDS: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    chunk = chunks + tl.program_id(0).to(tl.int64) * CHUNK_FIELDS
    channel = tl.load(chunk + 1) + tl.arange(0, CHANNELS)
    inside = channel < tl.load(chunk + 2)
    first = tl.load(chunk + 3)
    count = tl.load(chunk + 4)

    sums = tl.zeros((ENTRIES, CHANNELS), tl.float64)
    for start in range(0, count, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        valid = index < count
        entry = entries + (first + index) * ENTRY_FIELDS
        stride = tl.load(entry + 1, mask=valid, other=0)
        low = tl.load(entry + 2, mask=valid, other=0)
        high = tl.load(entry + 3, mask=valid, other=0)
        length = tl.load(entry + 4, mask=valid, other=0)
        lane = tl.load(entry, mask=valid, other=0)[:, None] + stride[:, None] * channel[None, :]
        for offset in range(tl.max(length)):
            here = (offset < length)[:, None] & inside[None, :]
            here = here & (lane + offset >= low[:, None]) & (lane + offset < high[:, None])
            sums += tl.load(lane_sums + lane + offset, mask=here, other=0)
    tl.store(scores + tl.load(chunk) + channel, tl.sum(sums, 0), mask=inside)
