"""PruneOptimizer is an optimizer to everything around it: closures, hooks, copies, models in other wrappers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim import optimizer as torch_optimizer

from coupled_prune import PruneOptimizer
from tests.training import BASES, Stream, assert_same, gradients, snapshot, train, wrapped


def loss_of(model):
    x = model.embed @ model.down * model.gain.mean() + model.bias.sum() + model.free.sum()
    return (x @ model.up).square().mean() * 1e-3


@pytest.mark.parametrize("base", ["sgd", "adamw"])
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "direct"])
def test_closure_equals_backward_and_step(base, latent):
    """In every phase, gradients of a closure belong to the pruned weights, as those of a backward pass do."""
    model, other = Stream(), Stream()
    optimizer = wrapped(model, base, 2, 6, latent_weights=latent)
    plain = wrapped(other, base, 2, 6, latent_weights=latent)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        calls.append(loss.item())
        return loss

    for n in range(9):
        returned = optimizer.step(closure)
        plain.zero_grad()
        loss = loss_of(other)
        loss.backward()
        assert plain.step() is None
        assert returned.item() == calls[-1] == loss.item()
        assert len(calls) == n + 1
    for optimizer_, model_ in ((optimizer, model), (plain, other)):
        optimizer_.zero_grad()
        assert len(model_.dead()) == 4
    assert_same(snapshot(optimizer), snapshot(plain))


def test_lbfgs():
    """Several evaluations a step, in all phases; what is frozen stays so."""
    model = Stream()
    groups = [{**model.groups()[1], "params": [model.down, model.bias]}]
    optimizer = PruneOptimizer(torch.optim.LBFGS(groups, lr=0.1, max_iter=4), warmup_steps=1, healing_start_step=4)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (model.down - 1).square().sum() + (model.bias - 1).square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(8):
        before = len(calls)
        assert isinstance(optimizer.step(closure), torch.Tensor)
        assert len(calls) > before + 1
    frozen = optimizer.masks()["stream"]
    assert len(frozen) == 4
    assert not model.down[frozen].any()
    assert not model.bias[frozen].any()
    assert model.down.count_nonzero() == 4 * 12
    assert optimizer.num_steps == 8


def test_failing_closure_leaves_a_pruned_model():
    """The first evaluation comes before anything has changed."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 9)
    train(optimizer, list(model.parameters()), 2)
    before = snapshot(optimizer)

    def closure():
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(closure)
    assert_same(snapshot(optimizer), before)


def test_step_hooks_run_once_and_see_pruned_weights():
    model = Stream()
    optimizer = wrapped(model, "adamw", 1, 3)
    seen = []

    def hook(name):
        def call(who, args, kwargs):
            seen.append((name, who is optimizer, len(model.dead())))

        return call

    handles = [
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
        torch_optimizer.register_optimizer_step_pre_hook(hook("global pre")),
        torch_optimizer.register_optimizer_step_post_hook(hook("global post")),
    ]
    base_calls = []
    optimizer.base_optimizer.register_step_post_hook(lambda who, args, kwargs: base_calls.append(who))
    try:
        for n, (before, after) in enumerate([(0, 0), (0, 4), (4, 4), (4, 4)]):
            seen.clear()
            train(optimizer, list(model.parameters()), 1)
            assert sorted(seen) == [
                ("global post", True, after),
                ("global pre", True, before),
                ("post", True, after),
                ("pre", True, before),
            ]
            assert base_calls == [optimizer.base_optimizer] * (n + 1)
        bare = BASES["sgd"]([nn.Parameter(torch.ones(2))])
        bare.step()
        assert [name for name, own, _ in seen[4:] if not own] == ["global pre", "global post"]
    finally:
        for handle in handles:
            handle.remove()


def test_state_dict_hooks_run_once():
    model = Stream()
    optimizer = wrapped(model)
    train(optimizer, list(model.parameters()), 1)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, d: calls.append("post") or {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("load post"))
    state_dict = optimizer.state_dict()
    assert state_dict["more"] == 1
    optimizer.load_state_dict(state_dict)
    assert calls == ["pre", "post", "load pre", "load post"]


def test_is_an_optimizer():
    model = Stream()
    optimizer = wrapped(model, "adamw")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.base_optimizer.param_groups
    assert optimizer.state is optimizer.base_optimizer.state
    assert optimizer.defaults is optimizer.base_optimizer.defaults
    assert repr(optimizer).startswith("PruneOptimizer (")
    assert "AdamW" in repr(optimizer)
    with pytest.raises(AttributeError, match="no_such"):
        optimizer.no_such  # noqa: B018
    optimizer.base_optimizer.anything = 3
    assert optimizer.anything == 3
    assert not getattr(wrapped(Stream(), "adamw fused"), "_step_supports_amp_scaling", False)
    train(optimizer, list(model.parameters()), 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


class Custom:
    """An optimizer that is not torch's: sign descent, with groups, a state and a state dictionary."""

    def __init__(self, groups):
        self.param_groups = [{"lr": 0.01, **group} for group in groups]
        self.state = {}
        self.cleared = 0

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] * p.grad.sign())
                    if p not in self.state:
                        self.state[p] = {"count": 0}
                    self.state[p]["count"] += 1

    def zero_grad(self, set_to_none=True):
        self.cleared += 1

    def state_dict(self):
        places = [p for group in self.param_groups for p in group["params"]]
        groups, start = [], 0
        for group in self.param_groups:
            groups.append({**group, "params": list(range(start, start + len(group["params"])))})
            start += len(group["params"])
        return {
            "state": {i: dict(self.state[p]) for i, p in enumerate(places) if p in self.state},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict):
        places = [p for group in self.param_groups for p in group["params"]]
        self.state = {places[i]: dict(values) for i, values in state_dict["state"].items()}
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})


def test_an_optimizer_that_is_not_torchs():
    model, other = Stream(), Stream()
    optimizer = PruneOptimizer(Custom(model.groups()), warmup_steps=1, healing_start_step=4)
    parameters = list(model.parameters())
    train(optimizer, parameters, 3)
    assert len(model.dead()) == 4
    optimizer.zero_grad()
    assert optimizer.base_optimizer.cleared == 1
    resumed = PruneOptimizer(Custom(other.groups()), warmup_steps=1, healing_start_step=4)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, resumed)):
        train(o, list(m.parameters()), 4)
    assert_same(snapshot(resumed), snapshot(optimizer))
    assert len(model.dead()) == 4


@pytest.mark.parametrize("steps", [0, 1, 3, 7], ids=["new", "warmup", "pruning", "healing"])
@pytest.mark.parametrize("storage", ["full", "compact"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alike_and_alone(steps, storage, how):
    """Model and optimizer copied together train on as the originals do, and neither touches the other."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 2, 6, latent_storage=storage)
    lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # which patches the instance's step
    train(optimizer, list(model.parameters()), steps)
    other, twin = how((model, optimizer))
    assert all(p.is_leaf for p in other.parameters())
    before = snapshot(optimizer)
    train(twin, list(other.parameters()), 6)
    assert_same(snapshot(optimizer), before)
    train(optimizer, list(model.parameters()), 6)
    assert_same(snapshot(twin), snapshot(optimizer))
    assert twin.masks() == optimizer.masks()


def test_shallow_copy_and_half_built_objects():
    """Attribute forwarding looks at the base only where there is one."""
    optimizer = wrapped(Stream())
    assert copy.copy(optimizer).base_optimizer is optimizer.base_optimizer
    empty = PruneOptimizer.__new__(PruneOptimizer)
    assert not hasattr(empty, "missing")
    assert not hasattr(empty, "param_groups")
    assert not hasattr(empty, "__deepcopy__")


def test_looking_changes_nothing():
    """Reading metrics, masks, state dictionaries and representations between steps leaves the run as it was."""
    runs = []
    for looks in (0, 3):
        model = Stream()
        optimizer = wrapped(model, "adamw", 2, 6, latent_storage="compact")
        for _ in range(9):
            train(optimizer, list(model.parameters()), 1)
            for _ in range(looks):
                _ = optimizer.state_dict(), optimizer.masks(), repr(optimizer), copy.deepcopy(optimizer)
                _ = optimizer.relative_sparsity, optimizer.relative_factored_frac, optimizer.phase
        runs.append(snapshot(optimizer))
    assert_same(*runs)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("base", BASES)
def test_late_and_missing_gradients(base, warmup):
    """A parameter whose gradient comes late, or never, is pruned all the same and does not upset the base."""
    model = Stream()
    optimizer = wrapped(model, base, warmup, 7)
    for n in range(10):
        optimizer.zero_grad()
        gradients([model.embed, model.free] + [model.up] * (n >= 5), n)
        optimizer.step()
        if n >= warmup:
            assert len(model.dead()) == 4, n
    assert (
        optimizer.state[model.down].keys() <= {"latent", "sparsity_frac", "frozen"} | optimizer.state[model.up].keys()
    )


def test_three_wrappers_one_after_the_other():
    model = Stream()
    for _ in range(3):
        optimizer = wrapped(model, "adamw", 1, 3)
        train(optimizer, list(model.parameters()), 5)
        assert len(model.dead()) == 4
        assert optimizer.num_steps == 5


def test_averaged_model():
    """An average over the healing phase has the same dead channels."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 2)
    train(optimizer, list(model.parameters()), 3)
    averaged = swa_utils.AveragedModel(model)
    for _ in range(3):
        train(optimizer, list(model.parameters()), 1)
        averaged.update_parameters(model)
    assert averaged.module.dead() == model.dead()


def test_compiled_step():
    """`torch.compile` leaves the step alone: the same weights, and no recompilation from step to step."""
    model, eager = Stream(), Stream()
    optimizer, plain = wrapped(model, "adamw", 2, 6), wrapped(eager, "adamw", 2, 6)
    step = torch.compile(optimizer.step, backend="eager")
    for n in range(9):
        gradients(list(model.parameters()), n)
        step()
        train(plain, list(eager.parameters()), 1)
    assert_same(snapshot(optimizer), snapshot(plain))


def test_model_file_is_sparse_and_plain():
    """What a user saves of the model holds literal zeros under its own names, in every phase."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 4)
    names = list(model.state_dict())
    for _ in range(6):
        train(optimizer, list(model.parameters()), 1)
        loaded = Stream(seed=1)
        loaded.load_state_dict(model.state_dict())
        assert list(loaded.state_dict()) == names
        assert len(loaded.dead()) == 4
