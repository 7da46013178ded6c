"""Clusters: which tensors share channels, as the caller says it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from coupled_prune.member import Member
from coupled_prune.validate import check_cluster


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
        if isinstance(members, Member) or not isinstance(members, Iterable):
            raise TypeError(f"cluster {key!r}: members must be a list of Member, got {type(members).__name__}")
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
        if not isinstance(patterns, Mapping):
            raise TypeError(f"cluster {key!r}: patterns must map patterns to groupers, got {type(patterns).__name__}")
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
                    if "grouper" not in options or "parameter" in options:
                        raise ValueError(
                            f"cluster {key!r}: pattern {pattern!r} needs a dictionary with 'grouper' and further "
                            f"arguments of Member, got {entry!r}"
                        )
                    members.append(Member(tensor, **{"name": name, **options}))
        return cls(key, members, min_sparsity, **settings)

    def __repr__(self) -> str:
        return f"Cluster({self.key!r}, {len(self.members)} members, min_sparsity={self.min_sparsity})"
