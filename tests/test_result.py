"""What a user gets: results, masks, budgets, warnings, and weights that stay what they were."""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coupled_prune import Cluster, Member, apply_masks_, budget, prune_
from tests import oracle
from tests.model import Model, groups, stream


def test_a_result_is_a_mapping_and_prints_a_table(capsys):
    clusters = [
        Cluster("rows", [Member(torch.arange(1.0, 11).unsqueeze(1).expand(10, 3).clone(), "Dim0Grouper")], 0.3),
        Cluster("vector", [Member(torch.tensor([3.0, float("nan"), 1.0, 2.0]), "Dim0Grouper")], 0.25),
    ]
    result = prune_(clusters)
    assert list(result) == ["rows", "vector"]
    assert len(result) == 2
    assert "rows" in result
    assert "other" not in result
    assert result.get("other") is None
    with pytest.raises(KeyError):
        result["other"]
    assert result["rows"].ids == [0, 1, 2]
    assert result["rows"].mask.dtype == torch.bool
    assert (result.zero_elts, result.numel, result.sparsity) == (10, 34, 10 / 34)
    print(result)
    assert capsys.readouterr().out.splitlines() == [
        "cluster  members  channels  zeroed  share",
        "-------  -------  --------  ------  -----",
        "rows           1        10       3  30.0%",
        "vector         1         4       1  25.0%",
        "vector: channels with NaN or infinite scores: 1",
        "2 parameters: 10 of 34 elements are zero (29.4%)",
    ]


def test_each_parameter_is_reported_once_under_its_name():
    model = Model()
    clusters = [stream(model), groups(model)]
    result = prune_(clusters)
    assert [p.name for p in result.parameters] == [member.name for member in clusters[0].members]
    for counted in result.parameters:
        assert counted.parameter is model.get_parameter(counted.name)
        assert counted.zero_elts == int((counted.parameter == 0).sum())
        assert counted.sparsity == counted.zero_elts / counted.parameter.numel()


def test_a_name_given_later_is_still_reported():
    weight = torch.ones(4, 4)
    cluster = Cluster("c", [Member(weight, "Dim0Grouper"), Member(weight, "Dim1Grouper", name="square")], 0.5)
    assert [p.name for p in prune_(cluster).parameters] == ["square"]


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_masks_survive_json_and_apply_to_the_dense_model(path):
    model = Model()
    dense = copy.deepcopy(model)
    result = prune_([stream(model), groups(model)])
    masks = json.loads(json.dumps(result.masks()))
    assert {key: len(ids) for key, ids in masks.items()} == {"stream": 3, "groups": 1}
    applied = apply_masks_([groups(dense), stream(dense)], masks, path)
    for (name, pruned), (_, again) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        assert (oracle.bits(pruned) == oracle.bits(again)).all(), name
    assert applied.masks() == masks
    assert applied.zero_elts == result.zero_elts
    assert applied["stream"].scores is None
    assert applied["stream"].nonfinite == []


@pytest.mark.parametrize(
    ("target", "channels", "multiple", "zeroed"),
    [
        (0.07, 100, None, 7),
        (0.55, 100, None, 55),
        (0.29, 100, None, 29),
        (0.999, 40, None, 40),
        (0.301, 10, None, 4),
        (1e-9, 10, None, 0),
        (0.0, 100, None, 0),
        (0, 100, None, 0),
        (1.0, 100, None, 100),
        (1, 100, None, 100),
        (1 - 3584 / 5120, 5120, None, 1536),
        (0.5, 1, None, 1),
        (0.5, 128, 64, 64),
        (0.49, 128, 64, 0),
        (0.6, 256, 64, 128),
        (0.5, 100, 8, 44),
        (0.5, 100, 1, 50),
        (0.5, 100, 128, 0),
        (0.25, 100, 80, 20),
        (0.1, 100, 80, 0),
        (1.0, 100, 64, 100),
        (0.0, 100, 64, 0),
    ],
)
def test_budget(target, channels, multiple, zeroed):
    """With `multiple`, kept channels are rounded up to it as far as there are channels."""
    assert budget(target, channels, multiple) == zeroed
    weight = torch.arange(1.0, channels + 1)
    cluster = Cluster("c", [Member(weight, "Dim0Grouper")], target, keep_multiple_of=multiple)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert prune_(cluster)["c"].ids == list(range(zeroed))


def test_budget_of_a_short_float():
    """float16 ends at 65504: the product must not be taken in it."""
    assert budget(np.float16(0.5), 200_000) == 100_000


@pytest.mark.parametrize("target", [k / 1000 for k in range(0, 1001, 7)])
def test_decimal_targets_of_a_thousand_channels_are_exact(target):
    assert budget(target, 1000) == round(target * 1000) == oracle.exact_budget(target, 1000)


def test_one_warning_names_the_cluster_that_loses_all_channels():
    clusters = [
        Cluster("gone", [Member(torch.ones(4, 4), "Dim0Grouper"), Member(torch.ones(4), "Dim0Grouper")], 1.0),
        Cluster("half", [Member(torch.ones(4, 4), "Dim0Grouper")], 0.5),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = prune_(clusters)
    assert [str(warning.message) for warning in caught] == ["cluster 'gone': all 4 channels are zeroed"]
    assert result["gone"].zero_channels == 4


def test_the_warning_points_at_the_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prune_(Cluster("gone", [Member(torch.ones(4), "Dim0Grouper")], 1.0))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_score_types_report_other_values_and_choose_the_same(path, dtype):
    """Only voting members count into n: 90 rows and one gain a channel, not the follower."""
    chosen = []
    for score_type in ("l2", "rms", "param_cost"):
        generator = torch.Generator().manual_seed(0)
        reader = torch.randn(90, 40, generator=generator).to(dtype)
        gain = torch.randn(40, generator=generator).to(dtype)
        members = [
            Member(reader, "Dim1Grouper"),
            Member(gain, "Dim0Grouper"),
            Member(torch.full((40, 5), 9.0, dtype=dtype), "Dim0Grouper", scored=False),
        ]
        sums = reader.double().square().sum(0) + gain.double().square()
        expected = {"l2": sums.sqrt(), "rms": (sums / 91).sqrt(), "param_cost": sums.sqrt() / 91}[score_type]
        result = prune_(Cluster("c", members, 0.3, score_type=score_type), path)["c"]
        assert result.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(result.scores.double(), expected, rtol=1e-6, atol=0)
        assert result.ids == sorted(sums.argsort()[:12].tolist())
        chosen.append(result.ids)
    assert chosen[0] == chosen[1] == chosen[2]


def test_nonfinite_channels_are_listed_and_long_lists_shortened():
    weight = torch.ones(3, 20)
    weight[0, 3], weight[1, 7], weight[2, 19] = float("nan"), float("inf"), float("-inf")
    result = prune_(Cluster("c", [Member(weight, "Dim1Grouper")], 0.5))
    assert result["c"].nonfinite == [3, 7, 19]
    assert "c: channels with NaN or infinite scores: 3, 7, 19\n" in str(result)
    result = prune_(Cluster("c", [Member(torch.full((3, 20), float("nan")), "Dim1Grouper")], 0.0))
    assert "scores: 0, 1, 2, 3, 4, 5, 6, 7 and 12 more\n" in str(result)


@pytest.mark.parametrize("path", ["auto", "reference"])
def test_channel_share_and_element_share_of_a_square_weight_on_both_axes(path):
    """10 % of the channels are 19 % of the elements, where rows and columns cross: 1 - 0.9 * 0.9."""
    weight = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    result = prune_(Cluster("c", [Member(weight, "Dim0Grouper"), Member(weight, "Dim1Grouper")], 0.1), path)
    assert "10.0%" in str(result)
    assert "1,900 of 10,000 elements are zero (19.0%)" in str(result)
    assert (result["c"].zero_channels, result["c"].channels) == (10, 100)
    assert result.sparsity == result.parameters[0].sparsity == 0.19
    assert result.zero_elts == int((weight == 0).sum())


@pytest.mark.parametrize(
    ("grouper", "path"),
    [
        ("Dim0Grouper", "fast"),
        ("Dim1Grouper", "fast"),
        ("ElemGrouper", "fast"),
        ("Dim0Grouper", "reference"),
        ("Dim1Grouper", "reference"),
    ],
)
def test_autograd_notices_a_write_between_forward_and_backward(grouper, path):
    """A view that hid the write from the version counter would give silently wrong gradients."""
    weight = nn.Parameter(torch.randn(80, 80, generator=torch.Generator().manual_seed(0)))
    x = torch.ones(2, 80, requires_grad=True)
    version = weight._version
    loss = F.linear(x, weight).sum()
    prune_(Cluster("c", [Member(weight, grouper)], 0.5), path)
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("grouper", ["Dim0Grouper", "Dim1Grouper", "ElemGrouper"])
def test_nothing_chosen_is_nothing_written(grouper, path):
    """A target of 0, as early in a schedule, must not invalidate a graph: no write, no new version."""
    weight = nn.Parameter(torch.ones(80, 80))
    version = weight._version
    result = prune_(Cluster("c", [Member(weight, grouper)], 0.0), path)
    assert result.zero_elts == 0
    assert weight._version == version


def test_parameters_stay_what_they_were():
    """The same objects and storage, leaves that require grad, gradients untouched."""
    model = Model()
    weights = dict(model.named_parameters())
    pointers = {name: p.data_ptr() for name, p in weights.items()}
    F.mse_loss(model.head(model.embed(torch.arange(20))), torch.eye(20)).backward()
    gradient = model.embed.weight.grad.clone()
    prune_([stream(model), groups(model)])
    for name, parameter in model.named_parameters():
        assert parameter is weights[name]
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.grad_fn is None
        assert parameter.data_ptr() == pointers[name]
    assert torch.equal(model.embed.weight.grad, gradient)
    model.head(model.embed(torch.arange(20))).sum().backward()
    assert not torch.equal(model.embed.weight.grad, gradient)


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("grouper", ["Dim0Grouper", "Dim1Grouper", "ElemGrouper"])
def test_the_default_device_changes_nothing(grouper, path):
    """Scripts set the GPU as default and still hold weights on the CPU; meta stands for the GPU here."""
    weight = torch.randn(80, 80, generator=torch.Generator().manual_seed(0))
    again = weight.clone()
    expected = prune_(Cluster("c", [Member(weight, grouper)], 0.3), path)
    with torch.device("meta"):
        result = prune_(Cluster("c", [Member(again, grouper)], 0.3), path)
        apply_masks_(Cluster("c", [Member(again, grouper)], 0.3), expected.masks(), path)
    assert result["c"].ids == expected["c"].ids
    assert torch.equal(weight, again)


@pytest.mark.parametrize(
    "members",
    [
        lambda w: [Member(w[:, :4], "Dim0Grouper"), Member(w[:, 4:], "Dim0Grouper")],
        lambda w: [Member(w.as_strided((2, 3), (3, 2)), "Dim0Grouper")],
    ],
    ids=["interleaved slices", "interleaved strides"],
)
def test_the_default_device_does_not_disturb_validation(members):
    weight = torch.ones(8, 8)
    with torch.device("meta"):
        cluster = Cluster("c", members(weight), 0.5)
    assert prune_(cluster)["c"].zero_channels == cluster.members[0].parameter.size(0) // 2


def test_results_compare_by_identity():
    """They hold tensors, whose comparison has no truth value."""
    weight = torch.ones(4, 4)
    first, second = (prune_(Cluster("c", [Member(weight, "Dim0Grouper")], 0.5)) for _ in range(2))
    assert first == first
    assert first != second
    assert first["c"] != second["c"]
    assert first.parameters[0] != second.parameters[0]
