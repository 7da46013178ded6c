"""Members: one parameter, or a range of it, and the grouper that says which channels it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Range(NamedTuple):
    """Elements `start:stop` along dimension `dim` of a parameter."""

    dim: int
    start: int
    stop: int


class Member:
    """One parameter, or one contiguous range along one of its dimensions, in a cluster.

    `grouper` is the name of a grouper (or TorchAO's class of that name) and `arguments` its keyword
    arguments, e.g. `Member(q.weight, "AttentionHeadGrouperDim0", head_dim=64)`. `rows=(start, stop)`
    takes a range of dimension 0 (the query rows of a packed projection), `narrow=(dim, start, stop)`
    one of any dimension; the grouper then sees the shape of that range. A member with
    `scored=False` follows the mask without a vote. `name` appears in messages and tables.

    Nothing is checked here; `Cluster` does, where messages can name the cluster.
    """

    def __init__(
        self,
        parameter: Tensor,
        grouper: str | type,
        *,
        scored: bool = True,
        rows: Sequence[int] | None = None,
        narrow: Sequence[int] | None = None,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        self.parameter = parameter
        self.grouper = grouper.__name__ if isinstance(grouper, type) else grouper
        self.scored = scored
        self.rows = rows
        self.narrow = narrow
        self.name = name
        self.arguments = arguments

    @property
    def range(self) -> Range | None:
        """The range as it was given; `None` for the whole parameter."""
        if self.rows is not None:
            return Range(0, *self.rows)
        return None if self.narrow is None else Range(*self.narrow)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the member's own elements: what its grouper sees."""
        shape = list(self.parameter.shape)
        if self.range is not None:
            shape[self.range.dim] = self.range.stop - self.range.start
        return tuple(shape)

    @property
    def tensor(self) -> Tensor:
        """The member's own elements: an alias of the parameter or of its range."""
        if self.range is None:
            return self.parameter.detach()
        dim, start, stop = self.range
        return self.parameter.detach().narrow(dim, start, stop - start)

    def __repr__(self) -> str:
        shown = [str(self.name or tuple(self.parameter.shape)), str(self.grouper)]
        shown += [f"{key}={value!r}" for key, value in self.arguments.items()]
        shown += [f"{key}={value!r}" for key in ("rows", "narrow") if (value := getattr(self, key)) is not None]
        shown += [] if self.scored else ["scored=False"]
        return f"Member({', '.join(shown)})"
