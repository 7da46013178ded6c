"""What a user says and asks: clusters by name, members, explanations."""

from __future__ import annotations

import pytest
import torch

from benchmarks.registry import parameters
from coupled_prune import Cluster, Member, explain, prune_
from tests import oracle
from tests.model import Model, groups, stream


def test_globs_take_every_name_they_match_in_order():
    model = Model()
    cluster = stream(model)
    assert [member.name for member in cluster.members] == [
        "embed.weight",
        "blocks.0.qkv.weight",
        "blocks.1.qkv.weight",
        "blocks.0.out.weight",
        "blocks.0.out.bias",
        "blocks.1.out.weight",
        "blocks.1.out.bias",
        "blocks.0.up.weight",
        "blocks.1.up.weight",
        "blocks.0.down.weight",
        "blocks.0.down.bias",
        "blocks.1.down.weight",
        "blocks.1.down.bias",
    ]
    for member in cluster.members:
        assert member.parameter is model.get_parameter(member.name)
        assert member.scored is (".out." not in member.name)
    assert cluster.members[7].arguments == {"axis": 1}


def test_packed_projections_are_lists_of_ranges():
    """Grouped-query attention: two query heads, a key and a value head go together."""
    model = Model()
    cluster = groups(model)
    assert [(m.name, m.range) for m in cluster.members] == [
        ("blocks.0.qkv.weight", (0, 0, 8)),
        ("blocks.0.qkv.weight", (0, 8, 12)),
        ("blocks.0.qkv.weight", (0, 12, 16)),
        ("blocks.0.out.weight", None),
    ]
    before = [p.detach().clone() for p in parameters([cluster])]
    result = prune_(cluster)
    oracle.check_weights(before, [cluster], result)
    (group,) = result["groups"].ids
    zero_rows = (model.blocks[0].qkv.weight == 0).all(1).nonzero().squeeze(1).tolist()
    query, key, value = range(4 * group, 4 * group + 4), range(8 + 2 * group, 10 + 2 * group), 12 + 2 * group
    assert zero_rows == [*query, *key, value, value + 1]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"embed.*": "Dim1Grouper", "blocks.*.gate.*": "Dim1Grouper"}, ["'blocks.*.gate.*'", "embed.weight"]),
        ({"embed": "Dim1Grouper"}, ["'embed'", "matches no parameter"]),
        ({"embed.weight": {"axis": 1}}, ["'embed.weight'", "'grouper'"]),
        ({"embed.weight": {"grouper": "Dim1Grouper", "k": 3}}, ["parameter 'embed.weight'", "'k'"]),
        (
            {"embed.weight": "Dim1Grouper", "*.qkv.weight": "Dim0Grouper"},
            ["'embed.weight' has 8", "qkv.weight' has 16"],
        ),
        ({"embed.weight": "Dim1Grouper", "head.weight": "Dim1Grouper"}, ["'head.weight'", "Tied weights"]),
        ({}, ["no members"]),
    ],
    ids=["nothing", "a module", "no grouper", "argument", "channels", "tied twice", "empty"],
)
def test_invalid_patterns(patterns, words):
    with pytest.raises((ValueError, TypeError), match="cluster 'c'") as caught:
        Cluster.from_names(Model(), "c", patterns, 0.5)
    for word in words:
        assert word in str(caught.value)


def test_tied_weights_are_one_member_of_a_pattern_over_both_names():
    model = Model()
    cluster = Cluster.from_names(model, "c", {"[eh]*.weight": "Dim1Grouper"}, 0.5)
    assert [member.name for member in cluster.members] == ["embed.weight"]
    (counted,) = prune_(cluster).parameters
    assert counted.parameter is model.head.weight


def test_names_and_torchao_classes_mean_the_same():
    """Scripts for TorchAO hold grouper classes; only their name is read."""

    class Dim1Grouper:
        pass

    (member,) = Cluster.from_names(Model(), "c", {"embed.*": Dim1Grouper}, 0.5).members
    assert member.grouper == "Dim1Grouper"


def test_explain_says_path_and_reason_and_writes_nothing():
    wide = torch.ones(6, 9)
    cluster = Cluster(
        "c",
        [
            Member(torch.ones(70, 6), "Dim1Grouper", name="reader"),
            Member(wide[:, ::2], "Dim0Grouper", scored=False),
            Member(torch.ones(12, 2, dtype=torch.bfloat16), "AttentionHeadGrouperDim0", head_dim=2),
        ],
        0.3,
    )
    small = Cluster("small", [Member(torch.ones(4, 2**14), "ElemGrouper")], 0.25, keep_multiple_of=8)
    explained = explain([cluster, small])
    text = str(explained).splitlines()
    lines = [line.split() for line in text]
    assert lines[0] == ["cluster", "member", "shape", "dtype", "grouper", "vote", "path", "why"]
    assert lines[2][:7] == ["c", "reader", "70x6", "float32", "Dim1Grouper", "yes", "fast"]
    row = " ".join(lines[3])
    assert row.startswith("c member 1 of shape (6, 5) 6x5 float32 Dim0Grouper no reference")
    assert row.endswith("no dimension is contiguous in memory")
    assert " ".join(lines[4]).endswith("12x2 bfloat16 AttentionHeadGrouperDim0 yes fast 12x2, lanes on axis 0")
    assert text[-2:] == ["c: 2 of 6 channels will be zeroed", "small: 16384 of 65536 channels will be zeroed"]
    assert [explained.path_of("c", i) for i in range(3)] == ["fast", "reference", "fast"]
    assert explained.path_of("small", 0) == "flat"
    assert explain(cluster, path="reference").path_of("c", 0) == "reference"
    assert bool((wide == 1).all())


def test_path_of_an_unknown_cluster_is_a_lookup_error():
    explained = explain(Cluster("c", [Member(torch.ones(4), "Dim0Grouper")], 0.5))
    with pytest.raises(LookupError):
        explained.path_of("d", 0)
    with pytest.raises(LookupError):
        explained.path_of("c", 1)


def test_explain_and_prune_agree_on_the_budget():
    model = Model()
    cluster = stream(model)
    line = str(explain(cluster)).splitlines()[-1]
    assert line == f"stream: {prune_(cluster)['stream'].zero_channels} of 8 channels will be zeroed"


def test_a_member_shows_itself_whatever_it_was_given():
    assert "rows=5" in repr(Member(torch.ones(4), "Dim0Grouper", rows=5))
    assert "narrow=(1, 0, 2)" in repr(Member(torch.ones(4, 4), "Dim0Grouper", narrow=(1, 0, 2)))
