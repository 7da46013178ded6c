"""Dense projection on one device: each model and dtype is a group with all peers side by side.

`pytest benchmarks` prints seconds; GB/s of weights and the peak of extra memory are extra info.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.memory import peak_growth
from benchmarks.peers import PEERS
from benchmarks.registry import MODELS, build, parameters

ROUNDS = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("peer", PEERS)
def test_dense(benchmark: Any, model: str, dtype: torch.dtype, peer: str) -> None:
    benchmark.group = f"{model}, {str(dtype).removeprefix('torch.')}"
    clusters = build(model, dtype)
    weights = parameters(clusters)
    dense = [weight.clone() for weight in weights]

    def restore() -> None:
        for weight, original in zip(weights, dense, strict=True):
            weight.copy_(original)

    PEERS[peer](clusters)
    restore()
    grown = peak_growth(lambda: PEERS[peer](clusters))
    zeros = benchmark.pedantic(PEERS[peer], args=(clusters,), setup=restore, rounds=ROUNDS, warmup_rounds=1)
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    benchmark.extra_info.update(
        elements=sum(weight.numel() for weight in weights), zeros=zeros, peak_growth=f"{grown / size:.1%}"
    )
    if benchmark.stats:  # there are none with --benchmark-disable
        benchmark.extra_info["gb_per_s"] = round(size / benchmark.stats.stats.median / 1e9, 2)
