"""Tensors inside guarded memory, and random members of every grouper: shared by the property tests."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from coupled_prune import Member
from tests.oracle import bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["contiguous", "misaligned", "transposed", "row-strided", "every second"]
GROUPERS = [
    "Dim0Grouper",
    "Dim1Grouper",
    "AttentionHeadGrouperDim0",
    "AttentionHeadGrouperDim1",
    "ConvFilterGrouper",
    "KElementGrouper",
    "ElemGrouper",
    "LayerGrouper",
    "AxisGrouper",
]
GUARD = 7.0


class Guarded:
    """A tensor of any layout inside a larger block of memory that nobody may touch."""

    def __init__(self, shape, layout, dtype, values):
        shape = tuple(shape)
        order, pad, step, lead = list(range(len(shape))), 0, 1, 3
        if layout == "misaligned":
            lead = 1
        elif layout == "transposed":
            order.reverse()
        elif layout == "row-strided":
            pad = 3
        elif layout == "every second":
            step = 2
        strides, reach = [0] * len(shape), step
        for i, d in enumerate(reversed(order)):
            strides[d] = reach
            reach = reach * max(shape[d], 1) + (pad if i == 0 else 0)
        self.memory = torch.full((lead + reach + 5,), GUARD, dtype=dtype)
        self.tensor = self.memory.as_strided(shape, strides, lead)
        self.tensor.copy_(torch.as_tensor(values, dtype=torch.float64).view(shape))
        self._inside = torch.zeros(self.memory.shape, dtype=torch.bool)
        self._inside.as_strided(shape, strides, lead).fill_(True)

    def check_guards(self):
        outside = self.memory[~self._inside]
        assert (bits(outside) == bits(torch.full_like(outside, GUARD))).all()


def _factors(draw, number, count):
    """`count` factors whose product is `number`."""
    factors = []
    for _ in range(count - 1):
        factors.append(draw(st.sampled_from([f for f in range(1, number + 1) if number % f == 0])))
        number //= factors[-1]
    return draw(st.permutations([*factors, number]))


@st.composite
def shapes_of(draw, grouper, channels):
    """A shape with that many channels under `grouper`, and the grouper's arguments."""
    small = st.integers(1, 3)
    rest = draw(st.lists(small, max_size=3))
    if grouper == "Dim0Grouper":
        return (channels, *rest), {}
    if grouper == "Dim1Grouper":
        return (draw(st.integers(1, 5)), *_factors(draw, channels, draw(small))), {}
    if grouper.startswith("AttentionHead"):
        head_dim = draw(small)
        arguments = draw(st.sampled_from([{"head_dim": head_dim}, {"num_heads": channels}]))
        lanes = channels * head_dim
        return ((lanes, *rest) if grouper.endswith("0") else (draw(small), lanes)), arguments
    if grouper == "ConvFilterGrouper":
        return (*_factors(draw, channels, 2), *draw(st.lists(small, min_size=1, max_size=2))), {}
    if grouper == "KElementGrouper":
        rows, chunks = _factors(draw, channels, 2)
        k = draw(st.integers(1, 4))
        return (rows, chunks * k - draw(st.integers(0, k - 1))), {"k": k}
    if grouper == "ElemGrouper":
        return tuple(_factors(draw, channels, draw(st.integers(1, 4)))), {}
    if grouper == "LayerGrouper":
        return (draw(small), *rest), {}
    block, tiles = draw(small), draw(small)
    shape = rest or [1]
    axis = draw(st.integers(0, len(shape) - 1))
    shape[axis] = channels * block * tiles
    return tuple(shape), {"axis": axis - draw(st.sampled_from([0, len(shape)])), "block": block, "tiles": tiles}


SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0]


@st.composite
def values_of(draw, numel):
    """Random values; at times all alike (ties), at times with zeros, NaN and infinities."""
    kind = draw(st.sampled_from(["normal", "alike", "few", "special"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "alike":
        values.fill_(0.5)
    elif kind == "few":
        values = values.sign()
    elif kind == "special":
        for position in draw(st.lists(st.integers(0, max(numel - 1, 0)), max_size=3)):
            if numel:
                values[position] = draw(st.sampled_from(SPECIAL))
    return values


@st.composite
def members(draw, channels, dtypes=None):
    """A random member with that many channels, and the guarded memory of its parameter."""
    grouper = draw(st.sampled_from([g for g in GROUPERS if g != "LayerGrouper" or channels == 1]))
    shape, arguments = draw(shapes_of(grouper, channels))
    span = None
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        span = (dim, before, before + shape[dim])
        shape = (*shape[:dim], before + shape[dim] + after, *shape[dim + 1 :])
    dtype = draw(st.sampled_from(dtypes or DTYPES))
    guarded = Guarded(shape, draw(st.sampled_from(LAYOUTS)), dtype, draw(values_of(math.prod(shape))))
    member = Member(
        guarded.tensor, grouper, scored=draw(st.sampled_from([True, True, False])), narrow=span, **arguments
    )
    return member, guarded
