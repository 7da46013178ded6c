"""What the Triton path costs and what geometry it survives, run by the interpreter."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import coupled_kernels
from benchmarks.registry import parameters
from coupled_kernels import tuning
from coupled_kernels.tuning import TileShape
from coupled_prune import Cluster, Member, apply_masks_, explain, prune_
from tests.backends import running
from tests.oracle import exact_budget
from tests.traffic import counted, sectors_of_zeros

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:cluster .*all .* channels are zeroed")


@pytest.fixture(autouse=True)
def interpreter():
    with running("tiles"):
        yield


def weight(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def layers(count, dtype=torch.float32, width=96, hidden=160, head_dim=8):
    """A small decoder: one residual stream through all layers, feed-forward channels and heads in each."""
    residual, clusters = [Member(weight(200, width, dtype=dtype), "Dim1Grouper")], []
    for i in range(count):
        q, o = weight(width, width, dtype=dtype, seed=i), weight(width, width, dtype=dtype, seed=i + 100)
        up, down = weight(hidden, width, dtype=dtype, seed=i), weight(width, hidden, dtype=dtype, seed=i)
        gain = weight(width, dtype=dtype, seed=i)
        residual += [Member(p, "Dim1Grouper") for p in (q, up)] + [Member(p, "Dim0Grouper") for p in (o, down)]
        residual += [Member(gain, "Dim0Grouper", scored=False)]
        heads = [
            Member(q, "AttentionHeadGrouperDim0", head_dim=head_dim),
            Member(o, "AttentionHeadGrouperDim1", head_dim=head_dim),
        ]
        clusters += [
            Cluster(f"heads {i}", heads, 0.25),
            Cluster(f"hidden {i}", [Member(up, "Dim0Grouper"), Member(down, "Dim1Grouper")], 0.25),
        ]
    return [Cluster("residual", residual, 0.25), *clusters]


def launches_of(call):
    before = coupled_kernels.launches()
    call()
    return coupled_kernels.launches() - before


class DeviceOperators(TorchDispatchMode):
    """Names of torch operators, and of those that make the host wait for the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frames, frame = [], sys._getframe()
        while frame := frame.f_back:
            frames.append(frame.f_code.co_filename)
        if not any(name.endswith("interpreter.py") for name in frames):  # it copies arguments to and fro
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def waiting(self):
        return [name for name in self.names if any(word in name for word in self.WAITING)]


def test_explain_says_that_the_fast_path_is_taken():
    assert {explain(c).path_of(c.key, 0) for c in layers(1)} == {"fast"}


def test_launches_do_not_grow_with_members_and_clusters():
    one, many = (launches_of(lambda n=n: prune_(layers(n))) for n in (1, 4))
    assert one == many == dict.fromkeys(["norms", "fold_lanes", "fold_channels", "select", "account", "mask_any"], 1)


def test_every_class_stays_within_twelve_launches():
    """Aligned and unaligned tensors, wide and tall ones, a recount: the worst that one dtype can do."""
    unaligned = weight(64, 97)
    clusters = [
        *layers(1),
        Cluster("unaligned", [Member(unaligned, "Dim1Grouper")], 0.5),
        Cluster("unaligned rows", [Member(unaligned, "Dim0Grouper")], 0.5),
        Cluster("tall", [Member(weight(500, 12), "Dim0Grouper")], 0.5),
        Cluster("tall columns", [Member(weight(500, 9), "Dim1Grouper")], 0.5),
        Cluster("part", [Member(weight(64, 128), "Dim0Grouper", rows=(8, 40))], 0.5),
    ]
    assert sum(launches_of(lambda: prune_(clusters)).values()) <= 2 * 12


def test_operators_do_not_grow_and_none_waits_for_the_device():
    counts = []
    for n in (1, 3):
        clusters = layers(n)
        prune_(clusters)  # uploads the tables
        with DeviceOperators() as operators:
            result = prune_(clusters)
        counts.append(len(operators.names))
        assert operators.waiting == []
        assert not any("_to_copy" in name or "copy_" in name for name in operators.names)
        with DeviceOperators() as reading:
            assert result["residual"].zero_channels == 24
        assert reading.waiting
    assert counts[0] == counts[1] <= 12


def test_tables_are_uploaded_again_only_when_something_moved():
    clusters = layers(1)
    prune_(clusters)
    with DeviceOperators() as operators:
        prune_(clusters)
    unchanged = len(operators.names)
    clusters[0].members[0].parameter.data = clusters[0].members[0].parameter.clone()
    with DeviceOperators() as operators:
        prune_(clusters)
    assert len(operators.names) > unchanged


def test_memory_that_is_read_as_another_dtype_is_another_plan():
    """Same address, same shape: half-precision views of one storage must not find each other's tables."""
    one_place = torch.zeros(8, 16, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        memory = weight(8, 16, dtype=dtype).view(torch.int16)
        shared = one_place.copy_(memory).view(dtype)
        result = prune_(Cluster("c", [Member(shared, "Dim0Grouper")], 0.5))["c"]
        assert (
            result.ids == prune_(Cluster("c", [Member(memory.view(dtype), "Dim0Grouper")], 0.5), "reference")["c"].ids
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_each_weight_once_and_writes_chosen_sectors(dtype, monkeypatch):
    """Crossing clusters are read once; besides, only what two masks share is looked at."""
    clusters = [
        Cluster("residual", [Member(weight(1024, 512, dtype=dtype), "Dim1Grouper")], 0.25),
        Cluster("writer", [Member(weight(512, 1024, dtype=dtype, seed=1), "Dim0Grouper")], 0.25),
    ]
    up = weight(1024, 1024, dtype=dtype, seed=2)
    clusters += [
        Cluster("hidden", [Member(up, "Dim0Grouper")], 0.25),
        Cluster("stream", [Member(up, "Dim1Grouper")], 0.25),
    ]
    weights = parameters(clusters)
    size = sum(w.numel() * w.element_size() for w in weights)
    with counted(monkeypatch, weights) as traffic:
        result = prune_(clusters)
    crossing = result["hidden"].zero_channels * result["stream"].zero_channels * up.element_size()
    assert traffic.bytes["load", "weights"] == size + crossing
    assert traffic.bytes["load", "weights"] <= 1.05 * size
    chosen = sum((w == 0).sum().item() for w in weights) * up.element_size()
    assert traffic.bytes["store", "weights"] == chosen
    assert traffic.sectors_stored == sum(map(sectors_of_zeros, weights))
    assert traffic.bytes["store", "workspace"] <= 0.03 * size + 64 * sum(c.channels for c in result.values())


def step_of(clusters):
    from coupled_kernels.gpu import GpuStep
    from coupled_prune.plan import build_plan

    plan = build_plan(clusters)
    return plan, GpuStep(plan.pieces, plan.fillers, plan.parameters, plan.segments, plan.pools)


@pytest.mark.parametrize(
    ("dtype", "size", "axes", "limit"),
    [
        (torch.bfloat16, 1024, 1, 0.015),
        (torch.bfloat16, 1024, 2, 0.030),
        (torch.bfloat16, 2048, 2, 0.020),
        (torch.bfloat16, 4096, 2, 0.016),
        (torch.float32, 1024, 2, 0.015),
        (torch.float32, 4096, 2, 0.008),
    ],
)
def test_workspace_is_a_small_share_of_the_weights(dtype, size, axes, limit):
    """Tables, partial sums and counts of square matrices of a million elements and more; lanes on one axis or both."""
    matrix = torch.empty(size, size, dtype=dtype)
    clusters = [Cluster(str(axis), [Member(matrix, "AxisGrouper", axis=axis)], 0) for axis in range(axes)]
    assert step_of(clusters)[1].workspace <= limit * matrix.nbytes


@pytest.mark.parametrize(("shape", "grouper"), [((1 << 19,), "LayerGrouper"), ((4, 1 << 17), "Dim0Grouper")])
def test_long_rows_are_summed_side_by_side(shape, grouper):
    """One lane of millions of elements would be one chain of additions over thousands of tiles."""
    from coupled_kernels.tiles import build_tables

    fast, slow = weight(*shape), weight(*shape)
    result = prune_(Cluster("c", [Member(fast, grouper)], 0.5))["c"]
    expected = prune_(Cluster("c", [Member(slow, grouper)], 0.5), "reference")["c"]
    torch.testing.assert_close(result.scores, expected.scores, rtol=1e-6, atol=0)
    assert torch.equal(fast, slow)
    plan, _ = step_of([Cluster("c", [Member(fast, grouper)], 0)])
    tables = build_tables(plan.pieces, plan.fillers, plan.parameters, plan.segments, plan.pools)
    assert max(run.partials for run in tables.lane_runs) <= 64
    assert sum(len(tiles) for tiles in tables.row_tiles.values()) <= 64


def test_masks_with_budgets_on_the_device():
    """Budgets are device values: a captured graph, or whoever holds the tensor, changes them between runs."""
    plan, step = step_of(layers(1))
    budgets = torch.tensor([0, 3, 5])
    scores = step.measure()
    for ks in ([0, 3, 5], [96, 0, 7], [1, 12, 160]):
        budgets.copy_(torch.tensor(ks))
        chosen = step.select(scores, budgets)
        assert [int(chosen[s.slice].sum()) for s in plan.segments] == ks


def test_a_view_that_spans_more_than_two_to_the_31_elements():
    """Offsets that wrap in 32 bits read and write backwards, silently (megablocks 185, triton 1058 and 5022).

    Pages that are never touched cost nothing, so a matrix of 6 rows, 2**29 elements apart, fits in memory.
    """
    stride = 2**29
    memory = torch.empty(5 * stride + 64, dtype=torch.float16)
    rows = memory.as_strided((6, 64), (stride, 1))
    rows.copy_(torch.arange(6.0, 0, -1)[:, None].expand(6, 64))
    guard = memory[stride * 5 - 64 : stride * 5]
    guard.fill_(3)
    result = prune_(
        [Cluster("rows", [Member(rows, "Dim0Grouper")], 0.5), Cluster("c", [Member(rows, "Dim1Grouper")], 0)]
    )
    assert result["rows"].ids == [3, 4, 5]
    assert (rows[:3] != 0).all()
    assert not rows[3:].any()
    assert (guard == 3).all()
    assert result.zero_elts == 3 * 64


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_first_aligned_then_not(offset, dtype):
    """A kernel compiled for aligned addresses must not meet others (triton 1330, 8885)."""
    memory = weight(1 + 40 * 72, dtype=dtype)
    matrix = memory[offset : offset + 39 * 72].view(39, 72)
    expected = copy.deepcopy(matrix)
    masks = prune_(Cluster("c", [Member(matrix, "Dim0Grouper")], 0.3)).masks()
    assert masks == prune_(Cluster("c", [Member(expected, "Dim0Grouper")], 0.3), "reference").masks()
    assert torch.equal(matrix, expected)


SHAPES = {
    "one row": (1, 700),
    "one column": (700, 1),
    "one element": (1, 1),
    "odd": (37, 131),
    "row of a tile and one": (513, 5),
    "column of a tile and one": (5, 513),
    "skinny": (3000, 3),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_geometry_that_breaks_naive_kernels(shape, transposed, dtype):
    matrix = weight(*shape, dtype=dtype)
    matrix = matrix.t() if transposed else matrix
    for grouper in ("Dim0Grouper", "Dim1Grouper"):
        fast, slow = copy.deepcopy(matrix), copy.deepcopy(matrix)
        result = prune_(Cluster("c", [Member(fast, grouper)], 0.4))
        assert result.masks() == prune_(Cluster("c", [Member(slow, grouper)], 0.4), "reference").masks()
        assert torch.equal(fast, slow)
        assert result.zero_elts == int((fast == 0).sum())


def test_thousands_of_tiny_members_beside_a_large_one():
    members = [Member(weight(32, seed=i), "Dim0Grouper") for i in range(1000)]
    members.append(Member(weight(600, 32), "Dim1Grouper"))
    cluster = Cluster("c", members, 0.25)
    slow = Cluster("c", [Member(m.parameter.clone(), m.grouper) for m in members], 0.25)
    assert prune_(cluster).masks() == prune_(slow, "reference").masks()


def test_layouts_that_cross_without_a_grid_in_common_are_recounted():
    """Filters of a channels-last weight and its rows lie on different grids: zeros are counted afterwards."""
    conv = weight(6, 8, 3, 3).to(memory_format=torch.channels_last)
    conv[:, ::3] = 0
    clusters = [
        Cluster("out", [Member(conv, "AxisGrouper", axis=0)], 0.5),
        Cluster("in", [Member(conv, "AxisGrouper", axis=1)], 0.25),
    ]
    counts = launches_of(lambda: clusters.append(prune_(clusters)))
    result = clusters.pop()
    assert counts["count"] == 1
    assert result.zero_elts == int((conv == 0).sum())


@pytest.mark.parametrize("tile", [TileShape(16, 16, 4, 1), TileShape(64, 128, 8, 1), TileShape(512, 512, 4, 1)])
def test_any_tile_size_keeps_ties(tile):
    """Identical channels tie exactly whatever the tiles are, and repeated runs agree in every bit."""
    column = weight(200, 1)
    matrix = column.expand(200, 90).clone()
    with tuning.override(wide=tile, tall=tile):
        first, second = (prune_(Cluster("c", [Member(matrix.clone(), "Dim1Grouper")], 0.5))["c"] for _ in range(2))
    assert first.scores.unique().numel() == 1
    assert torch.equal(first.scores, second.scores)
    assert first.ids == list(range(45))


@pytest.mark.parametrize("channels", [1, 2, 127, 128, 129, 1023, 1024, 1025, 5000])
def test_selection_at_any_length(channels):
    scores = torch.randint(0, 50, (channels,), generator=torch.Generator().manual_seed(channels)).float()
    weights = scores.clone()
    expected = torch.sort(scores.square(), stable=True).indices[: exact_budget(0.3, channels)]
    result = prune_(Cluster("c", [Member(weights, "Dim0Grouper")], 0.3))["c"]
    assert result.ids == sorted(expected.tolist())


def test_stored_masks():
    clusters = layers(1)
    twin = copy.deepcopy(clusters)
    masks = prune_(clusters).masks()
    again = apply_masks_(twin, masks)
    assert again.masks() == masks
    assert all(torch.equal(a, b) for a, b in zip(parameters(clusters), parameters(twin), strict=True))


def test_writes_are_told_to_autograd():
    weights = weight(8, 64).requires_grad_()
    loss = (weights * weights).sum()
    prune_(Cluster("c", [Member(weights, "Dim0Grouper")], 0.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
