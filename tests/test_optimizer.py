"""Trajectories of PruneOptimizer against an oracle that steps a bare optimizer and prunes by hand."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coupled_prune import PruneOptimizer
from tests.oracle import bits, exact_budget
from tests.training import BASES, Stream, assert_same, gradients, train, wrapped


class Oracle:
    """The three phases on a `Stream`, step by step, with a bare optimizer, numpy and no part of the package."""

    def __init__(self, base, warmup, healing, target, ramped, freq, latent):
        self.model = Stream()
        self.parameters = list(self.model.parameters())
        self.optimizer = BASES[base]([{"params": [p]} for p in self.parameters])
        self.warmup, self.healing, self.target, self.ramped = warmup, healing, target, ramped
        self.freq, self.latent = freq, latent
        self.saved = self.frozen = None
        self.k = 0

    def weakest(self, n):
        m, target = self.model, self.target
        if self.ramped and n < self.healing - 1:
            t = (n - self.warmup) / (self.healing - self.warmup)
            target = target * (1 - (1 - t) ** 3) if n > self.warmup else 0.0
        rows = [m.embed.T, m.up.T, m.down, m.bias.unsqueeze(1)]
        scores = sum(r.detach().double().numpy().__pow__(2).sum(1) for r in rows).astype(np.float32)
        self.k = exact_budget(target, 8)
        return sorted(range(8), key=lambda c: (scores[c], c))[: self.k]

    @torch.no_grad()
    def zero(self, channels, gradient=False):
        for name, axis in (("embed", 1), ("up", 1), ("down", 0), ("bias", 0), ("gain", 0)):
            p = getattr(self.model, name)
            (p.grad if gradient else p).index_fill_(axis, torch.tensor(channels, dtype=torch.int64), 0.0)

    @torch.no_grad()
    def step(self, n):
        if n >= self.healing:
            self.zero(self.frozen, gradient=True)
            self.optimizer.step()
            self.zero(self.frozen)
            return
        if self.latent and self.saved is not None:
            for p, latent in zip(self.parameters, self.saved, strict=True):
                p.copy_(latent)
        self.optimizer.step()
        if n < self.warmup:
            return
        self.saved = [p.detach().clone() for p in self.parameters]
        if (n - self.warmup) % self.freq == 0 or n == self.healing - 1:
            self.frozen = self.weakest(n)
            self.zero(self.frozen)


def check_trajectory(base, warmup, healing, target, ramped, freq, latent, steps=12, **options):
    oracle = Oracle(base, warmup, healing, target, ramped, freq, latent)
    model = Stream()
    groups = model.groups(target, min_sparsity_schedule=ramped, prox_freq=freq)
    optimizer = wrapped(model, base, warmup, healing, groups, latent_weights=latent, **options)
    parameters = list(model.parameters())
    for n in range(steps):
        gradients(oracle.parameters, n)
        gradients(parameters, n)
        oracle.step(n)
        optimizer.step()
        for (name, p), q in zip(model.named_parameters(), oracle.parameters, strict=True):
            assert (bits(p) == bits(q)).all(), (n, name)
        if warmup <= n < healing and ((n - warmup) % freq == 0 or n == healing - 1):
            assert optimizer.masks() == {"stream": sorted(oracle.frozen)}
            assert len(model.dead()) == oracle.k
        if latent and warmup <= n < healing and not options:
            regularized = [p for name, p in model.named_parameters() if name != "free"]
            assert_same([optimizer.state[p]["latent"] for p in regularized], oracle.saved[: len(regularized)])
    return optimizer


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("latent", [True, False], ids=["latent", "direct"])
def test_every_base_optimizer(base, latent):
    check_trajectory(base, warmup=2, healing=8, target=0.5, ramped=True, freq=2, latent=latent)


@pytest.mark.parametrize(
    ("warmup", "healing", "ramped", "freq"),
    [
        (0, sys.maxsize, False, 1),  # prunes from the first step on, for ever
        (0, 1, True, 1),  # a window of one step
        (3, 4, True, 5),
        (3, 5, True, 10),
        (2, 9, True, 200),  # only the forced last projection after the first
        (1, 10, True, 7),
        (4, sys.maxsize, False, 3),
        (0, 12, True, 4),
    ],
)
def test_windows_and_cadences(warmup, healing, ramped, freq):
    """However the cadence falls, the last pruning step reaches the whole target."""
    optimizer = check_trajectory("sgd", warmup, healing, 0.4, ramped, freq, latent=True, steps=14)
    if healing < 14:
        assert len(optimizer.masks()["stream"]) == exact_budget(0.4, 8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_schedule(data):
    warmup = data.draw(st.integers(0, 4))
    healing = data.draw(st.one_of(st.just(sys.maxsize), st.integers(warmup + 1, 11)))
    check_trajectory(
        data.draw(st.sampled_from(list(BASES))),
        warmup,
        healing,
        data.draw(st.sampled_from([0.0, 0.07, 0.25, 0.3, 0.55, 0.8])),
        healing < sys.maxsize and data.draw(st.booleans()),
        data.draw(st.integers(1, 5)),
        latent := data.draw(st.booleans()),
        **({"latent_storage": data.draw(st.sampled_from(["full", "compact"]))} if latent else {}),
    )


def test_gradient_accumulation_counts_optimizer_steps():
    """Micro-steps are no steps: the ramp follows calls of `step`, however many backward passes each had."""
    kept = []
    for micro_steps in (1, 4):
        model = Stream()
        optimizer = wrapped(model, warmup=1, healing=7, groups=model.groups(0.75, min_sparsity_schedule=True))
        counts = []
        for _ in range(7):
            for _ in range(micro_steps):
                ((model.embed @ model.down).square().sum() + model.up.square().sum()).div(micro_steps).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(optimizer.masks().get("stream", [])))
        kept.append(counts)
    assert kept[0] == kept[1]
    assert kept[0][-1] == 6


def two_axes(model):
    """`up` in two clusters on different axes, `down` likewise; a parent that does nothing."""
    parent = {"prox_type": "MinSparsityConstraint", "group_type": "Dim0Grouper", "min_sparsity": 0.0}

    def stage(key, grouper, target, **more):
        return {"couple_key": key, "group_type": grouper, "min_sparsity": target, **more}

    return [
        {
            **parent,
            "params": [model.up],
            "coupled": [stage("stream", "Dim1Grouper", 0.25), stage("hidden", "Dim0Grouper", 0.5)],
        },
        {
            **parent,
            "params": [model.down],
            "coupled": [stage("stream", "Dim0Grouper", 0.25), stage("hidden", "Dim1Grouper", 0.5)],
        },
        {**parent, "params": [model.embed], "coupled": stage("stream", "Dim1Grouper", 0.25)},
        {**parent, "params": [model.bias, model.gain], "coupled": stage("stream", "Dim0Grouper", 0.25, scored=False)},
    ]


@pytest.mark.parametrize("storage", ["full", "compact", "direct"])
def test_one_tensor_in_several_clusters(storage):
    """Stages of one step score the same weights; what each zeroes stays zero in healing."""
    options = {"latent_weights": False} if storage == "direct" else {"latent_storage": storage}
    model, before = Stream(), Stream()
    optimizer = wrapped(model, "plain", 0, 2, two_axes(model), **options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    stream = (before.embed.T.square().sum(1) + before.up.T.square().sum(1) + before.down.square().sum(1)).argsort()[:2]
    hidden = (before.up.square().sum(1) + before.down.T.square().sum(1)).argsort()[:6]
    assert optimizer.masks() == {"stream": sorted(stream.tolist()), "hidden": sorted(hidden.tolist())}
    train(optimizer, list(model.parameters()), 5)
    masks = optimizer.masks()
    for name, axis, key in [
        ("embed", 1, "stream"),
        ("up", 1, "stream"),
        ("down", 0, "stream"),
        ("gain", 0, "stream"),
        ("bias", 0, "stream"),
        ("up", 0, "hidden"),
        ("down", 1, "hidden"),
    ]:
        p = getattr(model, name).detach()
        assert not p.index_select(axis, torch.tensor(masks[key])).any(), name
        assert p.count_nonzero(), name


def test_ranges_of_a_packed_projection():
    """Query, key and value rows of one matrix, as stages that name their rows."""
    qkv = torch.nn.Parameter(torch.arange(1.0, 97.0).view(24, 4))
    out = torch.nn.Parameter(torch.ones(4, 8))
    heads = {"couple_key": "heads", "group_type": "AttentionHeadGrouperDim0", "head_dim": 2, "min_sparsity": 0.5}
    groups = [
        {
            "params": [qkv],
            "prox_type": "MinSparsityConstraint",
            "group_type": "Dim0Grouper",
            "min_sparsity": 0.0,
            "coupled": [{**heads, "rows": (8 * i, 8 * i + 8)} for i in range(3)],
        },
        {
            "params": [out],
            "prox_type": "CoupledMinSparsityConstraint",
            **heads,
            "group_type": "AttentionHeadGrouperDim1",
        },
    ]
    optimizer = PruneOptimizer(torch.optim.SGD(groups, lr=0.1), healing_start_step=1)
    for _ in range(3):
        qkv.grad, out.grad = torch.zeros_like(qkv), torch.zeros_like(out)
        optimizer.step()
    assert optimizer.masks() == {"heads": [0, 1]}
    assert [i for i in range(24) if not qkv[i].any()] == [*range(4), *range(8, 12), *range(16, 20)]
    assert [i for i in range(8) if not out[:, i].any()] == [*range(4)]
    assert optimizer.relative_sparsity == (12 * 4 + 4 * 4) / (24 * 4 + 32)


@pytest.mark.parametrize(
    "parent", ["MinSparsityConstraint", "GlobalMinSparsityConstraint", "ProxGroupLasso", "ProxLasso"]
)
@pytest.mark.parametrize("order", [1, -1])
def test_nested_stage_sees_the_ordinary_projection(parent, order):
    """Removing row 0 (or shrinking all) first changes which column is the weakest; the group order does not matter."""
    rows = [[0.01, 3.0, 0.01, 0.01], [1.0, 0.1, 0.0, 3.0], [1.0, 0.1, 2.0, 3.0], [1.0, 0.1, 2.0, 3.0]]
    p, other = torch.nn.Parameter(torch.tensor(rows)), torch.nn.Parameter(torch.ones(2, 2))
    strength = {"ProxGroupLasso": 1.525, "ProxLasso": 3.1}.get(parent, 0.0)
    nested = {"group_type": "Dim1Grouper", "couple_key": "x", "min_sparsity": 0.25}
    group = {"params": [p], "prox_type": parent, "group_type": "Dim0Grouper", "min_sparsity": 0.25, "coupled": nested}
    idle = {"params": [other], "prox_type": "MinSparsityConstraint", "group_type": "Dim0Grouper", "min_sparsity": 0.0}
    groups = [{**group, "reg_lambda": strength}, idle][::order]
    optimizer = PruneOptimizer(torch.optim.SGD(groups, lr=1.0))
    p.grad, other.grad = torch.zeros_like(p), torch.zeros_like(other)
    optimizer.step()
    if parent != "ProxLasso":
        assert not p[0].any()
        assert not p[:, 1].any()
        zeros = 8
    else:
        zeros = 16
    assert optimizer.state[p]["sparsity_frac"] == int((p == 0).sum()) / 16
    assert optimizer.relative_sparsity == zeros / 20
    assert torch.equal(optimizer.state[p]["latent"], torch.tensor(rows))


def test_other_parameters_are_left_alone():
    model, bare = Stream(), Stream()
    optimizer = wrapped(model, "adamw", 0, 4)
    base = BASES["adamw"]([bare.free])
    for n in range(6):
        gradients(list(model.parameters()), n)
        gradients(list(bare.parameters()), n)
        optimizer.step()
        base.step()
    assert (bits(model.free) == bits(bare.free)).all()
    assert optimizer.state[model.free].keys() == base.state[bare.free].keys()
