"""Parameter groups from names, patterns and module types. (Equality with TorchAO's is in `test_torchao`.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coupled_prune import PruneOptimizer, get_param_groups


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4))


@pytest.mark.filterwarnings("ignore:prune_config")
def test_keys_in_order_and_the_rest():
    model = net()
    config = {
        (nn.Linear, "weight"): {"kind": "linear"},
        "2.weight": {"kind": "name"},
        ":0\\.": {"kind": "pattern"},
    }
    groups = get_param_groups(model, config, skip_wd_names={"weight"}, verbose=False)
    by_name = {
        name: next(g for g in groups if any(q is p for q in g["params"])) for name, p in model.named_parameters()
    }
    assert by_name["0.weight"]["kind"] == by_name["0.bias"]["kind"] == "pattern"
    assert by_name["2.weight"]["kind"] == "name"
    assert by_name["2.bias"]["weight_decay"] == by_name["3.weight"]["weight_decay"] == 0
    assert sum(len(group["params"]) for group in groups) == 6


def test_tied_weights_are_taken_once():
    model = net()
    model[2].weight = nn.Parameter(model[0].weight.detach().T.clone())
    model.append(nn.Linear(4, 8))
    model[4].weight = model[0].weight
    groups = get_param_groups(model, {(nn.Linear, "weight"): {}}, verbose=False)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_groups_go_into_the_optimizer():
    model = net()
    shared = {"prox_type": "CoupledMinSparsityConstraint", "couple_key": "hidden", "min_sparsity": 0.5}
    config = {
        ":0\\.": {**shared, "group_type": "Dim0Grouper"},
        "2.weight": {**shared, "group_type": "Dim1Grouper"},
    }
    optimizer = PruneOptimizer(torch.optim.AdamW(get_param_groups(model, config, verbose=False), lr=0.1))
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    dead = optimizer.masks()["hidden"]
    assert len(dead) == 4
    assert not model[0].weight[dead].any()
    assert not model[0].bias[dead].any()
    assert not model[2].weight[:, dead].any()


@pytest.mark.parametrize(
    ("key", "words"),
    [(3, "3"), (nn.Linear, "Linear"), (("Linear", "weight"), "Linear"), ((nn.Linear,), "Linear"), (":(", "expression")],
)
def test_bad_keys(key, words):
    with pytest.raises(ValueError, match="prune_config") as caught:
        get_param_groups(net(), {key: {}}, verbose=False)
    assert words in str(caught.value)


def test_a_key_without_parameters_warns():
    with pytest.warns(UserWarning, match="'no.such'"):
        get_param_groups(net(), {"no.such": {}}, verbose=False)
