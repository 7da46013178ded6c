"""Clusters: which tensors share channels, as the caller says it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from coupled_prune.validate import check_cluster


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
        shown += [f"narrow={tuple(self.range)}"] if self.range else []
        shown += [] if self.scored else ["scored=False"]
        return f"Member({', '.join(shown)})"


class Cluster:
    """Members that share `channels` channels, of which the weakest are zeroed together.

    `min_sparsity` in [0, 1] is the share of channels to zero. `score_type` ("l2", "rms" or
    "param_cost") scales the scores that are reported; all three choose the same channels.
    `keep_multiple_of` rounds the number of kept channels up to a multiple.

    Raises `ValueError` or `TypeError` naming the cluster, the parameter and the value that is wrong.
    """

    def __init__(
        self,
        key: str,
        members: Iterable[Member],
        min_sparsity: float,
        *,
        score_type: str = "l2",
        keep_multiple_of: int | None = None,
    ) -> None:
        self.key = key
        self.members = list(members)
        self.min_sparsity = min_sparsity
        self.score_type = score_type
        self.keep_multiple_of = keep_multiple_of
        check_cluster(self)

    @classmethod
    def from_names(
        cls,
        model: nn.Module,
        key: str,
        patterns: Mapping[str, Any],
        min_sparsity: float,
        **settings: Any,
    ) -> Cluster:
        """Cluster from glob patterns over the names of `model.named_parameters()`.

        A pattern maps to a grouper name, to a dictionary with `"grouper"` and further arguments of
        `Member`, or to a list of these (ranges of a packed projection). `*` also matches dots. A
        parameter with several names (tied weights) is one member of a pattern that matches them.

        Raises `ValueError` for a pattern that matches no parameter.
        """
        names = list(model.named_parameters(remove_duplicate=False))
        members = []
        for pattern, value in patterns.items():
            matched: dict[int, tuple[str, Tensor]] = {}
            for name, parameter in names:
                if fnmatch.fnmatchcase(name, pattern):
                    matched.setdefault(id(parameter), (name, parameter))
            if not matched:
                raise ValueError(
                    f"cluster {key!r}: pattern {pattern!r} matches no parameter; the model has "
                    f"{', '.join(name for name, _ in names[:4])}{', ...' if len(names) > 4 else ''}"
                )
            for name, tensor in matched.values():
                for entry in value if isinstance(value, list | tuple) else [value]:
                    options = dict(entry) if isinstance(entry, Mapping) else {"grouper": entry}
                    if "grouper" not in options:
                        raise ValueError(f"cluster {key!r}: pattern {pattern!r} has no 'grouper' in {entry!r}")
                    members.append(Member(tensor, **{"name": name, **options}))
        return cls(key, members, min_sparsity, **settings)

    def __repr__(self) -> str:
        return f"Cluster({self.key!r}, {len(self.members)} members, min_sparsity={self.min_sparsity})"
