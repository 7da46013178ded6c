"""Select: the k lowest scores of every pool (as a rule a cluster), all in one launch, on the device.

    chosen[c] = (score[c], c) is among the k smallest of its pool

by radix selection: a score's bits, read as an unsigned integer, sort like the score (sums of squares
are not negative; +inf comes after all numbers, NaN is made the largest). Each pass counts the next
eight bits of the scores that still match the threshold's leading bits and so fixes eight bits more.
The budgets `k` are device values, so a captured graph reads live ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coupled_kernels.rows import SEGMENT_BASE, SEGMENT_CHANNELS, SEGMENT_FIELDS, SEGMENT_WIDE


@triton.jit
def load_keys(scores, at, mask, wide):
    """Scores as int64 keys in ranking order: all 64 bits, or those of the float32 rounding in the upper half."""
    score = tl.load(scores + at, mask=mask, other=0)
    narrow = score.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32
    key = tl.where(wide != 0, score.to(tl.int64, bitcast=True), narrow)
    # The largest key whose lower half is empty, above that of +inf either way.
    return tl.where(score != score, 0x7FFFFFFF00000000, key)


@triton.jit
def select(scores, segments, budgets, chosen, CHUNK: tl.constexpr):
    """`chosen`, int8 (channels of all clusters,), from `scores`, float64, of the same length.

    One program a pool reads its row of `segments`, int64 (pools, SEGMENT_FIELDS), and its budget, int64.
    """
    pool = tl.program_id(0).to(tl.int64)
    segment = segments + pool * SEGMENT_FIELDS
    base = tl.load(segment + SEGMENT_BASE)
    channels = tl.load(segment + SEGMENT_CHANNELS)
    wide = tl.load(segment + SEGMENT_WIDE)
    remaining = tl.load(budgets + pool)
    digits = tl.arange(0, 512)

    threshold = remaining * 0
    passes = tl.where(wide != 0, 8, 4)
    for step in range(passes):
        shift = 56 - 8 * step
        histogram = tl.zeros((512,), tl.int64)
        for start in range(0, channels, CHUNK):
            index = start + tl.arange(0, CHUNK)
            valid = index < channels
            key = load_keys(scores, base + index, valid, wide)
            # Two shifts: one by all 64 bits would be undefined.
            matches = valid & ((key >> shift) >> 8 == (threshold >> shift) >> 8)
            digit = tl.where(matches, (key >> shift) & 255, 511).to(tl.int32)
            histogram += tl.histogram(digit, 512).to(tl.int64)
        reached = tl.cumsum(tl.where(digits < 256, histogram, 0), 0)
        short = (reached < remaining) & (digits < 256)
        digit = tl.sum(short.to(tl.int64), 0)
        remaining -= tl.sum(tl.where(short, histogram, 0), 0)
        threshold += digit << shift

    tied_before = remaining * 0
    for start in range(0, channels, CHUNK):
        index = start + tl.arange(0, CHUNK)
        valid = index < channels
        key = load_keys(scores, base + index, valid, wide)
        tied = (valid & (key == threshold)).to(tl.int64)
        rank = tied_before + tl.cumsum(tied, 0)
        hit = (key < threshold) | ((tied != 0) & (rank <= remaining))
        tl.store(chosen + base + index, hit.to(tl.int8), mask=valid)
        tied_before += tl.sum(tied, 0)
