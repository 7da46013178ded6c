"""Steps of the optimizer around a base that does nothing, beside TorchAO's released wrapper.

The layers are those of TinyLlama. What is timed is what pruning adds to a training step: latent weights, the
projection and its counts, the frozen set; and for many small tensors, the check that no setting changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.registry import TINYLLAMA, build, parameters
from coupled_prune import PruneOptimizer

ROUNDS = 7


class Idle(torch.optim.SGD):
    """A base optimizer whose steps cost nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def torchao(base: torch.optim.Optimizer, **settings: Any) -> Any:
    optim = pytest.importorskip("torchao.prototype.pat.optim")
    return optim.PruneOptimizer(base, **settings)


def compact(base: torch.optim.Optimizer, **settings: Any) -> PruneOptimizer:
    return PruneOptimizer(base, latent_storage="compact", **settings)


PEERS: dict[str, Callable[..., Any]] = {
    "coupled-prune": PruneOptimizer,
    "coupled-prune, compact": compact,
    "torchao 0.18": torchao,
}


def layers(dtype: torch.dtype) -> list[nn.Parameter]:
    weights = parameters(build("tinyllama-1.1b", dtype))
    return [nn.Parameter(w) for w in weights if w.dim() == 2 and w.size(0) != TINYLLAMA.vocabulary]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("phase", ["pruning", "healing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("grouper", ["Dim0Grouper", "Dim1Grouper"])
@pytest.mark.parametrize("peer", PEERS)
def test_step(benchmark: Any, peer: str, grouper: str, dtype: torch.dtype, phase: str) -> None:
    benchmark.group = f"{phase} step, {grouper}, {str(dtype).removeprefix('torch.')}"
    weights = layers(dtype)
    group = {"params": weights, "prox_type": "MinSparsityConstraint", "group_type": grouper, "min_sparsity": 0.25}
    optimizer = PEERS[peer](Idle([group], lr=1e-4), healing_start_step=2 if phase == "healing" else 10**9)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    for _ in range(3):
        optimizer.step()
    benchmark.pedantic(optimizer.step, rounds=ROUNDS)
    size = sum(weight.nbytes for weight in weights)
    kept = getattr(optimizer, "latent_bytes", size)
    benchmark.extra_info.update(latents=f"{kept / size:.0%} of the weights")
    if benchmark.stats:  # there are none with --benchmark-disable
        benchmark.extra_info["gb_per_s"] = round(size / benchmark.stats.stats.median / 1e9, 2)


@pytest.mark.parametrize("groups", [20, 250])
def test_unchanged_settings(benchmark: Any, groups: int) -> None:
    benchmark.group = f"check of unchanged settings, 250 members in {groups} groups"
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(250)]
    shared = {"prox_type": "CoupledMinSparsityConstraint", "couple_key": "c", "min_sparsity": 0.5}
    own = [{**shared, "params": weights[i::groups], "group_type": "Dim0Grouper"} for i in range(groups)]
    optimizer = PruneOptimizer(Idle(own, lr=1e-4))
    benchmark(optimizer._settings.stages, optimizer.param_groups)
