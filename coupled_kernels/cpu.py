"""The CPU path: squared norms, zero counts and writes on views, in cache-sized blocks.

In: pieces and the tensors they point into. Out: scores (`measure`), chosen channels (`select`), and
counts of zeros (`write`). A block is squared into a buffer that stays in cache; everything after that
one read of the weights works on the buffer. Large weights are shared out among threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from coupled_kernels.lowest import lowest
from coupled_kernels.pieces import Piece, Segment

# Elements of a block: 1 MiB of float32 squares; two of them stay in the second-level cache of a core.
BLOCK = 1 << 18
# Extent of a block along the summed dimension, by axis: columns need few rows to fill a block, rows
# need runs of columns that vectorize.
DEPTH = (512, 128)
# Elements of the part of a matrix that one thread measures at a time: a few milliseconds of work.
PART = 1 << 22
# More threads wait for memory and for Python's lock, and each has two blocks of workspace.
MAX_THREADS = 16
# A channel's float32 sum is a square, a chain over 4 blocks and 3 halvings, then float64, then the
# final rounding: at most 8 roundings, 4.8e-7, half of what the contract lets two channels differ by.
CHAIN = 4
FLOAT32_HALVINGS = 3

T = TypeVar("T")
R = TypeVar("R")

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class CpuStep:
    """One step over all clusters of a plan, on CPU tensors."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        fillers: Sequence[Piece],
        tensors: Sequence[Tensor],
        segments: Sequence[Segment],
        pools: Sequence[Segment],
    ) -> None:
        self.pieces, self.fillers, self.pools = pieces, fillers, pools
        self.tensors = tensors
        self.channels = sum(segment.channels for segment in segments)

    def measure(self) -> Tensor:
        """Sum of squares of every channel, float64 (channels,); also counts literal zeros."""
        scores = torch.zeros(self.channels, dtype=torch.float64, device="cpu")
        self.zeros = [0] * len(self.tensors)
        self.unknown = [tensor.numel() for tensor in self.tensors]  # elements that no piece counts
        pieces = [*self.pieces, *self.fillers]
        parts = [_parts(piece.view.of(self.tensors[piece.tensor]), piece.view.axis) for piece in pieces]
        work = [(piece, part) for piece, cut in zip(pieces, parts, strict=True) for part in cut]
        measured = iter(_in_threads(_measure, work, [part.numel() for _, part in work]))
        # Sums are added in the order of the parts, whichever thread made them.
        for piece, cut in zip(pieces, parts, strict=True):
            channels = piece.view.lane_channels().add_(piece.base) if piece.scored else None
            own = list(itertools.islice(measured, len(cut)))
            if channels is not None:
                by_lanes = sum(sums.numel() for sums, _ in own) == len(channels)
                for sums in [torch.cat([sums for sums, _ in own])] if by_lanes else [sums for sums, _ in own]:
                    scores.index_add_(0, channels, sums)
            if piece.counted:
                self.zeros[piece.tensor] += sum(zeros for _, zeros in own)
            if piece.counted:
                self.unknown[piece.tensor] -= piece.view.numel
        return scores

    def select(self, scores: Tensor, budgets: Sequence[int]) -> Tensor:
        """Mask, bool (channels,), of the lowest scores of each pool, as many as `budgets` says."""
        chosen = torch.zeros(self.channels, dtype=torch.bool, device="cpu")
        for pool, k in zip(self.pools, budgets, strict=True):
            chosen[pool.slice] = lowest(scores[pool.slice].to(pool.dtype), k)
        return chosen

    def write(self, chosen: Tensor, zeros_out: Tensor) -> None:
        """Set chosen channels (bool (channels,)) to +0.0; adds each tensor's literal zeros to `zeros_out`, int64."""
        by_tensor: dict[int, list[Piece]] = {}
        # Columns first: where masks cross, looking for zeros along whole rows afterwards is the cheaper way.
        for piece in sorted(self.pieces, key=lambda piece: -piece.view.axis):
            by_tensor.setdefault(piece.tensor, []).append(piece)
        sizes = [self.tensors[tensor].numel() for tensor in by_tensor]
        newly_zero = _in_threads(lambda item: self._write(*item, chosen), list(by_tensor.items()), sizes)
        zeros = list(self.zeros)
        for tensor, new in zip(by_tensor, newly_zero, strict=True):
            zeros[tensor] += new
        zeros_out += torch.tensor(zeros, dtype=torch.int64, device="cpu")

    def scale(self, factors: Tensor) -> None:
        """Multiply the elements of channel `c` by `factors[c]`, float64 (channels,), in the cluster's dtype."""

        def scale_piece(piece: Piece) -> None:
            lanes = factors[piece.view.lane_channels().add_(piece.base)].to(piece.dtype)
            matrix = piece.view.of(self.tensors[piece.tensor])
            matrix.mul_(lanes if piece.view.axis else lanes.unsqueeze(1))
            matrix.index_fill_(piece.view.axis, (lanes == 0).nonzero().squeeze(1), 0)  # -1 * 0 and NaN * 0 are not +0

        _in_threads(scale_piece, self.pieces, [piece.view.numel for piece in self.pieces])

    def _write(self, tensor: int, pieces: Sequence[Piece], chosen: Tensor) -> int:
        """Write all masks of one tensor; returns how many elements became zero."""
        newly_zero = 0
        for piece in pieces:
            lanes = chosen[piece.view.lane_channels().add_(piece.base)]
            index = lanes.nonzero().squeeze(1)
            if index.numel():
                # Where a tensor holds no zero yet, all that is written becomes one: nothing to look at.
                look = self.zeros[tensor] + newly_zero > 0 or self.unknown[tensor] > 0
                zero_lanes = _zero_columns if piece.view.axis else _zero_rows
                newly_zero += zero_lanes(piece.view.of(self.tensors[tensor]), lanes, index, look)
        return newly_zero


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum of a matrix along `dim` in float64, by halving; overwrites `x`.

    Only whole slices are added, so every lane is summed in the same order whatever the vector width
    or the number of threads: identical lanes tie exactly, which no library reduction promises.
    """
    halvings = 0
    while x.size(dim) > 1:
        if halvings == FLOAT32_HALVINGS:
            x = x.double()
        size = x.size(dim)
        other = x.narrow(dim, (size + 1) // 2, size // 2)
        x.narrow(dim, 0, size // 2).add_(other)
        x = x.narrow(dim, 0, (size + 1) // 2)
        halvings += 1
    return x.squeeze(dim).double()


def _parts(matrix: Tensor, axis: int) -> tuple[Tensor, ...]:
    """`matrix` cut between rows where these are lanes, else along the summed dimension, all lanes in each part."""
    if axis == 0 and matrix.size(1) <= PART:
        return matrix.split(max(1, PART // matrix.size(1)))
    return matrix.split(max(*DEPTH, PART // matrix.size(axis)), 1 - axis)


def _in_threads(function: Callable[[T], R], work: Sequence[T], sizes: Sequence[int]) -> list[R]:
    """`function` of each item, in order, on as many threads as torch would use and there is work for.

    `sizes` says how many elements each item is about. Torch's own threads wait for each other in every
    operator, which takes many times as long where other processes want the cores; these meet once.
    """
    torch_threads = torch.get_num_threads()
    # Over small items threads would mostly wait for Python's lock.
    threads = min(torch_threads, MAX_THREADS, sum(size >= BLOCK for size in sizes))
    if threads < 2:
        return list(map(function, work))
    inference = torch.is_inference_mode_enabled()

    def call(item: T) -> R:
        with torch.inference_mode(inference):
            return function(item)

    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(call, work))
    finally:
        torch.set_num_threads(torch_threads)


def _measure(item: tuple[Piece, Tensor]) -> tuple[Tensor, int]:
    """Sums of squares of the lanes of one part of a piece (none where it does not vote), and its literal zeros."""
    piece, matrix = item
    if piece.scored:
        return _square_sums(matrix, piece.view.axis, piece.dtype, piece.counted)
    zeros = matrix.numel() - int(torch.count_nonzero(matrix)) if piece.counted else 0
    return torch.zeros(0, dtype=torch.float64, device="cpu"), zeros


def _square_sums(matrix: Tensor, axis: int, dtype: torch.dtype, counted: bool) -> tuple[Tensor, int]:
    """Sum of squares of each lane, float64 (lanes,), and the number of literal zeros if `counted`."""
    if axis == 0 and matrix.size(1) % 8 == 0 and matrix.size(1) < BLOCK:
        return _square_sums_of_rows(matrix, dtype, counted)
    sums = torch.zeros(matrix.size(axis), dtype=torch.float64, device="cpu")
    zeros = 0
    height, width = _block_shape(matrix, axis)
    total, buffer = torch.empty((2, height * width), dtype=dtype, device="cpu")
    for lanes in _cuts(matrix.size(axis), (height, width)[axis]):
        strip = matrix[:, lanes] if axis else matrix[lanes]
        blocks = strip.split((height, width)[1 - axis], 1 - axis)
        for chain in (blocks[i : i + CHAIN] for i in range(0, len(blocks), CHAIN)):
            summed = _square(chain[0], total)
            for block in chain:
                squares = summed if block is chain[0] else _square(block, buffer)
                if counted:
                    zeros += _zeros_of(block, squares)
                if squares is not summed:
                    summed.narrow(1 - axis, 0, squares.size(1 - axis)).add_(squares)
            sums[lanes] += tree_sum(summed, 1 - axis)
    return sums, zeros


def _square_sums_of_rows(matrix: Tensor, dtype: torch.dtype, counted: bool) -> tuple[Tensor, int]:
    """The same for rows of a multiple of 8 elements, which are read as they lie in memory.

    The quarters of a row are added, then the halves of that, then its elements in float64: 6 roundings to
    float32 in all. Every row is summed in the same order.
    """
    sums, zeros, width = [], 0, matrix.size(1)
    buffer = torch.empty(BLOCK, dtype=dtype, device="cpu")
    # A block short of BLOCK leaves so few elements for the last sum that torch never shares it out.
    for block in matrix.split((BLOCK - 1) // width):
        squares = _square(block, buffer)
        if counted:
            zeros += _zeros_of(block, squares)
        quarters = squares.view(-1, 4, width // 4).sum(1)
        halves = quarters[:, : width // 8].add_(quarters[:, width // 8 :])
        sums.append(halves.double().sum(1))
    return torch.cat(sums), zeros


def _zeros_of(block: Tensor, squares: Tensor) -> int:
    """Literal zeros of `block`. A vectorized minimum rules them out several times faster than they can be counted.

    Squares that underflow and NaN only lead to a needless count.
    """
    return 0 if squares.amin().item() > 0 else block.numel() - int(torch.count_nonzero(block))


def _square(block: Tensor, buffer: Tensor) -> Tensor:
    """`block` squared in the dtype of `buffer`, in its memory."""
    squares = buffer[: block.numel()].view(block.shape)
    if block.dtype == buffer.dtype:
        return torch.mul(block, block, out=squares)
    return squares.copy_(block).mul_(squares)


def _block_shape(matrix: Tensor, axis: int) -> tuple[int, int]:
    """Height and width of a block: DEPTH along the summed dimension, lanes to fill it, more depth if few."""
    rows, cols = matrix.shape
    if axis:
        width = min(cols, BLOCK // min(rows, DEPTH[1]))
        return min(rows, BLOCK // width), width
    height = min(rows, BLOCK // min(cols, DEPTH[0]))
    return height, min(cols, BLOCK // height)


def _cuts(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def _zero_rows(matrix: Tensor, lanes: Tensor, index: Tensor, look: bool) -> int:
    newly_zero = 0 if look else index.numel() * matrix.size(1)
    if look:
        for columns in _cuts(matrix.size(1), BLOCK):
            strip = matrix[:, columns]
            for chosen in index.split(max(1, BLOCK // strip.size(1))):
                newly_zero += int(torch.count_nonzero(strip.index_select(0, chosen)))
    matrix.index_fill_(0, index, 0)
    return newly_zero


def _zero_columns(matrix: Tensor, lanes: Tensor, index: Tensor, look: bool) -> int:
    newly_zero = 0 if look else index.numel() * matrix.size(0)
    # Clearing bits streams through memory and, unlike a product, makes +0.0 of NaN and of -1.0 and
    # leaves every kept bit alone.
    bits = matrix.view(_BITS[matrix.element_size()])
    keep = lanes.to(bits.dtype) - 1
    for block in bits.split(max(1, BLOCK // matrix.size(1))):
        if look:
            newly_zero += int(torch.count_nonzero(block.view(matrix.dtype).index_select(1, index)))
        block.bitwise_and_(keep)
    return newly_zero
