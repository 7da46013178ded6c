"""What drives an optimizer: learning-rate schedulers on the wrapper or its base, and GradScaler, which skips steps."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from coupled_prune import PruneOptimizer
from tests.training import BASES, Stream, assert_same, gradients, snapshot, train, wrapped

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("built_on", ["wrapper", "base", "base, before it is wrapped"])
@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_schedulers(make, built_on, base):
    """The base optimizer uses a new learning rate (and momentum, betas) in the next step; no false warnings."""
    model, bare = Stream(), Stream()
    bare_optimizer = BASES[base](list(bare.parameters()))
    bare_scheduler = make(bare_optimizer)
    inner = BASES[base](model.groups())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = make(inner) if built_on.startswith("base, ") else None
        optimizer = PruneOptimizer(inner, warmup_steps=99)  # warmup: weights are those of the bare optimizer
        scheduler = scheduler or make(inner if built_on == "base" else optimizer)
        for n in range(8):
            for m, o, s in ((model, optimizer, scheduler), (bare, bare_optimizer, bare_scheduler)):
                gradients(list(m.parameters()), n)
                o.step()
                s.step(*([1.0] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else []))
    assert [g["lr"] for g in optimizer.param_groups] == [bare_optimizer.param_groups[0]["lr"]] * 4
    assert_same([p.detach() for p in model.parameters()], [p.detach() for p in bare.parameters()])


def test_gamma_follows_the_scheduler():
    one = nn.Parameter(torch.ones(4, 4))
    group = {"params": [one], "prox_type": "ProxGroupLasso", "group_type": "Dim0Grouper", "reg_lambda": 0.01}
    optimizer = PruneOptimizer(torch.optim.SGD([group], lr=1.0), warmup_steps=1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(4):
        train(optimizer, [one], 1)
        scheduler.step()
    assert optimizer.param_groups[0]["gamma"] == 0.5 + 0.25 + 0.125


def test_a_learning_rate_that_starts_at_zero_counts():
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 9)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    train(optimizer, list(model.parameters()), 1)
    scheduler.step()
    assert optimizer.num_steps == 1
    assert len(model.dead()) == 4


@pytest.mark.parametrize("base", ["sgd", "adamw", "adamw fused"])
def test_grad_scaler_skips(base):
    """A step that the scaler skips is no step: counter, ramp and weights stay."""
    model, clean = Stream(), Stream()
    make = lambda m: wrapped(m, base, 1, 6, m.groups(0.75, min_sparsity_schedule=True))  # noqa: E731
    optimizer, plain = make(model), make(clean)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    taken = 0
    for n in range(10):
        scaler.scale(torch.zeros(1, requires_grad=True).sum()).backward()
        gradients(list(model.parameters()), taken)
        for p in model.parameters():
            p.grad *= scaler.get_scale()
        skipped = n in (3, 7)
        if skipped:
            model.up.grad[0, 0] = float("inf")
        before = snapshot(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if skipped:
            assert_same(snapshot(optimizer), before)
            continue
        train(plain, list(clean.parameters()), 1)
        taken += 1
        assert optimizer.num_steps == taken
    assert_same(snapshot(optimizer), snapshot(plain))
