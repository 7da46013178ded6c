"""Who may claim which elements: no element twice along one axis, no memory under two tensor objects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coupled_prune import Cluster, Member, explain, prune_
from tests import oracle
from tests.refusals import dim0, refused, tensors_of, weight


def heads(tensor, **options):
    return Member(tensor, "AttentionHeadGrouperDim0", head_dim=2, **options)


def cols(tensor, **options):
    return Member(tensor, "Dim1Grouper", **options)


TIED = "Tied weights"


MEMORY = "shares memory"


CLAIMS = {
    "rows twice": (lambda w: [dim0(w, name="w"), dim0(w, name="tied")], TIED, ["'w'", "'tied'"]),
    "rows without a vote": (lambda w: [dim0(w), dim0(w, scored=False)], TIED, ["member 0", "member 1"]),
    "overlapping ranges": (lambda w: [dim0(w, rows=(0, 4)), dim0(w, rows=(3, 7))], TIED, ["member 0", "member 1"]),
    "a range in the whole": (
        lambda w: [Member(w, "AxisGrouper", axis=0, block=2), dim0(w, rows=(2, 6))],
        TIED,
        ["member 0", "member 1"],
    ),
    "rows and heads": (
        lambda w: [Member(w, "AxisGrouper", axis=0, tiles=2), heads(w)],
        TIED,
        ["member 0", "member 1"],
    ),
    "elements and columns": (
        lambda w: [Member(w, "ElemGrouper", narrow=(0, 1, 2)), cols(w)],
        TIED,
        ["member 0", "member 1"],
    ),
    "a new parameter over the data": (
        lambda w: [dim0(w), dim0(nn.Parameter(w.data))],
        MEMORY,
        ["member 0", "member 1"],
    ),
    "the transposed data": (
        lambda w: [dim0(w, name="embedding"), cols(nn.Parameter(w.data.t()), name="head")],
        MEMORY,
        ["'embedding'", "'head'"],
    ),
    "a view": (lambda w: [dim0(w), dim0(w.detach().view(8, 2, 4))], MEMORY, ["member 0", "member 1"]),
    "a slice of the rest": (lambda w: [dim0(w), dim0(w.detach()[:, 3:4])], MEMORY, ["member 0", "member 1"]),
    "slices with a common column": (
        lambda w: [dim0(w.detach()[:, :5]), dim0(w.detach()[:, 4:])],
        MEMORY,
        ["member 0", "member 1"],
    ),
    "bits of another dtype": (
        lambda w: [dim0(w), dim0(w.detach().view(torch.bfloat16))],
        MEMORY,
        ["member 0", "member 1"],
    ),
}


@pytest.mark.parametrize("clusters", [1, 2])
@pytest.mark.parametrize(("make", "hint", "words"), CLAIMS.values(), ids=CLAIMS)
def test_elements_claimed_twice(make, hint, words, clusters):
    """Within one cluster, and between two clusters of one call."""
    members = make(nn.Parameter(weight(8, 8)))
    tensors = [member.parameter for member in members]
    if clusters == 1:
        refused(lambda: Cluster("bad", members, 0.5), ValueError, ["cluster 'bad'", hint, *words], tensors)
        return
    members[1].scored = True  # alone in its cluster, where somebody has to vote
    both = [Cluster("one", members[:1], 0.5), Cluster("two", members[1:], 0.5)]
    # Unnamed, each is member 0 of its own.
    words = ["cluster 'one'", "cluster 'two'", hint, *(word for word in words if not word.startswith("member"))]
    for call in (prune_, explain):
        refused(lambda call=call: call(both), ValueError, words, tensors)


def test_rows_and_heads_of_one_tensor_in_two_clusters():
    """Channels of other sizes along the same axis still share elements."""
    tensor = weight(8, 8)
    clusters = [Cluster("rows", [dim0(tensor)], 0.5), Cluster("heads", [heads(tensor)], 0.5)]
    refused(lambda: prune_(clusters), ValueError, ["cluster 'rows'", "cluster 'heads'", TIED], [tensor])


ACCEPTED = {
    "a square weight on both axes": lambda w: [dim0(w), cols(w)],
    "disjoint row ranges": lambda w: [dim0(w, rows=(0, 4)), dim0(w, rows=(4, 8))],
    "disjoint column ranges": lambda w: [cols(w, narrow=(1, 0, 4)), cols(w, narrow=(-1, 4, 8))],
    "contiguous halves": lambda w: [dim0(w.detach()[:4]), dim0(w.detach()[4:])],
    "column halves, interleaved in memory": lambda w: [dim0(w.detach()[:, :4]), dim0(w.detach()[:, 4:])],
    "every second column": lambda w: [dim0(w.detach()[:, ::2]), dim0(w.detach()[:, 1::2])],
    "as_strided without overlap": lambda w: [dim0(w.detach().as_strided((2, 3), (3, 2)))],
    "unfold without overlap": lambda w: [dim0(w.detach().flatten().unfold(0, 4, 4))],
    "requires_grad and a leaf": lambda w: [dim0(w)],
}


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("make", ACCEPTED.values(), ids=ACCEPTED)
def test_what_looks_similar_and_is_fine(make, path):
    cluster = Cluster("fine", make(nn.Parameter(weight(8, 8))), 0.5)
    before = [tensor.clone() for tensor in {id(t): t for t in tensors_of([cluster])}.values()]
    result = prune_(cluster, path)
    assert result["fine"].zero_channels == result["fine"].channels // 2
    oracle.check_weights(before, [cluster], result)


RANGES = st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 5), st.integers(0, 5))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(RANGES, min_size=1, max_size=6))
def test_ranges_clash_where_they_share_elements_and_an_axis(ranges):
    shared = weight(5, 5)
    clusters, clash = [], False
    taken = torch.zeros(2, 5, 5, dtype=torch.bool)
    for i, (axis, dim, a, b) in enumerate(ranges):
        start, stop = min(a, b), max(a, b)
        if axis == dim and start == stop:
            continue  # no channels
        clusters.append(Cluster(f"c{i}", [Member(shared, "AxisGrouper", axis=axis, narrow=(dim, start, stop))], 0.5))
        elements = taken[axis].narrow(dim, start, stop - start)
        clash |= bool(elements.any())
        elements.fill_(True)
    if clash:
        with pytest.raises(ValueError, match="claims elements"):
            explain(clusters)
    else:
        explain(clusters)


def test_slices_of_one_tensor_may_interleave_but_not_share_an_element():
    packed = weight(6, 12)
    slices = [packed[:, i::4] for i in range(4)]
    prune_(Cluster("c", [dim0(x) for x in slices], 0.5))
    with pytest.raises(ValueError, match=r"member 4 .* shares memory with .* member 1"):
        Cluster("c", [dim0(x) for x in [*slices, packed[:, 9:]]], 0.5)
    with pytest.raises(ValueError, match="shares memory with"):
        Cluster("c", [dim0(packed), dim0(packed.view(torch.float64))], 0.5)
