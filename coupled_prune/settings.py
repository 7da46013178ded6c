"""Settings: from the keys of parameter groups to stages. All that can be wrong is found here.

In: parameter groups as the user wrote them, TorchAO's keys and meaning. Out: `Stages`, or one error that
names the group, the key, the value and what would be right; nothing is changed. `Settings` keeps the
stages as long as nothing they were made from has changed.
"""

from __future__ import annotations

import copy
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from coupled_prune.cluster import Cluster
from coupled_prune.groupers import GROUPERS, argument_names, layout_of
from coupled_prune.member import Member
from coupled_prune.schedule import Schedule
from coupled_prune.stages import COUPLED, PROX_TYPES, Coupled, Ordinary, Stages
from coupled_prune.svd import SVD_GROUPERS, check_svd
from coupled_prune.validate import SCORE_TYPES, check_clusters, check_member, check_memory, check_tensor

Group = Mapping[str, Any]

# Of a stage that couples, wherever it is written; grouper arguments come on top.
_REQUIRED = ("group_type", "couple_key", "min_sparsity")
_INHERITED = ("min_sparsity_schedule", "reg_lambda", "score_type")
_STAGE_KEYS = {*_REQUIRED, *_INHERITED, "prox_freq", "scored", "rows", "narrow", "keep_multiple_of"}
_GROUPER_KEYS = frozenset(key for grouper in GROUPERS for key in argument_names(grouper)) | {"npack", "pack_dim"}
# What stages are made from. Of all else in a group (lr, gamma, ...) they are independent.
_OTHERS = {"prox_type", "coupled", "gamma_index_slope", "n_nonzero", "prox_through_heal", "score_group_count_ref"}
_KEYS = _STAGE_KEYS | _GROUPER_KEYS | _OTHERS | {"param_names"}


class Settings:
    """Stages of an optimizer's parameter groups, made anew only when something has changed."""

    def __init__(self, schedule: Schedule, reg_lambda: float, latent_weights: bool) -> None:
        self.schedule, self.reg_lambda, self.latent_weights = schedule, reg_lambda, latent_weights
        self._stages: Stages | None = None

    @property
    def arguments(self) -> tuple[Schedule, float, bool]:
        """What the constructor takes."""
        return self.schedule, self.reg_lambda, self.latent_weights

    def stages(self, groups: Sequence[Group]) -> Stages:
        """Stages of `groups`. Raises `ValueError` or `TypeError` for anything invalid."""
        if self._stages is None or self._changed(groups):
            stages = resolve(groups, *self.arguments)
            self._remember(groups, stages)
            return stages
        return self._stages

    def known(self, groups: Sequence[Group]) -> Stages:
        """The stages as they were made last, without a look at what may have changed since."""
        return self._stages or self.stages(groups)

    def _remember(self, groups: Sequence[Group], stages: Stages) -> None:
        self._stages = stages
        self._keys = [tuple(group) for group in groups]
        self._relevant = [[key for key in keys if key in _KEYS] for keys in self._keys]
        self._values = [
            copy.deepcopy(self._of(group, keys)) for group, keys in zip(groups, self._relevant, strict=True)
        ]
        self._parameters = [p for group in groups if group.get("prox_type") for p in group["params"]]
        self._places = _places(self._parameters)

    def _changed(self, groups: Sequence[Group]) -> bool:
        if [tuple(group) for group in groups] != self._keys:
            return True
        for group, keys, values in zip(groups, self._relevant, self._values, strict=True):
            if keys and self._of(group, keys) != values:
                return True
        parameters = [p for group in groups if group.get("prox_type") for p in group["params"]]
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            return True
        return _places(parameters) != self._places

    @staticmethod
    def _of(group: Group, keys: Sequence[str]) -> list[Any]:
        return [group[key] for key in keys]


_shape, _requires_grad = operator.attrgetter("shape"), operator.attrgetter("requires_grad")


def _places(parameters: Sequence[Tensor]) -> list[list[Any]]:
    """Where parameters lie in memory, and how: what a plan depends on."""
    readers = (Tensor.data_ptr, Tensor.stride, _shape, _requires_grad)
    return [list(map(reader, parameters)) for reader in readers]


def resolve(groups: Sequence[Group], schedule: Schedule, reg_lambda: float, latent_weights: bool) -> Stages:
    """Stages of `groups`; `reg_lambda` is the default of groups that do not set it."""
    ordinary: list[Ordinary] = []
    coupled: dict[str, _Gathered] = {}
    for index, group in enumerate(groups):
        where = f"parameter group {index}"
        prox_type = _name_of(group.get("prox_type"))
        if not prox_type:
            for key in ("coupled", "couple_key"):
                if key in group:
                    raise ValueError(
                        f"{where} has {key!r} but no 'prox_type': a stage needs a parent projection, or "
                        f"prox_type={COUPLED!r} with its settings in the group itself"
                    )
            continue
        if prox_type not in PROX_TYPES:
            raise ValueError(f"{where}: unknown prox_type {prox_type!r}; known are {', '.join(PROX_TYPES)}")
        stages = _coupled_settings(group, prox_type, where)
        if prox_type != COUPLED:
            ordinary.append(_ordinary(index, group, prox_type, schedule, reg_lambda, where))
        for stage, stage_where in stages:
            _check_parent(group, prox_type, latent_weights, stage_where)
            gathered = _gathered(stage, schedule, index, stage_where)
            first = coupled.setdefault(gathered.key, gathered)
            _check_agreement(first, gathered)
            first.members += _members(index, group, stage, stage_where)
    clusters = [gathered for gathered in coupled.values() if gathered.members]
    resolved = Stages(tuple(ordinary), tuple(gathered.stage() for gathered in clusters))
    by_device: dict[Any, list[Cluster]] = {}
    for cluster in (stage.cluster for stage in resolved.coupled):
        by_device.setdefault(cluster.members[0].parameter.device, []).append(cluster)
    for together in by_device.values():
        check_clusters(together)
    check_memory([c for stage in ordinary for c in stage.clusters] + [stage.cluster for stage in resolved.coupled])
    return resolved


class _Gathered:
    """A cluster while its members are gathered from parameter groups."""

    def __init__(self, key: str, agreed: dict[str, Any], where: str) -> None:
        self.key, self.agreed, self.where = key, agreed, where
        self.members: list[Member] = []

    def stage(self) -> Coupled:
        settings = dict(self.agreed)
        ramped, prox_freq = settings.pop("min_sparsity_schedule"), settings.pop("prox_freq")
        return Coupled(Cluster(self.key, self.members, **settings), ramped, prox_freq)


def _coupled_settings(group: Group, prox_type: str, where: str) -> list[tuple[Group, str]]:
    """Settings of each coupled stage of a group, with what it inherits, and how messages call it."""
    if prox_type == COUPLED:
        if "coupled" in group:
            raise ValueError(f"{where} couples twice: by prox_type={COUPLED!r} and by 'coupled'; keep one of them")
        return [(group, where)]
    if "couple_key" in group:
        raise ValueError(
            f"{where}: 'couple_key' belongs into 'coupled' (a stage after {prox_type}) or beside prox_type={COUPLED!r}"
        )
    if "coupled" not in group:
        return []
    nested = group["coupled"]
    stages = list(nested) if isinstance(nested, list | tuple) else [nested]
    if not stages or not all(isinstance(stage, Mapping) for stage in stages):
        raise ValueError(f"{where}: 'coupled' must be a dictionary or a list of dictionaries, got {nested!r}")
    resolved: list[tuple[Group, str]] = []
    for number, stage in enumerate(stages):
        stage_where = f"{where}, coupled stage {number}" if len(stages) > 1 else f"{where}, coupled stage"
        for key in stage:
            if key not in _STAGE_KEYS | _GROUPER_KEYS:
                raise ValueError(f"{stage_where}: unknown key {key!r}; known are {', '.join(sorted(_STAGE_KEYS))}")
        inherited = {key: group[key] for key in _INHERITED if key in group}
        resolved.append(({**inherited, **stage}, stage_where))
    return resolved


def _check_parent(group: Group, prox_type: str, latent_weights: bool, where: str) -> None:
    if PROX_TYPES[prox_type].svd:
        raise ValueError(f"{where}: a coupled stage cannot follow a projection of singular values ({prox_type})")
    if not latent_weights and not PROX_TYPES[prox_type].hard:
        raise ValueError(
            f"{where}: {prox_type} is soft and shrinks weights again in every step; after it, a coupled stage needs "
            "latent_weights=True"
        )


def _gathered(stage: Group, schedule: Schedule, index: int, where: str) -> _Gathered:
    for key in _REQUIRED:
        if key not in stage:
            raise ValueError(f"{where}: a coupled stage needs {key!r}")
    key = stage["couple_key"]
    if not isinstance(key, str) or not key:
        raise ValueError(f"{where}: couple_key must be a string that is not empty, got {key!r}")
    where = f"{where} ({key!r})"
    if _grouper(stage, where) in SVD_GROUPERS:
        raise ValueError(f"{where}: singular values ({stage['group_type']}) cannot be coupled")
    agreed = {
        "min_sparsity": _number(stage, "min_sparsity", where, 0, 1),
        "min_sparsity_schedule": _ramped(stage, schedule, where),
        "score_type": _score_type(stage, where),
        "prox_freq": _integer(stage, "prox_freq", where, 1, 1),
        "keep_multiple_of": _integer(stage, "keep_multiple_of", where, None, 1),
    }
    _number(stage, "reg_lambda", where, 0, math.inf, 0.0)
    _flag(stage, "scored", where, True)
    return _Gathered(key, agreed, where)


def _check_agreement(first: _Gathered, other: _Gathered) -> None:
    for key, value in first.agreed.items():
        if other.agreed[key] != value:
            raise ValueError(
                f"cluster {first.key!r}: all members must agree on {key}, but {first.where} has {value!r} and "
                f"{other.where} has {other.agreed[key]!r}"
            )


def _members(index: int, group: Group, stage: Group, where: str) -> list[Member]:
    """Every parameter of a group as a member. One without gradients follows its cluster all the same."""
    grouper = _grouper(stage, where)
    options = {key: stage[key] for key in ("scored", "rows", "narrow") if key in stage}
    members = []
    for i, parameter in enumerate(group["params"]):
        member = Member(
            parameter, grouper, name=_parameter_name(group, index, i), **options, **_arguments(stage, grouper)
        )
        check_member(member, f"{where}, parameter {member.name!r}")
        members.append(member)
    return members


def _ordinary(index: int, group: Group, prox_type: str, schedule: Schedule, reg_lambda: float, where: str) -> Ordinary:
    kind = PROX_TYPES[prox_type]
    for key in ("group_type", *([kind.needs] if kind.needs else [])):
        if key not in group:
            raise ValueError(f"{where}: {prox_type} needs {key!r}")
    grouper = _grouper(group, where)
    if kind.svd != (grouper in SVD_GROUPERS):
        raise ValueError(
            f"{where}: {prox_type} works on {'singular values' if kind.svd else 'channels or elements'}, which "
            f"{grouper!r} does not make; use {' or '.join(SVD_GROUPERS) if kind.svd else 'another grouper'}"
        )
    through_heal = _flag(group, "prox_through_heal", where, prox_type == "MinRankConstraint")
    if through_heal and not kind.svd:
        raise ValueError(f"{where}: prox_through_heal=True needs an SVD grouper, got group_type={grouper!r}")
    if not kind.hard and "lr" not in group:
        raise ValueError(f"{where}: {prox_type} shrinks by the sum of learning rates, but the group has no 'lr'")
    members = [
        _ordinary_member(index, group, i, grouper, prox_type, where)
        for i, parameter in enumerate(group["params"])
        if _takes_part(parameter, f"{where}, parameter {_parameter_name(group, index, i)!r}")
    ]
    ref = _integer(group, "score_group_count_ref", where, None, 1)
    n_nonzero = _integer(group, "n_nonzero", where, 0, 0) or 0
    keep = _integer(group, "keep_multiple_of", where, None, 1)
    channels = [None if kind.svd else layout_of(m.grouper, m.shape, m.arguments) for m in members]
    if prox_type == "NMSparseConstraint":
        for member, layout in zip(members, channels, strict=True):
            if layout and n_nonzero > layout.per_channel:
                raise ValueError(
                    f"{where}, parameter {member.name!r}: n_nonzero={n_nonzero} is more than the {layout.per_channel} "
                    "elements of a group"
                )
    if prox_type == "GlobalMinSparsityConstraint" and len({m.parameter.device for m in members}) > 1:
        devices = sorted({str(m.parameter.device) for m in members})
        raise ValueError(f"{where}: one budget needs all parameters on one device, got {', '.join(devices)}")
    return Ordinary(
        group=index,
        prox_type=prox_type,
        clusters=tuple(
            Cluster(f"{where}, parameter {m.name}", [_one_channel(m) if kind.svd else m], 0.0, keep_multiple_of=keep)
            for m in members
        ),
        prox_freq=_integer(group, "prox_freq", where, 1, 1) or 1,
        reg_lambda=_number(group, "reg_lambda", where, 0, math.inf, reg_lambda),
        gamma_index_slope=_number(group, "gamma_index_slope", where, 0, math.inf, 0.0),
        min_sparsity=_number(group, "min_sparsity", where, 0, 1, 0.0),
        ramped=_ramped(group, schedule, where),
        score_type=_score_type(group, where),
        scales=tuple(math.sqrt(c.channels / ref) if c and ref else 1.0 for c in channels),
        n_nonzero=n_nonzero,
        through_heal=through_heal,
        members=tuple(members),
    )


def _takes_part(parameter: Tensor, where: str) -> bool:
    """False for a parameter that is not trained, or has no elements."""
    try:
        check_tensor(parameter)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None
    return parameter.requires_grad and parameter.numel() > 0


def _ordinary_member(index: int, group: Group, i: int, grouper: str, prox_type: str, where: str) -> Member:
    parameter, name = group["params"][i], _parameter_name(group, index, i)
    # Of a group lasso, TorchAO's ElemGrouper makes one group of the whole tensor.
    grouper = "LayerGrouper" if (prox_type, grouper) == ("ProxGroupLasso", "ElemGrouper") else grouper
    member = Member(parameter, grouper, name=name, **_arguments(group, grouper))
    where = f"{where}, parameter {name!r}"
    if grouper in SVD_GROUPERS:
        check_member(_one_channel(member), where)
        check_svd(member, where)
        return member
    check_member(member, where)
    layout = layout_of(member.grouper, member.shape, member.arguments)
    padded = layout.per_channel * layout.channels != parameter.numel()
    if padded and prox_type == "GlobalMinSparsityConstraint":
        raise ValueError(
            f"{where}: k={member.arguments['k']} does not divide its rows, and a budget over tensors cannot compare "
            "short groups; choose a k that divides them"
        )
    return member


def _one_channel(member: Member) -> Member:
    return Member(member.parameter, "LayerGrouper", name=member.name)


def _arguments(settings: Group, grouper: str) -> dict[str, Any]:
    """Grouper arguments among the keys of a group or stage."""
    names = SVD_GROUPERS[grouper] if grouper in SVD_GROUPERS else argument_names(grouper)
    return {key: settings[key] for key in names if settings.get(key) is not None}


def _parameter_name(group: Group, index: int, i: int) -> str:
    names = group.get("param_names")
    return names[i] if names else f"param_groups[{index}]['params'][{i}]"


def _name_of(value: Any) -> Any:
    """Classes, TorchAO's for instance, count as their names."""
    return value.__name__ if isinstance(value, type) else value


def _grouper(settings: Group, where: str) -> str:
    grouper = _name_of(settings["group_type"])
    if not isinstance(grouper, str):
        raise ValueError(f"{where}: group_type must be the name of a grouper, got {grouper!r}")
    return grouper


def _number(settings: Group, key: str, where: str, low: float, high: float, default: float = 0.0) -> float:
    value = settings.get(key, default)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not low <= value <= high:
        interval = f"in [{low}, {high}]" if math.isfinite(high) else f"at least {low}"
        raise ValueError(f"{where}: {key} must be a number {interval}, got {value!r}")
    return value


def _integer(settings: Group, key: str, where: str, default: int | None, low: int) -> int | None:
    value = settings.get(key, default)
    if value is None and default is None:
        return None
    if type(value) is not int or value < low:
        raise ValueError(f"{where}: {key} must be an integer of at least {low}, got {value!r}")
    return value


def _flag(settings: Group, key: str, where: str, default: bool) -> bool:
    value = settings.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be True or False, got {value!r}")
    return value


def _score_type(settings: Group, where: str) -> str:
    value = settings.get("score_type", "rms")
    if value not in SCORE_TYPES:
        raise ValueError(f"{where}: unknown score_type {value!r}; known are {', '.join(SCORE_TYPES)}")
    return value


def _ramped(settings: Group, schedule: Schedule, where: str) -> bool:
    ramped = _flag(settings, "min_sparsity_schedule", where, False)
    if ramped and not schedule.heals:
        raise ValueError(
            f"{where}: min_sparsity_schedule needs a finite healing_start_step, where its ramp ends, "
            f"got {schedule.healing_start_step}"
        )
    return ramped
