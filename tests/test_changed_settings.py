"""Settings, layouts and storage that change between steps: refused before anything moves, or taken into account."""

from __future__ import annotations

import pytest
import torch

from tests.training import Stream, assert_same, gradients, snapshot, train, wrapped

CHANGES = {
    "a target": lambda o: o.param_groups[1].update(min_sparsity=0.25),
    "a target beyond 1": lambda o: [group.update(min_sparsity=2.0) for group in o.param_groups[:3]],
    "a cadence": lambda o: o.param_groups[0].update(prox_freq=2),
    "a score": lambda o: o.param_groups[2].update(score_type="l2"),
    "a ramp": lambda o: o.param_groups[1].update(min_sparsity_schedule=True),
    "a grouper": lambda o: o.param_groups[0].update(group_type="Dim0Grouper"),
    "a key taken away": lambda o: o.param_groups[0].pop("couple_key"),
    "a key that appears": lambda o: o.param_groups[3].update(coupled={}),
    "a projection that appears": lambda o: o.param_groups[3].update(prox_type="NoSuch"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("steps", [1, 3], ids=["before pruning", "while pruning"])
def test_invalid_change_is_found_before_anything_moves(change, steps):
    model = Stream()
    optimizer = wrapped(model, "adamw", 1, 9)
    train(optimizer, list(model.parameters()), steps)
    change(optimizer)
    before = snapshot(optimizer)
    for _ in range(2):
        gradients(list(model.parameters()), steps)
        with pytest.raises((ValueError, TypeError)):
            optimizer.step()
        assert_same(snapshot(optimizer), before)
    assert optimizer.num_steps == steps


LAYOUTS = {
    "another shape": lambda p: p.set_(torch.ones(5, 12)),
    "other strides in the same memory": lambda p: p.set_(p.detach()[:3].t()),
}


@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
def test_changed_layout_is_found_before_anything_moves(change):
    model = Stream()
    optimizer = wrapped(model, "plain", 0, 9)
    with torch.no_grad():
        change(model.down)
    before = snapshot(optimizer)
    gradients(list(model.parameters()), 0)
    with pytest.raises(ValueError, match="stream"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


def test_valid_changes_take_effect():
    """Targets, moved storage and votes: all are seen."""
    model = Stream()
    optimizer = wrapped(model, "sgd", 0, 99)
    parameters = list(model.parameters())
    train(optimizer, parameters, 1)
    assert len(model.dead()) == 4
    for group in optimizer.param_groups[:3]:
        group["min_sparsity"] = 0.75
    train(optimizer, parameters, 1)
    assert len(model.dead()) == 6
    model.embed.data = model.embed.data.clone()
    train(optimizer, parameters, 1)
    assert len(model.dead()) == 6
    optimizer.param_groups[2]["scored"] = True
    train(optimizer, parameters, 1)
    assert len(model.dead()) == 6


def test_unchanged_settings_are_resolved_once():
    """Stages are the same object in every step in which nothing changed, and in warmup and healing nobody looks."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 2, 6)
    stages = optimizer._settings.stages(optimizer.param_groups)
    for _ in range(10):
        train(optimizer, list(model.parameters()), 1)
        assert optimizer._settings.known(optimizer.param_groups) is stages
        if optimizer.phase != "pruning":
            optimizer.param_groups[0]["min_sparsity"] = 7.0  # nobody uses it now
        else:
            optimizer.param_groups[0]["min_sparsity"] = 0.5
