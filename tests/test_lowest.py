"""Selection in plain torch against a stable sort, at lengths on both sides of the range it works through."""

from __future__ import annotations

import pytest
import torch

from coupled_kernels import lowest
from coupled_kernels.lowest import RANGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [3, 1000, 2**40], ids=["ties", "few ties", "no ties"])
@pytest.mark.parametrize("channels", [1, 2, 1000, RANGE, 2 * RANGE + 1])
def test_as_a_stable_sort(channels, values, dtype):
    generator = torch.Generator().manual_seed(channels)
    scores = torch.randint(0, values, (channels,), generator=generator).to(dtype) / 7
    if channels > 2:
        places = torch.randint(0, channels, (2, 5), generator=generator)
        scores[places[0]], scores[places[1]] = float("inf"), float("nan")
    order = torch.sort(scores, stable=True).indices
    for k in {0, 1, channels // 3, channels - 3, channels - 1, channels}:
        if k >= 0:
            expected = torch.zeros(channels, dtype=torch.bool)
            expected[order[:k]] = True
            assert torch.equal(lowest(scores, k), expected)
