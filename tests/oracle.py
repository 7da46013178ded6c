"""A brute-force oracle: maps every element to its channel with plain indexing, in numpy and float64.

It shares nothing with the package: no views, no channel maps, no reshapes of the reference path.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import torch

ROUNDING = 1e-6


def channel_of(index, shape, grouper, arguments):
    """Channel of the element at `index` of a tensor of `shape`, as the grouper's definition says."""
    start = arguments.get("start_dim", 1) % len(shape)
    end = arguments.get("end_dim", -1) % len(shape)

    def flattened():
        if len(shape) <= 2:
            return list(index), list(shape)
        inner, size = 0, 1
        for d in range(start, end + 1):
            inner, size = inner * shape[d] + index[d], size * shape[d]
        return [*index[:start], inner, *index[end + 1 :]], [*shape[:start], size, *shape[end + 1 :]]

    if grouper == "Dim0Grouper":
        return flattened()[0][0]
    if grouper == "Dim1Grouper":
        return flattened()[0][1]
    if grouper.startswith("AttentionHead"):
        dim = int(grouper[-1])
        head_dim = arguments.get("head_dim") or shape[dim] // arguments["num_heads"]
        return index[dim] // head_dim
    if grouper == "ConvFilterGrouper":
        return index[0] * shape[1] + index[1]
    if grouper == "KElementGrouper":
        (row, col), (_, cols) = flattened() if len(shape) > 1 else ((0, index[0]), (1, shape[0]))
        return row * math.ceil(cols / arguments["k"]) + col // arguments["k"]
    if grouper == "ElemGrouper":
        return int(np.ravel_multi_index(index, shape))
    if grouper == "LayerGrouper":
        return 0
    axis, block, tiles = arguments["axis"] % len(shape), arguments.get("block", 1), arguments.get("tiles", 1)
    return index[axis] // block % (shape[axis] // (block * tiles))


def channel_ids(member):
    """int64 array of the parameter's shape: channel of each element, -1 outside the member's range."""
    shape = tuple(member.parameter.shape)
    dim, start, stop = member.range or (0, 0, shape[0])
    ids = np.full(shape, -1, dtype=np.int64)
    inner = list(shape)
    inner[dim] = stop - start
    for index in itertools.product(*map(range, inner)):
        place = list(index)
        place[dim] += start
        ids[tuple(place)] = channel_of(index, tuple(inner), member.grouper, member.arguments)
    return ids


def exact_budget(min_sparsity, channels):
    """ceil(s * C) over the rationals; a product within 1e-6 of an integer is that integer."""
    product = Fraction(min_sparsity) * channels
    nearest = round(product)
    return nearest if abs(product - nearest) <= Fraction(1, 10**6) else math.ceil(product)


def to_numpy(tensor):
    return tensor.detach().double().numpy()


def square_sums(cluster, channels):
    """Sum of squares of each channel over voting members, float64, and how many elements those are."""
    sums, elements = np.zeros(channels), np.zeros(channels, dtype=np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        for member in cluster.members:
            if member.scored:
                ids, values = channel_ids(member).ravel(), to_numpy(member.parameter).ravel()
                np.add.at(sums, ids[ids >= 0], values[ids >= 0] ** 2)
                np.add.at(elements, ids[ids >= 0], 1)
    return sums, elements


def check_choice(mask, sums, k, dtype):
    """The mask has k channels, and any other choice than the stable sort's lies within rounding."""
    mask = mask.numpy()
    assert mask.sum() == k
    with np.errstate(over="ignore"):
        ranked = sums if dtype == torch.float64 else sums.astype(np.float32).astype(np.float64)
    order = np.lexsort((np.arange(len(ranked)), np.where(np.isnan(ranked), np.inf, ranked), np.isnan(ranked)))
    expected = np.zeros(len(ranked), dtype=bool)
    expected[order[:k]] = True
    wrongly_zeroed, wrongly_kept = np.flatnonzero(mask & ~expected), np.flatnonzero(~mask & expected)
    for a, b in zip(wrongly_zeroed, wrongly_kept, strict=True):
        assert abs(sums[a] - sums[b]) <= ROUNDING * max(sums[a], sums[b]), (a, sums[a], b, sums[b])


def bits(tensor):
    """Bit patterns, so that NaN and the sign of zero compare."""
    return (
        tensor.detach()
        .contiguous()
        .view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        .numpy()
    )


def check_weights(before, clusters, result):
    """Chosen elements are +0.0, every other bit is as it was, and counts are literal zeros, each once."""
    parameters = list({id(m.parameter): m.parameter for c in clusters for m in c.members}.values())
    assert [id(p.parameter) for p in result.parameters] == [id(p) for p in parameters]
    for old, parameter, counted in zip(before, parameters, result.parameters, strict=True):
        chosen = np.zeros(tuple(parameter.shape), dtype=bool)
        for cluster in clusters:
            mask = result[cluster.key].mask.numpy()
            for member in cluster.members:
                if member.parameter is parameter:
                    ids = channel_ids(member)
                    chosen |= (ids >= 0) & mask[ids]
        np.testing.assert_array_equal(bits(parameter), np.where(chosen, 0, bits(old)))
        assert counted.zero_elts == int((to_numpy(parameter) == 0).sum())
        assert counted.numel == parameter.numel()
    assert result.zero_elts == sum(p.zero_elts for p in result.parameters)
