"""prune_ against the brute-force oracle: every grouper, rank, dtype and layout, on both paths."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coupled_prune import Cluster, Member, apply_masks_, explain, prune_
from tests import oracle
from tests.backends import BACKENDS, KERNELS, TORCH, running
from tests.tensors import DTYPES, LAYOUTS, Guarded, members, values_of

TARGETS = [0.0, 0.07, 0.25, 0.3, 0.5, 0.55, 0.999, 1.0]

pytestmark = pytest.mark.filterwarnings("ignore:cluster .*all .* channels are zeroed")


def check(clusters, guards, backend):
    before = [tensor.clone() for tensor in {id(m.parameter): m.parameter for c in clusters for m in c.members}.values()]
    sums = {c.key: oracle.square_sums(c, channels_of(c))[0] for c in clusters}
    with running(backend) as path:
        result = prune_(clusters, path=path)
    for cluster in clusters:
        k = oracle.exact_budget(cluster.min_sparsity, channels_of(cluster))
        wide = any(m.parameter.dtype == torch.float64 for m in cluster.members)
        dtype = torch.float64 if wide else torch.float32
        oracle.check_choice(result[cluster.key].mask, sums[cluster.key], k, dtype)
        assert result[cluster.key].scores.dtype == dtype
        assert result[cluster.key].zero_channels == k
    oracle.check_weights(before, clusters, result)
    for guard in guards:
        guard.check_guards()
    return result


def channels_of(cluster):
    return max(int(oracle.channel_ids(m).max(initial=-1)) for m in cluster.members) + 1


@st.composite
def clusters(draw, key="c"):
    channels = draw(st.integers(1, 6))
    drawn = draw(st.lists(members(channels), min_size=1, max_size=6))
    drawn[0][0].scored = True
    target = draw(st.sampled_from(TARGETS))
    return Cluster(key, [member for member, _ in drawn], target), [guarded for _, guarded in drawn]


@st.composite
def crossing(draw):
    """Readers on columns, feed-forward channels on rows, head ranges: one tensor in several clusters."""
    rows, cols, head_dim = (draw(st.integers(1, 6)) for _ in range(3))
    dtype = draw(st.sampled_from(DTYPES))

    def guarded(*shape):
        return Guarded(shape, draw(st.sampled_from(LAYOUTS)), dtype, draw(values_of(torch.Size(shape).numel())))

    up, square, packed = guarded(rows, cols), guarded(cols, cols), guarded(3 * rows * head_dim + 2, cols)
    scored = st.booleans()
    targets = [draw(st.sampled_from(TARGETS)) for _ in range(3)]
    size = rows * head_dim
    residual = Cluster(
        "residual",
        [
            Member(up.tensor, "Dim1Grouper"),
            Member(square.tensor, "Dim0Grouper"),
            Member(square.tensor, "Dim1Grouper", scored=draw(scored)),
            Member(packed.tensor, "Dim1Grouper", scored=draw(scored)),
        ],
        targets[0],
    )
    hidden = Cluster("hidden", [Member(up.tensor, "Dim0Grouper")], targets[1])
    starts = draw(st.permutations([0, size, 2 * size]))[: draw(st.integers(1, 3))]
    heads = Cluster(
        "heads",
        [Member(packed.tensor, "AttentionHeadGrouperDim0", head_dim=head_dim, rows=(s, s + size)) for s in starts],
        targets[2],
    )
    return draw(st.permutations([residual, hidden, heads])), [up, square, packed]


@st.composite
def ranges_of_one_tensor(draw):
    """Clusters on ranges along any dimensions of one tensor: they cross, and leave parts to nobody."""
    shape = draw(st.lists(st.integers(2, 6), min_size=2, max_size=3))
    values = draw(values_of(torch.Size(shape).numel()))
    tensor = Guarded(shape, draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(DTYPES)), values)
    axes = draw(st.permutations(range(len(shape))))
    drawn = []
    for i, axis in enumerate([*axes, *axes][: draw(st.integers(2, 4))]):
        span = None
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            start = draw(st.integers(0, shape[dim] - 1))
            span = (dim, start, draw(st.integers(start + 1, shape[dim])))
        member = Member(tensor.tensor, "AxisGrouper", axis=axis, narrow=span)
        drawn.append(Cluster(f"c{i}", [member], draw(st.sampled_from(TARGETS))))
        try:
            explain(drawn)
        except ValueError as error:
            if "claims elements" not in str(error):
                raise
            drawn.pop()
    return drawn, [tensor]


INPUTS = {"one cluster": clusters().map(lambda drawn: ([drawn[0]], drawn[1])), "crossing": crossing()}
INPUTS["ranges of one tensor"] = ranges_of_one_tensor()


@pytest.mark.parametrize("backend", TORCH)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_masks_bits_and_counts(inputs, backend, data):
    check(*data.draw(inputs), backend)


@pytest.mark.parametrize("backend", [*KERNELS, "flat beside tiles"])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data())
def test_masks_bits_and_counts_of_kernels(inputs, backend, data):
    check(*data.draw(inputs), backend)


def model(dtype=torch.float32, seed=0, rows=300, channels=77, columns=1030):
    """Weights of one stream with sizes that cut blocks and vectors unevenly."""
    generator = torch.Generator().manual_seed(seed)
    reader = torch.randn(rows, channels, generator=generator).to(dtype)
    writer = torch.randn(channels, columns, generator=generator).to(dtype)
    return [reader, writer, torch.randn(channels, generator=generator).to(dtype)]


def stream(weights, target=0.3):
    reader, writer, gain = weights
    return Cluster(
        "stream", [Member(reader, "Dim1Grouper"), Member(writer, "Dim0Grouper"), Member(gain, "Dim0Grouper")], target
    )


@pytest.mark.parametrize("backend", ["cpu", *KERNELS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_identical_channels_tie_wherever_they_stand(dtype, backend):
    """A lane in the remainder of a vector or thread is summed in the same order as all others."""
    weights = model(dtype, rows=30, columns=50) if backend == "small tiles" else model(dtype)
    for weight, axis in zip(weights, (1, 0, 0), strict=True):
        weight.copy_(weight.select(axis, 0).unsqueeze(axis).expand_as(weight).clone())
    with running(backend):
        result = prune_(stream(weights, 0.5))["stream"]
    assert result.scores.unique().numel() == 1
    assert result.ids == list(range(39))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64, 127, 1000, 2049])
@pytest.mark.parametrize("channels", [1, 7, 31, 33, 129, 1000, 4097])
def test_ties_at_odd_sizes(rows, channels):
    generator = torch.Generator().manual_seed(rows)
    column = torch.randn(rows, 1, generator=generator)
    reader, writer = column.expand(rows, channels).clone(), column.t().expand(channels, rows).clone()
    for cluster in (
        Cluster("reader", [Member(reader, "Dim1Grouper")], 0.5),
        Cluster("writer", [Member(writer, "Dim0Grouper")], 0.5),
    ):
        assert prune_(cluster)[cluster.key].scores.unique().numel() == 1


@pytest.mark.parametrize("backend", ["cpu", "tiles"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_runs_are_bit_identical(dtype, backend):
    with running(backend):
        runs = [prune_(stream(model(dtype)))["stream"] for _ in range(3)]
    for run in runs[1:]:
        assert torch.equal(run.scores, runs[0].scores)
        assert run.ids == runs[0].ids


@pytest.mark.parametrize(("shape", "grouper"), [((2_000_000, 2), "Dim1Grouper"), ((2, 2_000_000), "Dim0Grouper")])
def test_long_sums_stay_within_the_agreement(shape, grouper):
    """Millions of equal addends would drift in a plain float32 chain; two channels 2e-6 apart must not swap."""
    weight = torch.full(shape, 0.1)
    (weight[:, 0] if grouper == "Dim1Grouper" else weight[0]).mul_(1 + 2e-6)
    exact = weight.double().square().sum(0 if grouper == "Dim1Grouper" else 1)
    result = prune_(Cluster("c", [Member(weight, grouper)], 0.5))["c"]
    assert result.ids == [1]
    torch.testing.assert_close(result.scores.double().square(), exact, rtol=5e-7, atol=0)


def test_threads_do_what_one_thread_does():
    """Large weights are worked on by several threads, inside torch.inference_mode too; the setting stays as it was."""
    threads = torch.get_num_threads()
    results = []
    try:
        for inference, count in ((False, 1), (False, 3), (True, 3)):
            torch.set_num_threads(count)
            with torch.inference_mode(inference):
                weights = model(rows=3000, channels=700, columns=4100)
                weights += [weight.clone() for weight in weights]
                clusters = [stream(weights[:3]), Cluster("twin", stream(weights[3:]).members, 0.6)]
                clusters.append(Cluster("rows", [Member(weights[0], "Dim0Grouper")], 0.4))
                result = prune_(clusters)
                assert torch.get_num_threads() == count
                assert result.zero_elts == sum(int((weight == 0).sum()) for weight in weights)
                results.append((result.masks(), [result[key].scores.tolist() for key in result], result.zero_elts))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_half_precision_does_not_overflow():
    """4096 values of 30 have a square sum of 3.7e6, beyond float16; channel 1 is smaller and must go."""
    weight = torch.full((4096, 2), 30.0, dtype=torch.float16)
    weight[:, 1] = 20
    assert prune_(Cluster("c", [Member(weight, "Dim1Grouper")], 0.5))["c"].ids == [1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_infinity_are_the_last_to_go(dtype, backend):
    weight = torch.arange(1, 7, dtype=torch.float64).expand(4, 6).to(dtype).clone()
    weight[2, 0], weight[1, 1], weight[3, 2] = float("nan"), float("-inf"), float("nan")
    with running(backend) as path:
        result = prune_(Cluster("c", [Member(weight, "Dim1Grouper")], 4 / 6), path)["c"]
    assert result.ids == [1, 3, 4, 5]
    assert result.nonfinite == [0, 1, 2]
    assert torch.equal(weight[:, 1], torch.zeros(4, dtype=dtype))
    assert weight[2, 0].isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "empty",
    [(torch.empty(0, 10), "Dim1Grouper"), (torch.empty(10, 0), "Dim0Grouper"), (torch.empty(10, 0, 3), "Dim0Grouper")],
)
@pytest.mark.parametrize("alone", [True, False])
def test_empty_members(empty, alone, target, backend):
    """Every score of an empty member is zero, so alone it prunes by index."""
    others = [] if alone else [Member(torch.arange(10.0, 0, -1), "Dim0Grouper")]
    cluster = Cluster("c", [Member(*empty), *others], target, score_type="rms")
    with running(backend) as path:
        result = prune_(cluster, path)["c"]
    k = oracle.exact_budget(target, 10)
    assert result.ids == (list(range(k)) if alone else list(range(10 - k, 10)))
    assert result.scores.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("existing", [0.0, -0.0])
def test_zeros_that_were_there_are_counted_once(backend, existing):
    """Zeros in kept and in chosen channels, where two masks cross, and a second call that changes nothing."""
    weight = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    weight[::3, ::2] = existing
    both = [
        Cluster("rows", [Member(weight, "Dim0Grouper")], 0.4),
        Cluster("cols", [Member(weight, "Dim1Grouper")], 0.5),
    ]
    for _ in range(2):
        with running(backend) as path:
            result = prune_(both, path)
        assert result.zero_elts == int((weight == 0).sum())
    assert result["rows"].zero_channels == 16
    assert result["cols"].zero_channels == 15


MEETINGS = {
    "ranges of two dimensions": ((10, 10), [(1, (0, 0, 4)), (0, (1, 0, 5))]),
    "a range and the whole": ((10, 10), [(1, (0, 3, 7)), (0, None)]),
    "runs and two layouts": ((9, 4, 2), [(0, None), (1, None), (2, None)]),
    "an empty range alone": ((6, 5), [(1, (0, 2, 2))]),
    "an empty range and another": ((6, 5), [(1, (0, 2, 2)), (0, (1, 1, 3))]),
}


@pytest.mark.parametrize("backend", [*BACKENDS, "flat beside tiles"])
@pytest.mark.parametrize(("shape", "ranges"), MEETINGS.values(), ids=MEETINGS)
def test_zeros_are_counted_once_where_members_meet(shape, ranges, backend):
    """Some elements belong to several members, some to nobody, and some were zero before."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.8)
    before = [weight.clone()]
    clusters = [
        Cluster(f"c{i}", [Member(weight, "AxisGrouper", axis=axis, narrow=span)], 0.6)
        for i, (axis, span) in enumerate(ranges)
    ]
    with running(backend) as path:
        oracle.check_weights(before, clusters, prune_(clusters, path))


def test_masks_apply_to_another_copy_and_score_nothing():
    weights = model()
    dense = copy.deepcopy(weights)
    result = prune_(stream(weights))
    again = apply_masks_(stream(dense), result.masks())
    assert all(torch.equal(a, b) for a, b in zip(weights, dense, strict=True))
    assert again.zero_elts == result.zero_elts
    assert again["stream"].scores is None


@pytest.mark.parametrize("k", [1, 2, 4, 63])
def test_a_million_channels_need_no_float64_for_each(k):
    """Element-wise and small-block groupers take the path by ranges, with the same tie rule."""
    numel = 600_000 // k * k
    weight = torch.randint(1, 4, (1, numel), generator=torch.Generator().manual_seed(k)).float()
    cluster = Cluster("c", [Member(weight, "KElementGrouper", k=k)], 0.37)
    sums = weight.double().view(-1, k).square().sum(1)
    result = prune_(cluster)["c"]
    expected = torch.sort(sums, stable=True).indices[: oracle.exact_budget(0.37, numel // k)]
    assert result.ids == sorted(expected.tolist())
    assert int((weight == 0).sum()) == k * len(expected)
