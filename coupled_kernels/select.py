"""Selection: the k lowest scores of a cluster."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest(scores: Tensor, k: int) -> Tensor:
    """Mask (bool, (C,)) of the `k` lowest of `scores` (float, (C,)) in the order (score, index).

    The result is that of a stable ascending sort: ties go to the lower index, +inf comes after all
    numbers and NaN last. It takes a threshold instead of a sort, which stays cheap at any C.
    """
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if k == 0:
        return chosen
    threshold = torch.kthvalue(scores, k).values
    if threshold.isnan():
        tied = scores.isnan()
        chosen.logical_not_().logical_xor_(tied)
    else:
        tied = scores == threshold
        torch.lt(scores, threshold, out=chosen)
    missing = k - int(torch.count_nonzero(chosen))
    chosen[tied.nonzero().squeeze(1)[:missing]] = True
    return chosen
