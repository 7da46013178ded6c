"""Low rank: projections of singular values, in plain torch.

In: a member with an SVD grouper, a threshold or a budget. Out: the parameter rebuilt in place from the
singular values that are left, and their number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coupled_prune.budget import budget
from coupled_prune.member import Member

# Their keyword arguments among the keys of a parameter group.
SVD_GROUPERS: dict[str, tuple[str, ...]] = {"SVDGrouper": (), "PackedSVDGrouper": ("npack", "pack_dim")}


@dataclass(frozen=True)
class Rank:
    """What is left of a matrix (or of each of `npack` packed ones) of `rows` x `cols`.

    `count` is the number of singular values that are not zero, int32 (npack,), of `values` in all.
    """

    count: Tensor
    values: int
    rows: int
    cols: int


def check_svd(member: Member, where: str) -> None:
    """Raises `ValueError` where the member's grouper makes no matrix of its parameter."""
    shape = tuple(member.parameter.shape)
    if member.grouper == "SVDGrouper":
        if sum(size > 1 for size in shape) < 2:
            raise ValueError(f"{where}: SVDGrouper needs a matrix, got shape {shape}")
        return
    npack, pack_dim = member.arguments.get("npack"), member.arguments.get("pack_dim", 0)
    if type(npack) is not int or npack < 1:
        raise ValueError(f"{where}: PackedSVDGrouper needs npack, an integer of at least 1, got {npack!r}")
    if pack_dim not in (0, 1):
        raise ValueError(f"{where}: pack_dim must be 0 or 1, got {pack_dim!r}")
    if len(shape) != 2 or shape[pack_dim] != npack * shape[1 - pack_dim]:
        raise ValueError(
            f"{where}: PackedSVDGrouper needs {npack} square matrices along dimension {pack_dim}, got shape {shape}"
        )


def shrink_ranks_(member: Member, thresholds: Tensor) -> Rank:
    """Soft-threshold the singular values: `s <- max(s - threshold, 0)`, with a threshold for each of `groups_of`."""

    def shrink(values: Tensor) -> None:
        values.sub_(thresholds.to(values.dtype).view(-1, *[1] * (values.dim() - 1))).relu_()

    return _project(member, shrink)


def limit_ranks_(member: Member, sparsity: float) -> Rank:
    """Zero the smallest `budget(sparsity, k)` of k singular values."""

    def cut(values: Tensor) -> None:
        k = values.size(-1)
        values[..., k - budget(sparsity, k) :] = 0  # they are sorted

    return _project(member, cut)


def groups_of(member: Member) -> int:
    """Number of groups with a gamma of their own: packed matrices, or the singular values of one."""
    matrix = _matrices(member)
    return matrix.size(0) if matrix.dim() > 2 else min(matrix.shape)


def _matrices(member: Member) -> Tensor:
    """The member as a matrix or a stack of packed ones: an alias where its layout allows it."""
    parameter = member.parameter.detach()
    if member.grouper == "SVDGrouper":
        squeezed = parameter.squeeze()
        return squeezed.flatten(1) if squeezed.dim() > 2 else squeezed
    packed = parameter.t() if member.arguments.get("pack_dim", 0) == 1 else parameter
    return packed.view(member.arguments["npack"], -1, packed.size(1)).squeeze()


def _project(member: Member, change: Callable[[Tensor], None]) -> Rank:
    matrix = _matrices(member)
    half = matrix.dtype in (torch.float16, torch.bfloat16)  # which the decomposition does not take
    with _deterministic():
        left, values, right = torch.linalg.svd(matrix.float() if half else matrix, full_matrices=False)
    change(values)
    rebuilt = (left * values.unsqueeze(-2)) @ right
    if member.grouper == "SVDGrouper":
        member.parameter.detach().copy_(rebuilt.view(member.parameter.shape))
    else:
        matrix.copy_(rebuilt)
    count = torch.count_nonzero(values, dim=-1).to(torch.int32).reshape(-1)
    return Rank(count, values.numel(), left.size(-2), right.size(-1))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Some solvers of GPUs give other bits from run to run unless told otherwise."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
