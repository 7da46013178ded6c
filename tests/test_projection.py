"""What ordinary projections ask of every backend: channels scaled, and clusters ranked in one pool."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coupled_kernels
from coupled_prune import Cluster, Member
from coupled_prune.plan import build_plan
from coupled_prune.projection import Projection
from tests.backends import BACKENDS, KERNELS, running
from tests.oracle import bits, channel_ids, exact_budget, square_sums, to_numpy
from tests.tensors import DTYPES, members
from tests.training import Stream, gradients, wrapped

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

EPSILON = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-22, torch.float64: 2**-50}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=12, derandomize=True, deadline=None)
def test_scale(backend, dtype, data):
    """Every element times the factor of its channel, rounded once; factor 0 writes +0.0; all else stays."""
    channels = data.draw(st.integers(1, 9))
    member, guarded = data.draw(members(channels, [dtype]))
    cluster = Cluster("c", [Member(member.parameter, member.grouper, narrow=member.narrow, **member.arguments)], 0.5)
    factors = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.7, 1.0]), min_size=channels, max_size=channels))
    )
    before, ids = to_numpy(member.parameter), channel_ids(member)
    zero_factor = (ids >= 0) & (factors.numpy() == 0)[ids]
    with np.errstate(invalid="ignore"):
        expected = np.where(zero_factor, 0, before * np.where(ids >= 0, factors.double().numpy()[ids], 1))
    with running(backend) as path:
        projection = Projection(build_plan([cluster], path))
        projection.measure()
        projection.scale(lambda sums: factors.double())
    np.testing.assert_allclose(to_numpy(member.parameter), expected, rtol=EPSILON[dtype], atol=1e-7)
    assert (bits(member.parameter)[zero_factor] == 0).all()
    np.testing.assert_array_equal(bits(member.parameter)[ids < 0], bits(torch.as_tensor(before).to(dtype))[ids < 0])
    assert projection.zeros.tolist() == [int((to_numpy(member.parameter) == 0).sum())]
    guarded.check_guards()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@given(data=st.data())
@settings(max_examples=12, derandomize=True, deadline=None)
def test_pools(backend, dtype, data):
    """One budget over several clusters: the lowest of all their weighted sums, earlier clusters first in a tie."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    drawn = [data.draw(members(channels, [dtype])) for channels in sizes]
    clusters = [
        Cluster(str(i), [Member(m.parameter, m.grouper, narrow=m.narrow, **m.arguments)], 0.5)
        for i, (m, _) in enumerate(drawn)
    ]
    split = data.draw(st.integers(1, len(sizes)))
    pooled = [split, *[1] * (len(sizes) - split)]
    sums = [square_sums(c, n)[0] * w for c, n, w in zip(clusters, sizes, weights, strict=True)]
    with running(backend) as path:
        projection = Projection(build_plan(clusters, path, pooled))
        projection.measure()
        projection.weigh(weights)
        ends = np.cumsum(pooled)
        pools = [list(range(end - size, end)) for end, size in zip(ends, pooled, strict=True)]
        budgets = [exact_budget(0.5, sum(sizes[i] for i in pool)) for pool in pools]
        projection.select(budgets)
        projection.write()
        masks = projection.masks()
    for pool, k in zip(pools, budgets, strict=True):
        mask = np.concatenate([masks[str(i)].numpy() for i in pool])
        scores = np.concatenate([sums[i] for i in pool])
        assert mask.sum() == k
        if np.isfinite(scores).all():
            assert scores[mask].max() <= scores[~mask].min(initial=math.inf) * (1 + 1e-6)
    for (member, guarded), mask in zip(drawn, masks.values(), strict=True):
        chosen = (ids := channel_ids(member)) >= 0
        assert not to_numpy(member.parameter)[chosen & mask.numpy()[ids]].any()
        guarded.check_guards()


def launches_of(call):
    before = coupled_kernels.launches()
    call()
    return coupled_kernels.launches() - before


PROJECTIONS = {
    "coupled": {"prox_type": "CoupledMinSparsityConstraint", "couple_key": "c"},
    "each tensor": {"prox_type": "MinSparsityConstraint"},
    "one budget": {"prox_type": "GlobalMinSparsityConstraint"},
    "group lasso": {"prox_type": "ProxGroupLasso", "reg_lambda": 0.1},
}


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_step_of_the_optimizer_has_constant_launches(projection, backend):
    """Neither parameters nor parameter groups add to them."""
    pytest.importorskip("triton")
    found = []
    for count in (1, 5):
        weights = [torch.nn.Parameter(torch.randn(6, 8)) for _ in range(2 * count)]
        shared = {**PROJECTIONS[projection], "group_type": "Dim1Grouper", "min_sparsity": 0.5}
        optimizer = wrapped(None, "plain", 0, groups=[{**shared, "params": weights}])
        with running(backend):
            gradients(weights, 0)
            found.append(launches_of(optimizer.step))
    assert found[0] == found[1]
    assert 0 < sum(found[0].values()) <= 8


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_and_cpu_take_the_same_steps(backend, projection):
    def trained(backend):
        model = Stream()
        shared = {**PROJECTIONS[projection], "min_sparsity": 0.5}
        groups = [
            {**shared, "params": [model.embed, model.up], "group_type": "Dim1Grouper"},
            {**shared, "params": [model.down], "group_type": "Dim0Grouper"},
        ]
        optimizer = wrapped(model, "sgd", 1, 4, groups=groups)
        with running(backend):
            for step in range(5):
                gradients(model.parameters(), step)
                optimizer.step()
        return [p.detach() for p in model.parameters()], optimizer.relative_sparsity

    (weights, sparsity), (expected, expected_sparsity) = trained(backend), trained("cpu")
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert sparsity == expected_sparsity
