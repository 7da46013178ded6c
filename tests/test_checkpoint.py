"""A run that stops and resumes is the run that would have been, bit for bit, however its state is carried."""

from __future__ import annotations

import copy
import io
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coupled_prune import PruneOptimizer
from tests.training import BASES, Stream, assert_same, gradients, snapshot, train, wrapped


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resumed(model, optimizer, rebuild, order="model first"):
    """A second process: other first weights, the same constructor calls, then both files."""
    files = through_file(model.state_dict()), through_file(optimizer.state_dict())
    other = Stream(seed=7, dtype=model.embed.dtype)
    if order == "model first":
        other.load_state_dict(files[0])
    twin = rebuild(other)
    twin.load_state_dict(files[1])
    other.load_state_dict(files[0])
    return other, twin


def check_resume(steps, more, rebuild, dtype=torch.float32, order="model first", skip=()):
    model = Stream(dtype=dtype)
    optimizer = rebuild(model)
    train(optimizer, list(model.parameters()), steps)
    other, twin = resumed(model, optimizer, rebuild, order)
    assert twin.num_steps == optimizer.num_steps == steps
    assert twin.phase == optimizer.phase
    for _ in range(more):
        train(optimizer, list(model.parameters()), 1)
        train(twin, list(other.parameters()), 1)
        assert_same(snapshot(twin), snapshot(optimizer))
    return model, optimizer


def mixed(model, ramped=True):
    """Every kind of projection: coupled, nested, a budget, group lasso, n of m and singular values."""
    stream = {"couple_key": "stream", "min_sparsity": 0.5, "min_sparsity_schedule": ramped, "prox_freq": 2}
    return [
        {
            "params": [model.embed],
            "prox_type": "ProxGroupLasso",
            "group_type": "Dim0Grouper",
            "reg_lambda": 0.5,
            "coupled": {**stream, "group_type": "Dim1Grouper"},
        },
        {
            "params": [model.down],
            "prox_type": "MinSparsityConstraint",
            "group_type": "Dim1Grouper",
            "min_sparsity": 0.25,
            "prox_freq": 3,
            "coupled": {**stream, "group_type": "Dim0Grouper"},
        },
        {
            "params": [model.bias, model.gain],
            "prox_type": "CoupledMinSparsityConstraint",
            **stream,
            "group_type": "Dim0Grouper",
        },
        {"params": [model.up], "prox_type": "MinRankConstraint", "group_type": "SVDGrouper", "min_sparsity": 0.4},
        {"params": [model.free], "prox_type": "ProxLasso", "group_type": "ElemGrouper", "reg_lambda": 1.0},
    ]


@pytest.mark.parametrize("base", ["sgd", "adamw", "adamw fused", "adagrad"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("storage", ["full", "compact", "direct"])
def test_resume_at_any_step(steps, base, storage):
    """Before warmup, in it, on its last step, inside a cadence, on the last pruning step, in healing."""
    options = {"latent_weights": False} if storage == "direct" else {"latent_storage": storage}

    def rebuild(model):
        groups = model.groups(0.55, min_sparsity_schedule=True, prox_freq=3)
        return wrapped(model, base, 2, 9, groups, **options)

    check_resume(steps, 6, rebuild)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_resume_with_every_projection(steps, dtype, order):
    if dtype == torch.bfloat16:
        torch.manual_seed(0)
    check_resume(steps, 5, lambda model: wrapped(model, "adamw", 2, 8, mixed(model)), dtype, order)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_saving_and_loading_changes_nothing(data):
    warmup = data.draw(st.integers(0, 3))
    healing = data.draw(st.one_of(st.just(sys.maxsize), st.integers(warmup + 1, 9)))
    freq, base = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(list(BASES)))
    ramped = healing < sys.maxsize and data.draw(st.booleans())
    storage = data.draw(st.sampled_from(["full", "compact", "direct"]))
    options = {"latent_weights": False} if storage == "direct" else {"latent_storage": storage}
    kind = data.draw(st.sampled_from(["coupled", "mixed"])) if storage != "direct" else "coupled"

    def rebuild(model):
        groups = model.groups(0.4, min_sparsity_schedule=ramped, prox_freq=freq)
        return wrapped(model, base, warmup, healing, groups if kind == "coupled" else mixed(model, ramped), **options)

    check_resume(data.draw(st.integers(0, 11)), data.draw(st.integers(1, 4)), rebuild)


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize(("saved", "loaded"), [("full", "compact"), ("compact", "full")])
def test_either_storage_loads_the_other(steps, saved, loaded):
    model = Stream()
    optimizer = wrapped(model, "adamw", 2, 6, latent_storage=saved)
    train(optimizer, list(model.parameters()), steps)
    other, twin = resumed(model, optimizer, lambda m: wrapped(m, "adamw", 2, 6, latent_storage=loaded))
    for _ in range(5):
        train(optimizer, list(model.parameters()), 1)
        train(twin, list(other.parameters()), 1)
        assert_same([p.detach() for p in other.parameters()], [p.detach() for p in model.parameters()])
    assert twin.masks() == optimizer.masks()


def test_layout_is_torchaos():
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 4)
    state_dict = optimizer.state_dict()
    assert state_dict["state"] == {}
    train(optimizer, list(model.parameters()), 2)
    state_dict = optimizer.state_dict()
    first, second = state_dict["param_groups"][:2]
    assert first["num_steps"] == 2
    assert "num_steps" not in second
    assert first["gamma"] == second["gamma"] == pytest.approx(0.04)
    assert "gamma" not in state_dict["param_groups"][3]
    assert state_dict["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq", "latent", "sparsity_frac", "frozen"}
    assert state_dict["state"][0]["sparsity_frac"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_extras_keep_their_dtypes(dtype):
    """Stock loading casts all state to the parameter's dtype; counts, bits and wider latents come back as they were."""
    model = Stream(dtype=dtype)
    optimizer = wrapped(model, "sgd", 0, 4, mixed(model))
    train(optimizer, list(model.parameters()), 6)
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["latent"] = state_dict["state"][0]["latent"].float() + 1e-6
    other, twin = Stream(dtype=dtype), None
    twin = wrapped(other, "sgd", 0, 4, mixed(other))
    twin.load_state_dict(copy.deepcopy(state_dict))
    for i, p in enumerate(p for group in twin.param_groups for p in group["params"]):
        for key in ("latent", "sparsity_frac", "sv_count", "frozen"):
            if key in state_dict["state"][i]:
                assert_same(twin.state[p][key], state_dict["state"][i][key])


def test_state_that_another_optimizer_cast():
    """Integers that went through a stock optimizer's own loading and saving are integers again here."""
    model = Stream(dtype=torch.bfloat16)
    optimizer = wrapped(model, "sgd", 0, 4, mixed(model))
    train(optimizer, list(model.parameters()), 6)
    stock = BASES["sgd"](mixed(Stream(dtype=torch.bfloat16)))
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other, twin = resumed(model, optimizer, lambda m: wrapped(m, "sgd", 0, 4, mixed(m)))
    twin.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert twin.state[other.up]["sv_count"].dtype == torch.int32
    assert_same(twin.state[other.down]["frozen"], optimizer.state[model.down]["frozen"])


def test_the_file_is_not_shared():
    """Training on does not write into a state dictionary that was loaded."""
    model = Stream()
    optimizer = wrapped(model, "plain", 0, 9)
    train(optimizer, list(model.parameters()), 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state_dict)
    optimizer.load_state_dict(state_dict)
    train(optimizer, list(model.parameters()), 2)
    assert_same(state_dict, kept)


@pytest.mark.parametrize("steps", [1, 3, 8], ids=["warmup", "pruning", "healing"])
@pytest.mark.parametrize("saved", [True, False], ids=["latent to direct", "direct to latent"])
def test_the_other_mode_is_refused(steps, saved):
    model = Stream()
    optimizer = wrapped(model, "adamw", 2, 6, latent_weights=saved)
    train(optimizer, list(model.parameters()), steps)
    state_dict = optimizer.state_dict()
    for drop in (None, "latent_weights"):  # with and without the key that says so
        for group in state_dict["param_groups"]:
            group.pop(drop, None)
        twin = wrapped(Stream(), "adamw", 2, 6, latent_weights=not saved)
        before = snapshot(twin)
        with pytest.raises(
            ValueError, match=f"latent_weights={saved}, but this optimizer has latent_weights={not saved}"
        ):
            twin.load_state_dict(state_dict)
        assert_same(snapshot(twin), before)


def test_other_groups_are_refused():
    optimizer = wrapped(Stream())
    state_dict = wrapped(Stream(), groups=Stream().groups()[:2]).state_dict()
    with pytest.raises(ValueError, match=r"\[2, 2\].*\[2, 2, 1, 1\]"):
        optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("latent", [True, False], ids=["latent", "direct"])
def test_bare_states_both_ways(latent):
    """A bare optimizer's state begins a pruning run; a pruning run's state goes on bare."""
    model, bare = Stream(), Stream()
    base = BASES["adamw"](bare.groups())
    for n in range(3):
        gradients(list(bare.parameters()), n)
        base.step()
    optimizer = wrapped(model, "adamw", 1, 5, latent_weights=latent)
    optimizer.load_state_dict(copy.deepcopy(base.state_dict()))
    assert optimizer.num_steps == 0
    assert int(optimizer.state[model.embed]["step"]) == 3
    train(optimizer, list(model.parameters()), 7)
    assert len(model.dead()) == 4
    base.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    base.step()


def test_a_key_less_and_a_key_more():
    """Counters that a file lacks start from their defaults; keys it has beyond ours stay where torch puts them."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 1, 9)
    train(optimizer, list(model.parameters()), 3)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][1].pop("gamma")
    state_dict["param_groups"][0].pop("frozen_set")
    state_dict["param_groups"][0]["unknown"] = 5
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[1]["gamma"] == 0.0
    assert optimizer.param_groups[0]["unknown"] == 5
    train(optimizer, list(model.parameters()), 1)
    assert len(model.dead()) == 4


def test_patch_state_dict():
    model = Stream()
    optimizer = wrapped(model, "adamw", 1, 9)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(num_steps=7, gamma=0.5)
    optimizer.patch_state_dict(saved)
    assert (optimizer.num_steps, optimizer.param_groups[0]["gamma"]) == (7, 0.5)


def test_settings_of_a_file_are_checked_with_the_next_step():
    """torch restores group settings from files; what they ask for is validated like any change."""
    model = Stream()
    optimizer = wrapped(model, "plain", 0, 9)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["min_sparsity"] = 3.0
    with pytest.raises(ValueError, match="min_sparsity"):
        optimizer.load_state_dict(state_dict)


def named(model):
    """The groups of `Stream` under one module, as tools that go by names want it."""
    return wrapped(model, "adamw", 1, 5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
class TestStateTools:
    """`torch.distributed.checkpoint.state_dict` on one process."""

    @pytest.fixture(autouse=True)
    def tools(self):
        self.tools = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    @pytest.mark.parametrize("warmup", [0, 5])
    @pytest.mark.parametrize("base", ["plain", "sgd", "adamw", "adamw fused", "adagrad"])
    @pytest.mark.parametrize("latent", [True, False], ids=["latent", "direct"])
    def test_asking_for_the_state_is_no_step(self, base, warmup, latent):
        """The tools call `step()` on an optimizer without state, with learning rates and gradients of zero."""
        model, other = Stream(), Stream()
        optimizer = wrapped(model, base, warmup, 9, latent_weights=latent)
        before = [p.detach().clone() for p in model.parameters()]
        state_dict = self.tools.get_optimizer_state_dict(model, optimizer)
        assert_same([p.detach() for p in model.parameters()], before)
        assert optimizer.num_steps == 0
        assert [group["lr"] for group in optimizer.param_groups] == [
            BASES[base]([model.free]).param_groups[0]["lr"]
        ] * 4
        assert [group.get("gamma", 0.0) for group in optimizer.param_groups] == [0.0] * 4
        expected = {"sparsity_frac", "frozen"} | ({"latent"} if latent else set())
        assert state_dict["state"]["embed"].keys() >= expected
        if base == "plain":  # others have a state of their own now, as they would without a wrapper
            plain = wrapped(other, base, warmup, 9, latent_weights=latent)
            for m, o in ((model, optimizer), (other, plain)):
                train(o, list(m.parameters()), 7)
            assert_same([p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()])

    @pytest.mark.parametrize("steps", [0, 1, 3, 7], ids=["new", "warmup", "pruning", "healing"])
    @pytest.mark.parametrize("storage", ["full", "compact", "direct"])
    @pytest.mark.parametrize("flat", [True, False], ids=["flat", "nested"])
    def test_resume(self, steps, storage, flat):
        options = {"latent_weights": False} if storage == "direct" else {"latent_storage": storage}
        form = self.tools.StateDictOptions(flatten_optimizer_state_dict=flat)
        model, other = Stream(), Stream(seed=7)
        optimizer, twin = (wrapped(m, "adamw", 2, 5, **options) for m in (model, other))
        train(optimizer, list(model.parameters()), steps)
        saved = copy.deepcopy(self.tools.get_optimizer_state_dict(model, optimizer, options=form))
        other.load_state_dict(model.state_dict())
        self.tools.set_optimizer_state_dict(other, twin, saved, options=form)
        for m, o in ((model, optimizer), (other, twin)):
            train(o, list(m.parameters()), 5)
        assert_same(snapshot(twin), snapshot(optimizer))

    @pytest.mark.parametrize("steps", [1, 3, 7], ids=["warmup", "pruning", "healing"])
    @pytest.mark.parametrize("storage", ["full", "compact"])
    def test_resume_through_files(self, steps, storage, tmp_path):
        """`dcp.load` fills the keys that a new optimizer already has, in place, and drops all others."""
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        model, other = Stream(), Stream(seed=7)
        optimizer, twin = (wrapped(m, "adamw", 2, 5, mixed(m), latent_storage=storage) for m in (model, other))
        train(optimizer, list(model.parameters()), steps)
        saved = {"model": model.state_dict(), "optimizer": self.tools.get_optimizer_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        target = {"model": other.state_dict(), "optimizer": self.tools.get_optimizer_state_dict(other, twin)}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
        other.load_state_dict(target["model"])
        self.tools.set_optimizer_state_dict(other, twin, target["optimizer"])
        for _ in range(5):
            for m, o in ((model, optimizer), (other, twin)):
                train(o, list(m.parameters()), 1)
            assert_same(snapshot(twin)[:2], snapshot(optimizer)[:2])
        assert twin.num_steps == optimizer.num_steps

    def test_the_other_mode_is_refused(self, tmp_path):
        """Latents that a direct optimizer has no key for are dropped by `dcp.load`; the mode's own key is not."""
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        model, other = Stream(), Stream()
        optimizer, twin = wrapped(model), wrapped(other, latent_weights=False)
        train(optimizer, list(model.parameters()), 4)
        dcp.save(self.tools.get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
        target = self.tools.get_optimizer_state_dict(other, twin)
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
        with pytest.raises(ValueError, match="latent_weights=True, but this optimizer has latent_weights=False"):
            self.tools.set_optimizer_state_dict(other, twin, target)


def test_memory_of_compact_storage():
    """What compact latents keep is what was zeroed: bytes in proportion to the sparsity, none of it a full copy."""
    for sparsity in (0.0, 0.25, 0.5):
        one = nn.Parameter(torch.randn(64, 32))
        group = {
            "params": [one],
            "prox_type": "MinSparsityConstraint",
            "group_type": "Dim0Grouper",
            "min_sparsity": sparsity,
        }
        optimizer = PruneOptimizer(torch.optim.SGD([group], lr=0.1), latent_storage="compact")
        train(optimizer, [one], 3)
        assert "latent" not in optimizer.state[one]
        assert optimizer.latent_bytes == int(sparsity * 64) * 32 * 4
    full = PruneOptimizer(torch.optim.SGD([group], lr=0.1))
    train(full, [one], 1)
    assert full.latent_bytes == one.nbytes
