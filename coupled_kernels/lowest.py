"""Selection in plain torch: the k lowest scores of one cluster, on any device, without a synchronization.

In: scores, sums of squares. Out: a mask. What it needs besides its mask does not grow with the number of
channels beyond `RANGE`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Channels that are looked at together: up to here a copy of the scores and their int64 indices are small.
RANGE = 1 << 20
DIGIT = 16  # bits that one pass of the radix selection fixes


def lowest(scores: Tensor, k: int) -> Tensor:
    """Mask (bool, (C,)) of the `k` lowest of `scores` (float32 or float64, (C,)) in the order (score, index).

    The result is that of a stable ascending sort: ties go to the lower index, +inf comes after all
    numbers and NaN last. It takes a threshold instead of a sort, which stays cheap at any C. Scores
    must not be negative.
    """
    if k == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if scores.numel() <= RANGE:
        threshold = _keys(torch.kthvalue(scores, k).values)
        ties = k - (_keys(scores) < threshold).sum()
    else:
        threshold, ties = _radix_threshold(scores, k)
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    for part, out in zip(scores.split(RANGE), mask.split(RANGE), strict=True):
        keys = _keys(part)
        tied = keys == threshold
        rank = tied.cumsum(0)
        torch.logical_or(keys < threshold, tied & (rank <= ties), out=out)
        ties = ties - rank[-1]
    return mask


def _keys(scores: Tensor) -> Tensor:
    """Bits as integers: those of a float that is not negative sort like the float, and NaN is made the largest."""
    bits = torch.int32 if scores.dtype == torch.float32 else torch.int64
    return torch.where(scores.isnan(), torch.iinfo(bits).max, scores.view(bits))


def _radix_threshold(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Key of the k-th lowest score, and how many of the scores that tie with it are among the k.

    Each pass counts the next bits of the keys that still match the threshold's leading bits.
    """
    threshold = torch.zeros_like(_keys(scores[0]))
    remaining = torch.full((), k, dtype=torch.int64, device=scores.device)
    for shift in range(8 * scores.element_size() - DIGIT, -1, -DIGIT):
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64, device=scores.device)
        for part in scores.split(RANGE):
            keys = _keys(part) >> shift
            matches = keys >> DIGIT == threshold >> shift >> DIGIT
            counts.index_add_(0, keys & ((1 << DIGIT) - 1), matches.long())
        below = counts.cumsum(0) - counts
        digit = (below < remaining).sum() - 1  # the last whose predecessors do not reach the budget
        remaining = remaining - below[digit]
        threshold += (digit << shift).to(threshold.dtype)
    return threshold, remaining
