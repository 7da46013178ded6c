"""Metrics are literal zeros, each parameter once, and say which step they belong to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from coupled_prune import PruneOptimizer
from tests.training import Stream, gradients, train, wrapped


def zeros_of(parameters):
    return sum(int((p == 0).sum()) for p in parameters)


def check(optimizer):
    """Totals and fractions against a count of the weights."""
    parameters = [p for group in optimizer.regularized_param_groups() for p in group["params"]]
    total = sum(p.numel() for p in parameters)
    assert optimizer.relative_sparsity == zeros_of(parameters) / total
    for p in parameters:
        assert optimizer.state[p]["sparsity_frac"] == zeros_of([p]) / p.numel()


def grid(*shape, seed=0):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


ORDINARY = {
    "budget": {"prox_type": "MinSparsityConstraint", "group_type": "Dim1Grouper", "min_sparsity": 0.3},
    "budget of all": {"prox_type": "GlobalMinSparsityConstraint", "group_type": "Dim0Grouper", "min_sparsity": 0.3},
    "short groups": {
        "prox_type": "MinSparsityConstraint",
        "group_type": "KElementGrouper",
        "k": 3,
        "min_sparsity": 0.3,
    },
    "lasso by rows": {"prox_type": "ProxLasso", "group_type": "Dim0Grouper", "reg_lambda": 2.0},
    "group lasso": {"prox_type": "ProxGroupLasso", "group_type": "Dim0Grouper", "reg_lambda": 3.0},
    "n of m": {"prox_type": "NMSparseConstraint", "group_type": "KElementGrouper", "k": 4, "n_nonzero": 1},
}


@pytest.mark.parametrize("settings", ORDINARY.values(), ids=ORDINARY)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "with a stage"])
def test_literal_zeros(settings, nested):
    one, two = grid(8, 12), grid(8, 16, seed=1)
    with torch.no_grad():
        one[0, 0], two[1, 1] = 0.0, -0.0
    settings = dict(settings)
    if nested:
        settings["coupled"] = {"couple_key": "c", "group_type": "Dim0Grouper", "min_sparsity": 0.4}
    optimizer = PruneOptimizer(torch.optim.AdamW([{**settings, "params": [one, two]}], lr=0.1), 1, 9)
    for _ in range(4):
        train(optimizer, [one, two], 1)
        check(optimizer)
    assert 0 < optimizer.relative_sparsity < 1


def test_a_tensor_in_two_clusters_counts_once():
    square = grid(10, 10)
    stages = [{"couple_key": f"axis {a}", "group_type": f"Dim{a}Grouper", "min_sparsity": 0.1} for a in (0, 1)]
    group = {"params": [square], "prox_type": "MinSparsityConstraint", "group_type": "Dim0Grouper", "min_sparsity": 0.0}
    optimizer = PruneOptimizer(torch.optim.SGD([{**group, "coupled": stages}], lr=0.1))
    train(optimizer, [square], 1)
    assert optimizer.relative_sparsity == 0.19
    assert {key: len(ids) for key, ids in optimizer.masks().items()} == {"axis 0": 1, "axis 1": 1}


def test_before_the_first_projection_weights_are_counted_as_they_are():
    model = Stream()
    with torch.no_grad():
        model.embed[:5] = 0
    optimizer = wrapped(model, "adamw", 2, 9)
    for _ in range(3):
        assert optimizer.metrics_step is None
        assert optimizer.relative_sparsity == 40 / (80 + 96 + 96 + 8 + 8)
        optimizer.param_groups[0]["lr"] = 0.0
        for p in model.parameters():
            p.grad = None
        if optimizer.num_steps < 2:
            optimizer.step()
        else:
            break
    train(optimizer, list(model.parameters()), 1)
    assert optimizer.metrics_step == 3
    check(optimizer)


@pytest.mark.parametrize("skipped", ["parent", "coupled"])
def test_skipped_projections_keep_what_was(skipped):
    """Totals belong to the last step in which everything ran, fractions to the last that touched their parameter."""
    one, other = grid(4, 4), grid(4, 4, seed=1)
    stage = {"couple_key": "c", "group_type": "Dim1Grouper", "min_sparsity": 0.5}
    group = {"params": [one], "prox_type": "MinSparsityConstraint", "group_type": "Dim0Grouper", "min_sparsity": 0.25}
    (group if skipped == "parent" else stage)["prox_freq"] = 3
    idle = {**group, "params": [other], "prox_freq": 3}
    optimizer = PruneOptimizer(torch.optim.SGD([{**group, "coupled": stage}, idle], lr=0.1))
    train(optimizer, [one, other], 1)
    check(optimizer)
    kept = optimizer.relative_sparsity, float(optimizer.state[other]["sparsity_frac"])
    for _ in range(2):
        train(optimizer, [one, other], 1)
        assert (optimizer.relative_sparsity, float(optimizer.state[other]["sparsity_frac"])) == kept
        assert optimizer.metrics_step == 1
        assert optimizer.state[one]["sparsity_frac"] == zeros_of([one]) / 16
        assert not (other == 0).any()
    train(optimizer, [one, other], 1)
    assert optimizer.metrics_step == 4
    check(optimizer)


def test_healing_keeps_what_was_and_loading_counts_anew():
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 2)
    train(optimizer, list(model.parameters()), 4)
    assert optimizer.metrics_step == 2
    check(optimizer)
    twin = wrapped(model, "adamw", 0, 2)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert twin.metrics_step is None
    assert twin.relative_sparsity == optimizer.relative_sparsity
    with torch.no_grad():
        model.embed.fill_(1.0)
    assert twin.relative_sparsity < optimizer.relative_sparsity


@pytest.mark.parametrize("rows", [10, 16])
def test_low_rank(rows):
    """`relative_factored_frac` is what the factors hold; a matrix that factors would not shrink has no zeros."""
    p = grid(rows, 8)
    group = {"params": [p], "prox_type": "MinRankConstraint", "group_type": "SVDGrouper", "min_sparsity": 0.5}
    optimizer = PruneOptimizer(torch.optim.SGD([group], lr=0.1))
    train(optimizer, [p], 1)
    factored = (rows + 8) * 4
    assert optimizer.relative_factored_frac == factored / (rows * 8)
    assert optimizer.param_groups[0]["factored_frac"] == factored / (rows * 8)
    assert optimizer.relative_sparsity == max(rows * 8 - factored, 0) / (rows * 8)
    assert optimizer.state[p]["sv_count"].tolist() == [4]
    assert optimizer.state[p]["sv_count"].dtype == torch.int32
    assert optimizer.state[p]["sparsity_frac"] == 0.5


def test_nothing_is_read_before_somebody_asks():
    """A step leaves its counts on the device: turning them into numbers is the reader's wait."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 1, 9)
    train(optimizer, list(model.parameters()), 3)
    assert all(isinstance(optimizer.state[p]["sparsity_frac"], torch.Tensor) for p in (model.embed, model.down))


def test_everything_zeroed_warns_once():
    """A whole axis may go, with one warning that names the cluster, and metrics stay numbers."""
    model = Stream()
    optimizer = wrapped(model, "adamw", 0, 9, model.groups(0.99))
    with pytest.warns(UserWarning, match="'stream'.*all 8 channels") as caught:
        train(optimizer, list(model.parameters()), 3)
    assert len([w for w in caught if "channels are zeroed" in str(w.message)]) == 1
    assert optimizer.relative_sparsity == 1.0


def test_no_regularized_groups():
    p = grid(3, 3)
    optimizer = PruneOptimizer(torch.optim.SGD([p], lr=0.1), 1, 3)
    for n in range(5):
        gradients([p], n)
        optimizer.step()
    assert optimizer.num_steps == 5
    assert optimizer.relative_sparsity == 0.0
    assert optimizer.masks() == {}
