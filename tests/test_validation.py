"""Everything invalid raises one clear error before a single bit of any weight has changed.

Each row of the tables is tried twice: when the cluster is built, and on a cluster that was valid
when built and comes last in a call, after others that could have been written already.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, prune

from coupled_prune import Cluster, Member, apply_masks_, explain, prune_
from tests.refusals import dim0, refused, tensors_of, weight

NAN, INF = float("nan"), float("inf")


def one(grouper, shape=(8, 8), **options):
    return lambda: [Member(weight(*shape), grouper, name="w", **options)]


def of(make, **options):
    return lambda: [dim0(make(), name="w", **options)]


def quantized():
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this torch has no quantized tensors")
    return torch.quantize_per_tensor(weight(4, 4), 0.1, 0, torch.qint8)


def two_tensor():
    module = pytest.importorskip("torch.testing._internal.two_tensor")
    return module.TwoTensor(weight(4, 4), weight(4, 4))


def under_prune():
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer.weight


def inference_tensor():
    with torch.inference_mode():
        return torch.ones(4, 4)


def placeholder():
    tensor = weight(4, 4)
    tensor.ds_shape = (8, 8)
    return tensor


def freed():
    """What FSDP1 leaves of a parameter outside forward; reading it crashes the process."""
    parameter = nn.Parameter(weight(4, 4))
    parameter.untyped_storage().resize_(0)
    return parameter


class NotAMember:
    parameter = torch.ones(4)


NAMED = "parameter 'w'"


MEMBERS = {
    "no members": (list, ValueError, ["no members"]),
    "a bare tensor": (lambda: [weight(4, 4)], TypeError, ["member 0", "Tensor"]),
    "an object with a parameter": (lambda: [NotAMember()], TypeError, ["member 0", "NotAMember"]),
    "not a tensor": (lambda: [dim0(None)], TypeError, ["member 0", "NoneType"]),
    "not a tensor but named": (lambda: [dim0("x", name="w")], TypeError, [NAMED, "str"]),
    "unknown grouper": (one("Dim3Grouper"), ValueError, [NAMED, "'Dim3Grouper'", "Dim0Grouper", "AxisGrouper"]),
    "grouper is a number": (one(3), TypeError, [NAMED, "3"]),
    "unnamed member": (
        lambda: [dim0(weight(8, 8)), Member(weight(8, 8), "X")],
        ValueError,
        ["member 1 of shape (8, 8)", "'X'"],
    ),
    "heads: both arguments": (
        one("AttentionHeadGrouperDim0", num_heads=2, head_dim=4),
        TypeError,
        [NAMED, "num_heads=2", "head_dim=4"],
    ),
    "heads: no argument": (one("AttentionHeadGrouperDim1"), TypeError, [NAMED, "neither"]),
    "no k": (one("KElementGrouper"), TypeError, [NAMED, "'k'", "start_dim"]),
    "no axis": (one("AxisGrouper"), TypeError, [NAMED, "'axis'", "tiles"]),
    "unknown keyword": (one("Dim0Grouper", head_dim=4), TypeError, [NAMED, "'head_dim'", "start_dim, end_dim"]),
    "keyword of a grouper without any": (one("ElemGrouper", k=4), TypeError, [NAMED, "'k'", "none"]),
    "bool": (one("KElementGrouper", k=True), TypeError, [NAMED, "k must", "True"]),
    "float": (one("AttentionHeadGrouperDim0", head_dim=4.0), TypeError, [NAMED, "head_dim", "4.0"]),
    "str": (one("AxisGrouper", axis="0"), TypeError, [NAMED, "axis", "'0'"]),
    "None": (one("AxisGrouper", axis=None), TypeError, [NAMED, "axis", "None"]),
    "zero k": (one("KElementGrouper", k=0), ValueError, [NAMED, "k must", "got 0"]),
    "zero heads": (one("AttentionHeadGrouperDim0", num_heads=0), ValueError, [NAMED, "num_heads", "got 0"]),
    "negative head_dim": (one("AttentionHeadGrouperDim1", head_dim=-4), ValueError, [NAMED, "head_dim", "got -4"]),
    "zero block": (one("AxisGrouper", axis=0, block=0), ValueError, [NAMED, "block", "got 0"]),
    "negative tiles": (one("AxisGrouper", axis=0, tiles=-1), ValueError, [NAMED, "tiles", "got -1"]),
    "indivisible by num_heads": (
        one("AttentionHeadGrouperDim0", num_heads=3),
        ValueError,
        [NAMED, "dimension 0 of size 8", "num_heads=3"],
    ),
    "indivisible by head_dim": (
        one("AttentionHeadGrouperDim1", head_dim=5),
        ValueError,
        [NAMED, "dimension 1 of size 8", "head_dim=5"],
    ),
    "indivisible by block * tiles": (one("AxisGrouper", axis=1, block=2, tiles=3), ValueError, [NAMED, "size 8", "6"]),
    "heads on rank 3": (one("AttentionHeadGrouperDim1", (4, 4, 4), head_dim=2), ValueError, [NAMED, "(4, 4, 4)"]),
    "conv filters of a matrix": (one("ConvFilterGrouper"), ValueError, [NAMED, "(8, 8)"]),
    "columns of a vector": (one("Dim1Grouper", (8,)), ValueError, [NAMED, "(8,)"]),
    "head columns of a vector": (one("AttentionHeadGrouperDim1", (8,), head_dim=2), ValueError, [NAMED, "(8,)"]),
    "axis 5": (one("AxisGrouper", axis=5), ValueError, [NAMED, "axis 5", "(8, 8)"]),
    "axis -3": (one("AxisGrouper", axis=-3), ValueError, [NAMED, "axis -3", "(8, 8)"]),
    "start_dim 4": (one("Dim0Grouper", (2, 2, 2), start_dim=4), ValueError, [NAMED, "start_dim 4", "(2, 2, 2)"]),
    "start_dim after end_dim": (
        one("Dim0Grouper", (2, 2, 2), start_dim=2, end_dim=1),
        ValueError,
        [NAMED, "start_dim 2", "end_dim 1"],
    ),
    "k elements of three groups": (
        one("KElementGrouper", (2, 2, 2, 2), k=2, start_dim=2),
        ValueError,
        [NAMED, "(2, 2, 2, 2)", "3 groups"],
    ),
    "channel counts differ": (
        lambda: [dim0(weight(8, 2), name="w"), dim0(weight(8)), Member(weight(2, 6), "Dim1Grouper", name="odd")],
        ValueError,
        ["parameter 'w' has 8", "member 1 of shape (8,) has 8", "parameter 'odd' has 6"],
    ),
    "no channels": (of(lambda: torch.empty(0, 4)), ValueError, [NAMED, "0 channels"]),
    "no channels in an empty range": (of(lambda: weight(4, 4), rows=(2, 2)), ValueError, [NAMED, "0 channels"]),
    "int64": (of(lambda: torch.ones(4, 4, dtype=torch.int64)), ValueError, [NAMED, "torch.int64"]),
    "bool tensor": (of(lambda: torch.ones(4, dtype=torch.bool)), ValueError, [NAMED, "torch.bool"]),
    "complex": (of(lambda: torch.ones(4, dtype=torch.complex64)), ValueError, [NAMED, "torch.complex64"]),
    "float8": (of(lambda: torch.ones(4).to(torch.float8_e4m3fn)), ValueError, [NAMED, "torch.float8_e4m3fn"]),
    "meta": (of(lambda: torch.ones(4, device="meta")), ValueError, [NAMED, "meta"]),
    "meta beside cpu": (
        lambda: [dim0(weight(4)), dim0(torch.ones(4, device="meta"))],
        ValueError,
        ["member 1 of shape (4,)", "meta"],
    ),
    "sparse": (of(lambda: torch.eye(4).to_sparse()), ValueError, [NAMED, "torch.sparse_coo"]),
    "quantized": (of(quantized), ValueError, [NAMED, "torch.qint8"]),
    "expanded": (of(lambda: weight(4, 1).expand(4, 4)), ValueError, [NAMED, "(1, 0)"]),
    "unfolded with overlap": (of(lambda: weight(9).unfold(0, 3, 2)), ValueError, [NAMED, "(2, 1)"]),
    "as_strided with overlap": (of(lambda: weight(9).as_strided((3, 3), (2, 2))), ValueError, [NAMED, "(2, 2)"]),
    "inference tensor": (of(inference_tensor), ValueError, [NAMED, "inference"]),
    "slice of a parameter": (of(lambda: nn.Parameter(weight(8, 4))[:4]), ValueError, [NAMED, "narrow="]),
    "weight_norm": (
        of(lambda: parametrizations.weight_norm(nn.Linear(4, 4)).weight),
        ValueError,
        [NAMED, "re-parametrized"],
    ),
    "torch.nn.utils.prune": (of(under_prune), ValueError, [NAMED, "re-parametrized"]),
    "lazy": (of(lambda: nn.LazyLinear(4).weight), ValueError, [NAMED, "lazy"]),
    "lazy without a name": (lambda: [dim0(nn.LazyLinear(4).weight)], ValueError, ["member 0", "lazy"]),
    "DeepSpeed placeholder": (of(placeholder), ValueError, [NAMED, "DeepSpeed"]),
    "freed storage": (of(freed), ValueError, [NAMED, "storage"]),
    "negative bit": (of(lambda: torch._neg_view(weight(4, 4))), ValueError, [NAMED, "negative bit"]),
    "zero tensor": (of(lambda: torch._efficientzerotensor((4, 4))), ValueError, [NAMED, "zero tensor"]),
    "nested": (
        of(lambda: torch.nested.nested_tensor([weight(2, 3), weight(1, 3)], layout=torch.jagged)),
        TypeError,
        [NAMED, "NestedTensor"],
    ),
    "nested, old layout": (
        of(lambda: torch.nested.nested_tensor([weight(2, 3), weight(1, 3)])),
        ValueError,
        [NAMED, "nested"],
    ),
    "fake": (of(lambda: FakeTensorMode().from_tensor(weight(4, 4))), ValueError, [NAMED, "fake"]),
    "scalar": (of(lambda: torch.tensor(1.0)), ValueError, [NAMED, "scalar"]),
    "wrapper subclass": (of(two_tensor), TypeError, [NAMED, "TwoTensor"]),
    "rows and narrow": (of(lambda: weight(4, 4), rows=(0, 2), narrow=(0, 0, 2)), TypeError, [NAMED, "rows", "narrow"]),
    "rows past the end": (of(lambda: weight(4, 4), rows=(2, 5)), ValueError, [NAMED, "2:5", "size 4"]),
    "rows from the end": (of(lambda: weight(4, 4), rows=(-2, 4)), ValueError, [NAMED, "-2:4", "size 4"]),
    "rows backwards": (of(lambda: weight(4, 4), rows=(3, 1)), ValueError, [NAMED, "3:1"]),
    "rows of floats": (of(lambda: weight(4, 4), rows=(0, 2.0)), TypeError, [NAMED, "(0, 2.0)"]),
    "rows of bools": (of(lambda: weight(4, 4), rows=(False, True)), TypeError, [NAMED, "(False, True)"]),
    "three rows": (of(lambda: weight(4, 4), rows=(0, 1, 2)), TypeError, [NAMED, "(0, 1, 2)"]),
    "rows as a number": (of(lambda: weight(4, 4), rows=2), TypeError, [NAMED, "rows=(start, stop)", "2"]),
    "narrow past the last dimension": (of(lambda: weight(4, 4), narrow=(2, 0, 1)), ValueError, [NAMED, "dimension 2"]),
    "nobody votes": (of(lambda: weight(4, 4), scored=False), ValueError, ["scored=False"]),
    "scored is not a bool": (of(lambda: weight(4, 4), scored="no"), TypeError, [NAMED, "scored", "'no'"]),
}


SETTINGS = [
    ("min_sparsity", -0.1, ValueError),
    ("min_sparsity", 1.1, ValueError),
    ("min_sparsity", NAN, ValueError),
    ("min_sparsity", INF, ValueError),
    ("min_sparsity", "0.5", TypeError),
    ("min_sparsity", True, TypeError),
    ("min_sparsity", None, TypeError),
    ("score_type", "l1", ValueError),
    ("score_type", None, ValueError),
    ("keep_multiple_of", 0, ValueError),
    ("keep_multiple_of", -1, ValueError),
    ("keep_multiple_of", 1.5, TypeError),
    ("keep_multiple_of", True, TypeError),
]


def good(key, *shape):
    return Cluster(key, [dim0(weight(*shape))], 0.5)


def refused_in_a_call(bad, error, words):
    """`bad` was valid when it was built; now it comes last, after clusters that are fine."""
    clusters = [good("first", 8, 4), good("second", 6), bad]
    for call in (prune_, explain, lambda c: prune_(c, path="reference"), lambda c: apply_masks_(c, {"first": [0]})):
        refused(lambda call=call: call(clusters), error, words, tensors_of(clusters))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "error", "words"), MEMBERS.values(), ids=MEMBERS)
def test_invalid_members(make, error, words):
    members = make()
    words = ["cluster 'bad'", *words]
    tensors = [getattr(member, "parameter", member) for member in members]
    refused(lambda: Cluster("bad", members, 0.5), error, words, tensors)
    cluster = good("bad", 4, 4)
    cluster.members = members
    refused_in_a_call(cluster, error, words)


@pytest.mark.parametrize(("name", "value", "error"), SETTINGS)
def test_invalid_settings(name, value, error):
    words = ["cluster 'bad'", name, repr(value)]
    member = dim0(weight(4, 4))
    settings = {"min_sparsity": 0.5, name: value}
    refused(lambda: Cluster("bad", [member], **settings), error, words, [member.parameter])
    cluster = good("bad", 4, 4)
    setattr(cluster, name, value)
    refused_in_a_call(cluster, error, words)


def test_members_are_a_list():
    """The likely slip is one member without its brackets."""
    member = dim0(weight(4))
    refused(lambda: Cluster("bad", member, 0.5), TypeError, ["cluster 'bad'", "members", "Member"], [member.parameter])


def test_the_key_is_a_string():
    member = dim0(weight(4))
    refused(lambda: Cluster(3, [member], 0.5), TypeError, ["cluster 3", "string"], [member.parameter])


@pytest.mark.parametrize(("negative", "positive"), [(-1, 2), (-2, 1), (-3, 0)])
def test_negative_axes_count_from_the_end(negative, positive):
    weights = [weight(4, 6, 8), weight(4, 6, 8)]
    pruned = [
        prune_(Cluster("c", [Member(w, "AxisGrouper", axis=axis, block=2)], 0.5))["c"].ids
        for w, axis in zip(weights, (negative, positive), strict=True)
    ]
    assert len(pruned[0]) == -(-weights[0].size(positive) // 4)  # half of the blocks of two, rounded up
    assert pruned[0] == pruned[1]
    assert torch.equal(*weights)


def test_inference_tensors_inside_inference_mode():
    with torch.inference_mode():
        tensor = torch.arange(1.0, 5).unsqueeze(1) * torch.ones(4, 4)
        assert prune_(Cluster("c", [dim0(tensor)], 0.5))["c"].ids == [0, 1]
        assert torch.equal((tensor == 0).all(1), torch.tensor([True, True, False, False]))


def no_views():
    return Cluster("odd", [dim0(weight(8, 17)[:, ::2], name="w")], 0.5)


CALLS = {
    "a tensor": (lambda c: prune_([*c, weight(4)]), TypeError, ["clusters", "Tensor"]),
    "a member": (lambda c: prune_([*c, dim0(weight(4))]), TypeError, ["clusters", "Member"]),
    "nothing iterable": (lambda c: prune_(3), TypeError, ["clusters", "int"]),
    "one key twice": (lambda c: prune_([*c, good("a", 4)]), ValueError, ["cluster 'a'", "2 times"]),
    "unknown path": (lambda c: prune_(c, path="slow"), ValueError, ["'slow'", "auto, fast, reference"]),
    "unknown path in explain": (lambda c: explain(c, path="slow"), ValueError, ["'slow'", "auto, fast, reference"]),
    "no views on the fast path": (
        lambda c: prune_([*c, no_views()], path="fast"),
        ValueError,
        ["cluster 'odd'", NAMED, "contiguous", "path='auto'"],
    ),
    "masks: unknown key": (lambda c: apply_masks_(c, {"a": [], "b": [], "x": []}), ValueError, ["'x'"]),
    "masks: missing key": (lambda c: apply_masks_(c, {"a": [0]}), ValueError, ["cluster 'b'", "no entry"]),
    "masks: past the end": (lambda c: apply_masks_(c, {"a": [0], "b": [1, 6]}), ValueError, ["cluster 'b'", "6", "5"]),
    "masks: negative": (lambda c: apply_masks_(c, {"a": [0], "b": [-1]}), ValueError, ["cluster 'b'", "-1"]),
    "masks: bool": (lambda c: apply_masks_(c, {"a": [0], "b": [True]}), TypeError, ["cluster 'b'", "True"]),
    "masks: float": (lambda c: apply_masks_(c, {"a": [0], "b": [1.0]}), TypeError, ["cluster 'b'", "1.0"]),
    "masks: str": (lambda c: apply_masks_(c, {"a": [0], "b": "12"}), TypeError, ["cluster 'b'", "'12'"]),
    "masks: not a list": (lambda c: apply_masks_(c, {"a": [0], "b": 3}), TypeError, ["cluster 'b'", "3"]),
    "masks: unknown keys of two types": (lambda c: apply_masks_(c, {1: [], "x": []}), ValueError, ["'x'"]),
    "masks: a list": (lambda c: apply_masks_(c, [[0], [1]]), TypeError, ["masks", "list"]),
    "masks: unknown path": (lambda c: apply_masks_(c, {"a": [0], "b": []}, path="x"), ValueError, ["'x'"]),
}


@pytest.mark.parametrize(("call", "error", "words"), CALLS.values(), ids=CALLS)
def test_invalid_calls(call, error, words):
    clusters = [good("a", 8, 4), good("b", 6)]
    refused(lambda: call(clusters), error, words, tensors_of(clusters))


@pytest.mark.parametrize("call", [prune_, lambda c: apply_masks_(c, {})], ids=["prune_", "apply_masks_"])
def test_no_cluster_at_all(call):
    """A schedule with nothing due is an empty step, not an error."""
    result = call([])
    assert dict(result) == {}
    assert result.parameters == []


def test_tensors_inside_a_transform_are_refused():
    weights = weight(3, 4, 5)

    def inside(x):
        with pytest.raises(ValueError, match=r"'c', parameter 'w': .* torch.func"):
            Cluster("c", [dim0(x, name="w")], 0.5)
        return x.sum()

    torch.vmap(inside)(weights)
    torch.func.grad(inside)(weights)
