"""The CPU path: squared norms, zero counts and writes on views, in cache-sized blocks.

In: `Piece`s and the tensors they point into. `measure` adds each channel's sum of squares to a
float64 score vector and counts literal zeros; `write` zeroes the chosen channels and keeps the
counts exact. A block is squared into a buffer that stays in cache; everything after that one read
of the weights works on the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from coupled_kernels.pieces import Piece

# Elements of a block: 1 MiB of float32 squares, which two cores hold in their second-level caches.
BLOCK = 1 << 18
# Columns of a block, so that it is at least 64 rows high and the float32 part of a sum is a full tree.
WIDTH = 1 << 12
# Halvings in float32: a channel's sum is off by at most 8 roundings (square, 6 halvings, the final
# one), 4.8e-7 relatively, half of what the contract allows two channels to differ.
FLOAT32_HALVINGS = 6

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def measure(pieces: Sequence[Piece], tensors: Sequence[Tensor], scores: Tensor, zeros: list[int]) -> None:
    """Add sums of squares to `scores` (float64, all clusters) and literal zeros to `zeros` (per tensor)."""
    for piece in pieces:
        matrix = piece.view.of(tensors[piece.tensor])
        if piece.scored:
            sums, found = _square_sums(matrix, piece.view.axis, piece.dtype, piece.counted)
            scores.index_add_(0, piece.view.lane_channels().add_(piece.base), sums)
            zeros[piece.tensor] += found
        elif piece.counted:
            zeros[piece.tensor] += matrix.numel() - int(torch.count_nonzero(matrix))


def write(pieces: Sequence[Piece], tensors: Sequence[Tensor], chosen: Tensor, zeros: list[int]) -> None:
    """Set every element of the chosen channels (bool, all clusters) to +0.0 and update `zeros`."""
    for piece in pieces:
        lanes = chosen[piece.view.lane_channels().add_(piece.base)]
        index = lanes.nonzero().squeeze(1)
        if index.numel():
            # Where the tensor holds no zero yet, all that is written becomes one: nothing to look at.
            newly_zero = _zero_columns if piece.view.axis else _zero_rows
            matrix = piece.view.of(tensors[piece.tensor])
            zeros[piece.tensor] += newly_zero(matrix, lanes, index, zeros[piece.tensor] > 0)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum of a matrix along `dim` in float64, by halving; overwrites `x`.

    Only whole slices are added, so every lane is summed in the same order whatever the vector width
    or the number of threads: identical lanes tie exactly, which no library reduction promises.
    """
    halvings = 0
    while x.size(dim) > 1:
        if halvings == FLOAT32_HALVINGS:
            x = x.double()
        half = (x.size(dim) + 1) // 2
        x.narrow(dim, 0, x.size(dim) - half).add_(x.narrow(dim, half, x.size(dim) - half))
        x = x.narrow(dim, 0, half)
        halvings += 1
    return x.squeeze(dim).double()


def _square_sums(matrix: Tensor, axis: int, dtype: torch.dtype, counted: bool) -> tuple[Tensor, int]:
    sums = torch.zeros(matrix.size(axis), dtype=torch.float64)
    buffer = torch.empty(min(BLOCK, matrix.numel()), dtype=dtype)
    zeros = 0
    for block, lanes in _blocks(matrix, axis):
        squares = buffer[: block.numel()].view(block.shape)
        if block.dtype == dtype:
            torch.mul(block, block, out=squares)
        else:
            squares.copy_(block).mul_(squares)
        # A vectorized minimum rules zeros out three times faster than they can be counted; squares
        # that underflow and NaN only lead to a count that was not needed.
        if counted and not squares.amin() > 0:
            zeros += block.numel() - int(torch.count_nonzero(block))
        sums[lanes] += tree_sum(squares, 1 - axis)
    return sums, zeros


def _blocks(matrix: Tensor, axis: int) -> Iterator[tuple[Tensor, slice]]:
    """Blocks of `matrix` with the lanes they hold; cuts across a lane are the same for all lanes."""
    rows, cols = matrix.shape
    width = min(cols, max(WIDTH, BLOCK // rows))
    height = min(rows, max(1, BLOCK // width))
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            block = matrix[top : top + height, left : left + width]
            yield block, slice(left, left + width) if axis else slice(top, top + height)


def _zero_rows(matrix: Tensor, lanes: Tensor, index: Tensor, look: bool) -> int:
    newly_zero = index.numel() * matrix.size(1)
    if look:
        newly_zero = 0
        for block, rows in _blocks(matrix, 0):
            newly_zero += int(torch.count_nonzero(block[lanes[rows]]))
    matrix.index_fill_(0, index, 0)
    return newly_zero


def _zero_columns(matrix: Tensor, lanes: Tensor, index: Tensor, look: bool) -> int:
    newly_zero = 0 if look else index.numel() * matrix.size(0)
    # Clearing bits streams through memory and, unlike a product, makes +0.0 of NaN and of -1.0 and
    # leaves every kept bit alone.
    bits = matrix.view(_BITS[matrix.element_size()])
    keep = lanes.to(bits.dtype) - 1
    for block, columns in _blocks(bits, 1):
        if look:
            values = block.view(matrix.dtype)[:, lanes[columns]]
            newly_zero += int(torch.count_nonzero(values))
        block.bitwise_and_(keep[columns])
    return newly_zero
