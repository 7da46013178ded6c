"""Selection in plain torch: the k lowest scores of one cluster, on any device, without a synchronization."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest(scores: Tensor, k: int) -> Tensor:
    """Mask (bool, (C,)) of the `k` lowest of `scores` (float, (C,)) in the order (score, index).

    The result is that of a stable ascending sort: ties go to the lower index, +inf comes after all
    numbers and NaN last. It takes a threshold instead of a sort, which stays cheap at any C.
    """
    if k == 0:
        return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    threshold = torch.kthvalue(scores, k).values
    missing = threshold.isnan()
    below = (scores < threshold) | (missing & ~scores.isnan())
    tied = (scores == threshold) | (missing & scores.isnan())
    return below | (tied & (tied.cumsum(0) <= k - below.sum()))
