"""Small trainings for the optimizer's tests: parameters, gradients from one seed, and comparisons by bits."""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

from coupled_prune import PruneOptimizer
from tests.oracle import bits

BASES = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.02, weight_decay=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.02, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.02, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.05),
}


class Stream(nn.Module):
    """One residual stream of 8: an embedding and a reader on columns, a writer with its bias on rows, and a norm."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embed": (10, 8), "up": (12, 8), "down": (8, 12), "bias": (8,), "gain": (8,), "free": (5,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def groups(self, min_sparsity=0.5, **settings):
        shared = {
            "prox_type": "CoupledMinSparsityConstraint",
            "couple_key": "stream",
            "min_sparsity": min_sparsity,
            **settings,
        }
        return [
            {**shared, "params": [self.embed, self.up], "group_type": "Dim1Grouper"},
            {**shared, "params": [self.down, self.bias], "group_type": "Dim0Grouper"},
            {**shared, "params": [self.gain], "group_type": "Dim0Grouper", "scored": False},
            {"params": [self.free]},
        ]

    def slices(self, channel):
        """Everything that holds one channel."""
        return [
            self.embed[:, channel],
            self.up[:, channel],
            self.down[channel],
            self.bias[channel],
            self.gain[channel],
        ]

    def dead(self):
        """Channels that are +0.0 in every member."""
        return [c for c in range(8) if all((bits(s.detach().reshape(-1)) == 0).all() for s in self.slices(c))]


def gradients(parameters, step, seed=0):
    """Random gradients that depend on the step and, as real ones, on the weights."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for p in parameters:
        noise = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = noise + 0.1 * p.detach()


def train(optimizer, parameters, steps, start=None):
    """Take `steps` steps with the gradients of their step numbers."""
    start = optimizer.num_steps if start is None else start
    for step in range(start, start + steps):
        gradients(parameters, step)
        optimizer.step()


def wrapped(model, base="adamw", warmup=2, healing=sys.maxsize, groups=None, **options):
    groups = model.groups() if groups is None else groups
    return PruneOptimizer(BASES[base](groups), warmup_steps=warmup, healing_start_step=healing, **options)


def snapshot(optimizer):
    """Everything that a step may change, copied: weights, state by parameter, settings of groups, counters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [dict(optimizer.state[p]) if p in optimizer.state else {} for p in parameters]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(([p.detach() for p in parameters], state, settings))


def assert_same(one, other, path="it"):
    """Equal bits all the way down."""
    assert type(one) is type(other), (path, type(one), type(other))
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        if one.dtype.is_floating_point:
            assert (bits(one) == bits(other)).all(), f"{path}: {one} {other}"
        else:
            assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    else:
        assert one == other, (path, one, other)
