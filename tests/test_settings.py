"""Everything invalid in a parameter group raises one clear error before a key, a weight or a state has changed."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

from coupled_prune import PruneOptimizer
from tests.refusals import weight
from tests.training import Stream, gradients, train, wrapped

NAN, INF = float("nan"), float("inf")


def p(*shape, dtype=torch.float32):
    return nn.Parameter(weight(*shape, dtype=dtype))


def ordinary(prox_type="MinSparsityConstraint", params=None, **more):
    group = {"params": params or [p(8, 4)], "prox_type": prox_type, "group_type": "Dim0Grouper", "min_sparsity": 0.5}
    return without({**group, **more})


def coupled(params=None, **more):
    return ordinary("CoupledMinSparsityConstraint", params, **{"couple_key": "c", **more})


def stage(**more):
    return without({"group_type": "Dim1Grouper", "couple_key": "c", "min_sparsity": 0.5, **more})


def nested(parent=None, **more):
    return ordinary(**{"coupled": stage(**more), **(parent or {})})


def without(group):
    return {key: value for key, value in group.items() if value is not ...}


def meta():
    return nn.Parameter(torch.empty(8, 4, device="meta"))


def shared_storage():
    one = p(8, 4)
    return [one, nn.Parameter(one.data[:4])]


CLUSTER = "cluster 'c'"

# name: groups, words of the message
INVALID = {
    # what is missing
    "no group_type": (lambda: [ordinary(group_type=...)], ["parameter group 0", "'group_type'"]),
    "no target": (lambda: [ordinary(min_sparsity=...)], ["MinSparsityConstraint", "'min_sparsity'"]),
    "no n_nonzero": (lambda: [ordinary("NMSparseConstraint")], ["'n_nonzero'"]),
    "no couple_key": (lambda: [coupled(couple_key=...)], ["parameter group 0", "'couple_key'"]),
    "coupled without group_type": (lambda: [coupled(group_type=...)], ["'group_type'"]),
    "coupled without target": (lambda: [coupled(min_sparsity=...)], ["'min_sparsity'"]),
    "nested without couple_key": (lambda: [nested(couple_key=...)], ["coupled stage", "'couple_key'"]),
    "nested without group_type": (lambda: [nested(group_type=...)], ["coupled stage", "'group_type'"]),
    "nested without target": (lambda: [nested(min_sparsity=...)], ["coupled stage", "'min_sparsity'"]),
    "nested without a parent": (lambda: [nested({"prox_type": ...})], ["'coupled'", "parent"]),
    "couple_key without prox_type": (lambda: [without({**coupled(), "prox_type": ...})], ["'couple_key'", "prox_type"]),
    "soft without lr": (None, ["ProxLasso", "'lr'"]),
    "packed without npack": (
        lambda: [ordinary("MinRankConstraint", [p(8, 4)], group_type="PackedSVDGrouper")],
        ["PackedSVDGrouper", "npack", "None"],
    ),
    # what is too much
    "both forms": (lambda: [coupled(coupled=stage())], ["parameter group 0", "twice"]),
    "couple_key beside an ordinary projection": (lambda: [ordinary(couple_key="c")], ["'couple_key'", "'coupled'"]),
    "unknown key in a stage": (lambda: [nested(min_sparsty=0.1)], ["'min_sparsty'", "min_sparsity"]),
    # names
    "unknown prox_type": (lambda: [ordinary("MinSparsity")], ["'MinSparsity'", "MinSparsityConstraint"]),
    "prox_type is a number": (lambda: [ordinary(3)], ["3"]),
    "unknown grouper": (lambda: [ordinary(group_type="Dim7Grouper")], ["'Dim7Grouper'", "Dim0Grouper"]),
    "unknown grouper in a stage": (lambda: [nested(group_type="Dim7Grouper")], ["'Dim7Grouper'"]),
    "grouper is a list": (lambda: [ordinary(group_type=["Dim0Grouper"])], ["['Dim0Grouper']"]),
    "unknown score_type": (lambda: [ordinary("GlobalMinSparsityConstraint", score_type="l1")], ["'l1'", "rms"]),
    "unknown score_type in a stage": (lambda: [coupled(score_type="l1")], ["'l1'", "rms"]),
    # values
    **{
        f"{kind} min_sparsity={value!r}": (
            lambda make=make, v=value: [make(min_sparsity=v)],
            ["min_sparsity", repr(value)],
        )
        for kind, make in (("ordinary", ordinary), ("coupled", coupled), ("nested", nested))
        for value in (-0.1, 1.1, NAN, INF, "0.5", None, True)
    },
    **{
        f"{kind} prox_freq={value!r}": (lambda make=make, v=value: [make(prox_freq=v)], ["prox_freq", repr(value)])
        for kind, make in (("ordinary", ordinary), ("coupled", coupled), ("nested", nested))
        for value in (0, -1, 1.5, True, "2", None)
    },
    **{
        f"{kind} couple_key={value!r}": (lambda make=make, v=value: [make(couple_key=v)], ["couple_key", repr(value)])
        for kind, make in (("coupled", coupled), ("nested", nested))
        for value in ("", None, 1, False)
    },
    **{
        f"coupled is {value!r}": (lambda v=value: [ordinary(coupled=v)], ["'coupled'", repr(value)])
        for value in (None, False, [], 1, "bad", [1], [{}, 3])
    },
    "coupled is empty": (lambda: [ordinary(coupled={})], ["'group_type'"]),
    **{
        f"{key}={value!r}": (lambda key=key, v=value: [ordinary(**{key: v})], [key, repr(value)])
        for key, value in (
            ("reg_lambda", -1.0),
            ("reg_lambda", "1"),
            ("gamma_index_slope", -0.5),
            ("min_sparsity_schedule", 1),
            ("prox_through_heal", "yes"),
            ("keep_multiple_of", 0),
            ("score_group_count_ref", 0),
            ("score_group_count_ref", 2.0),
        )
    },
    "scored is a number": (lambda: [coupled(scored=1)], ["scored", "1"]),
    "n_nonzero is negative": (lambda: [ordinary("NMSparseConstraint", n_nonzero=-1)], ["n_nonzero", "-1"]),
    "n_nonzero beyond the group": (
        lambda: [ordinary("NMSparseConstraint", n_nonzero=5, group_type="KElementGrouper", k=4)],
        ["n_nonzero=5", "4 elements"],
    ),
    "heads are a string": (
        lambda: [ordinary(group_type="AttentionHeadGrouperDim0", num_heads="4")],
        ["num_heads", "'4'"],
    ),
    "both heads": (lambda: [ordinary(group_type="AttentionHeadGrouperDim0", num_heads=4, head_dim=2)], ["exactly one"]),
    "heads do not divide": (
        lambda: [ordinary(group_type="AttentionHeadGrouperDim0", num_heads=3)],
        ["8", "num_heads=3"],
    ),
    # schedules
    "ramp without an end": (lambda: [ordinary(min_sparsity_schedule=True)], ["min_sparsity_schedule", "finite"]),
    "coupled ramp without an end": (lambda: [coupled(min_sparsity_schedule=True)], ["min_sparsity_schedule", "finite"]),
    "nested ramp without an end": (lambda: [nested(min_sparsity_schedule=True)], ["coupled stage", "finite"]),
    # what does not go together
    "channels of an SVD grouper": (lambda: [ordinary(group_type="SVDGrouper")], ["'SVDGrouper'", "channels"]),
    "ranks of channels": (lambda: [ordinary("MinRankConstraint")], ["singular values", "'Dim0Grouper'", "SVDGrouper"]),
    "a coupled SVD grouper": (lambda: [coupled(group_type="SVDGrouper")], ["SVDGrouper", "cannot be coupled"]),
    "a nested SVD grouper": (lambda: [nested(group_type="PackedSVDGrouper", npack=2)], ["cannot be coupled"]),
    "a stage after an SVD projection": (
        lambda: [nested({"prox_type": "MinRankConstraint", "group_type": "SVDGrouper"})],
        ["singular values", "MinRankConstraint"],
    ),
    "through heal without SVD": (
        lambda: [ordinary(prox_through_heal=True)],
        ["prox_through_heal=True", "'Dim0Grouper'"],
    ),
    "short groups under one budget": (
        lambda: [ordinary("GlobalMinSparsityConstraint", group_type="KElementGrouper", k=3)],
        ["k=3", "does not divide"],
    ),
    # members that disagree
    **{
        f"{kind} members disagree on {key}": (
            lambda make=make, key=key, v=value: [make(), make(**{key: v})],
            [CLUSTER, key, "parameter group 0", "parameter group 1", repr(value)],
        )
        for kind, make in (("coupled", lambda **m: coupled([p(8, 4)], **m)), ("nested", lambda **m: nested(**m)))
        for key, value in (("min_sparsity", 0.25), ("score_type", "l2"), ("prox_freq", 2), ("keep_multiple_of", 2))
    },
    "members have other numbers of channels": (
        lambda: [coupled([p(8, 4)]), coupled([p(3, 6)])],
        [CLUSTER, "\"param_groups[0]['params'][0]\" has 8", "has 3"],
    ),
    "names appear": (
        lambda: [coupled([("wide", p(8, 4))]), coupled([("narrow", p(3, 6))])],
        ["parameter 'wide' has 8", "parameter 'narrow' has 3"],
    ),
    "nobody votes": (lambda: [coupled(scored=False)], [CLUSTER, "scored=False"]),
    "claimed twice": (
        lambda: [ordinary(coupled=[stage(), stage(couple_key="d")])],
        ["cluster 'd'", CLUSTER, "same axis"],
    ),
    "overlapping rows": (
        lambda: [
            ordinary(
                coupled=[stage(group_type="Dim0Grouper", rows=(0, 4)), stage(group_type="Dim0Grouper", rows=(2, 6))]
            )
        ],
        [CLUSTER, "0:4", "2:6"],
    ),
    "rows beyond the end": (lambda: [coupled(rows=(4, 12))], ["4:12", "size 8"]),
    # tensors
    "an integer weight": (lambda: [ordinary(params=[nn.Parameter(torch.ones(4, 4).int(), False)])], ["torch.int32"]),
    "a meta weight": (lambda: [ordinary(params=[meta()])], ["meta"]),
    "a coupled meta weight": (lambda: [coupled(params=[p(8, 4), meta()])], ["meta"]),
    "two objects over one storage": (lambda: [ordinary(params=shared_storage())], ["shares memory"]),
    "ordinary and coupled over one storage": (
        lambda: (lambda one, two: [ordinary(params=[one]), coupled([two])])(*shared_storage()),
        ["shares memory"],
    ),
    "a vector without rank": (
        lambda: [ordinary("ProxNuclearNorm", [p(8)], group_type="SVDGrouper")],
        ["SVDGrouper", "(8,)"],
    ),
    "packed of another shape": (
        lambda: [ordinary("ProxNuclearNorm", [p(9, 4)], group_type="PackedSVDGrouper", npack=2)],
        ["2 square matrices", "(9, 4)"],
    ),
    "pack_dim": (
        lambda: [ordinary("ProxNuclearNorm", [p(8, 4)], group_type="PackedSVDGrouper", npack=2, pack_dim=2)],
        ["pack_dim", "2"],
    ),
}
INVALID.pop("soft without lr")


def cases():
    return pytest.mark.parametrize(("make", "words"), INVALID.values(), ids=INVALID)


def refuse(call, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"


@cases()
def test_construction_changes_nothing(make, words):
    base = torch.optim.SGD(make(), lr=0.1)
    before = [dict(group) for group in base.param_groups]
    refuse(lambda: PruneOptimizer(base), words)
    assert [dict(group) for group in base.param_groups] == before


@cases()
def test_added_group_changes_nothing(make, words):
    groups = make()
    if isinstance(groups[0]["params"][0], tuple):
        pytest.skip("torch wants names in all groups or in none")
    base = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]}], lr=0.1)
    optimizer = PruneOptimizer(base)
    for group in groups[:-1]:
        optimizer.add_param_group(group)
    before = [dict(group) for group in base.param_groups]
    given = dict(groups[-1])
    with pytest.raises((ValueError, TypeError)):
        optimizer.add_param_group(groups[-1])
    assert [dict(group) for group in base.param_groups] == before
    assert groups[-1] == given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"warmup_steps": 5, "healing_start_step": 5}, ["warmup_steps (5)", "healing_start_step (5)"]),
        ({"warmup_steps": 6, "healing_start_step": 5}, ["(6)", "(5)"]),
        ({"warmup_steps": sys.maxsize}, ["warmup_steps"]),
        ({"warmup_steps": -1}, ["warmup_steps", "-1"]),
        ({"warmup_steps": 1.5}, ["warmup_steps", "1.5"]),
        ({"healing_start_step": None}, ["healing_start_step", "None"]),
        ({"reg_lambda": -1.0}, ["reg_lambda", "-1.0"]),
        ({"latent_storage": "sparse"}, ["latent_storage", "'sparse'"]),
        ({"latent_storage": "compact", "latent_weights": False}, ["latent_storage", "latent_weights=False"]),
    ],
)
def test_arguments(arguments, words):
    base = torch.optim.SGD([ordinary(reg_lambda=..., prox_type="ProxLasso")], lr=0.1)
    before = [dict(group) for group in base.param_groups]
    refuse(lambda: PruneOptimizer(base, **arguments), words)
    assert [dict(group) for group in base.param_groups] == before


@pytest.mark.parametrize("soft", ["ProxLasso", "ProxGroupLasso"])
def test_soft_projection_before_a_stage_needs_latents(soft):
    """Direct mode would shrink the same weights again in every step, and the cluster with them."""
    make = lambda: torch.optim.SGD([nested({"prox_type": soft})], lr=0.1)  # noqa: E731
    refuse(lambda: PruneOptimizer(make(), latent_weights=False), [soft, "latent_weights=True", "coupled stage"])
    PruneOptimizer(make())


def test_soft_projection_needs_a_learning_rate():
    class NoRate(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    refuse(lambda: PruneOptimizer(NoRate([ordinary("ProxLasso")])), ["ProxLasso", "'lr'"])
    PruneOptimizer(NoRate([ordinary()]))


def test_changes_inside_a_nested_stage_take_effect():
    grid = nn.Parameter(torch.rand(4, 8) + 1)
    group = ordinary(params=[grid], min_sparsity=0.0, coupled=stage())
    optimizer = PruneOptimizer(torch.optim.SGD([group], lr=0.1))
    for target, zeroed in ((0.5, 4), (0.25, 2)):
        optimizer.param_groups[0]["coupled"]["min_sparsity"] = target
        train(optimizer, [grid], 1)
        assert int((grid == 0).all(0).sum()) == zeroed


def test_defaults_agree_with_what_is_explicit():
    model = Stream()
    groups = model.groups()
    groups[1].update(min_sparsity_schedule=False, score_type="rms", prox_freq=1, scored=True, keep_multiple_of=None)
    wrapped(model, groups=groups)


def test_nested_stage_inherits_and_overrides():
    """A stage takes schedule and score type from its group, and its own values go before these."""
    one, two = p(8, 4), p(4, 8)
    group = ordinary(params=[one], min_sparsity=0.0, score_type="l2", min_sparsity_schedule=True)
    inherits = {**group, "coupled": stage(group_type="Dim0Grouper")}
    explicit = {**group, "params": [two], "score_type": "rms", "min_sparsity_schedule": False}
    explicit["coupled"] = stage(score_type="l2", min_sparsity_schedule=True)
    optimizer = PruneOptimizer(torch.optim.SGD([inherits, explicit], lr=0.1), healing_start_step=8)
    counts = []
    for _ in range(8):
        train(optimizer, [one, two], 1)
        counts.append(len(optimizer.masks()["c"]))
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert len(set(counts)) > 2


def test_classes_count_as_their_names():
    class Dim0Grouper:
        pass

    class MinSparsityConstraint:
        pass

    one = p(8, 4)
    group = ordinary(params=[one], prox_type=MinSparsityConstraint, group_type=Dim0Grouper)
    optimizer = PruneOptimizer(torch.optim.SGD([group], lr=0.1))
    train(optimizer, [one], 1)
    assert int((one == 0).all(1).sum()) == 4


def test_groups_are_not_changed_by_nesting():
    """The dictionaries of the user stay as they were written, copies included."""
    group = nested()
    written = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
    PruneOptimizer(torch.optim.SGD([group], lr=0.1))
    assert {k: group[k] for k in written} == written


def test_zero_size_and_untrained_parameters():
    """Parameters without elements or without gradients take no part in ordinary projections."""
    empty, fixed, one = nn.Parameter(torch.empty(0, 4)), p(8, 4), p(8, 4)
    fixed.requires_grad_(False)
    before = fixed.clone()
    optimizer = PruneOptimizer(torch.optim.SGD([ordinary(params=[empty, fixed, one])], lr=0.1))
    one.grad = torch.zeros_like(one)
    optimizer.step()
    assert torch.equal(fixed, before)
    assert optimizer.relative_sparsity == 0.5


def test_untrained_members_follow_their_cluster():
    """A mask holds for every member: a frozen embedding is pruned with the matrices that read it."""
    model = Stream()
    model.embed.requires_grad_(False)
    optimizer = wrapped(model, "adamw", 0, 3)
    trained = [q for q in model.parameters() if q.requires_grad]
    for n in range(5):
        gradients(trained, n)
        optimizer.step()
        assert len(model.dead()) == 4


@pytest.mark.parametrize("make", [list, lambda: iter([p(8, 4)]), lambda: p(8, 4)], ids=["none", "iterator", "one"])
def test_added_group_forms(make):
    optimizer = PruneOptimizer(torch.optim.SGD([ordinary()], lr=0.1))
    added = make()
    optimizer.add_param_group(ordinary(params=[0]) | {"params": added})
    assert optimizer.param_groups[1]["gamma"] == 0.0
    for group in optimizer.param_groups:
        for q in group["params"]:
            q.grad = torch.zeros_like(q)
    optimizer.step()
    assert optimizer.relative_sparsity == 0.5
