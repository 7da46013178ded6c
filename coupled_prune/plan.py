"""The plan: which path each member takes, and what the kernels get.

In: validated clusters. Out: a `Plan`, immutable and without data: the distinct parameters, each
member's path with the reason, and the pieces for the kernels. Everything a step does is read off it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from coupled_kernels import ChannelMap, FlatPiece, NotAView, Piece, Segment, View, backend, make_views, tuning
from coupled_prune.cluster import Cluster
from coupled_prune.groupers import layout_of
from coupled_prune.member import Member, Range
from coupled_prune.validate import label

Path = Literal["auto", "fast", "reference"]


@dataclass(frozen=True, eq=False)
class MemberPlan:
    """One member: index of its parameter, and how it is worked on.

    `path` is "fast" (views), "flat" (fast as well, by ranges of channels) or "reference"; `reason`
    says why in words.
    """

    member: Member
    parameter: int
    path: str
    reason: str
    pieces: tuple[Piece, ...] = ()
    flat: FlatPiece | None = None


@dataclass(frozen=True, eq=False)
class ClusterPlan:
    """One cluster: its channels, its members, and its place in the score vector (None on the flat path).

    `per_channel` is the number of elements a channel over voting members, `dtype` that of scores.
    """

    cluster: Cluster
    channels: int
    per_channel: int
    dtype: torch.dtype
    members: tuple[MemberPlan, ...]
    segment: Segment | None

    @property
    def flat(self) -> list[FlatPiece]:
        return [m.flat for m in self.members if m.flat]


@dataclass(frozen=True, eq=False)
class Plan:
    """One step over all clusters.

    `pooled` clusters, so many at a time, are ranked together and share one budget. `fillers` only count
    elements that no member covers. Parameters in `counted_afterwards` have their zeros counted when all is
    written: a member on the reference path, flat and other members on one parameter, or gaps that are no
    views.
    """

    parameters: tuple[Tensor, ...]
    names: tuple[str | None, ...]
    clusters: tuple[ClusterPlan, ...]
    pooled: tuple[int, ...]
    fillers: tuple[Piece, ...] = ()
    counted_afterwards: frozenset[int] = frozenset()

    @property
    def segments(self) -> list[Segment]:
        return [cluster.segment for cluster in self.clusters if cluster.segment]

    @property
    def ranked(self) -> list[tuple[ClusterPlan, ...]]:
        """Clusters by pool."""
        ends = itertools.accumulate(self.pooled)
        return [self.clusters[end - size : end] for size, end in zip(self.pooled, ends, strict=True)]

    @property
    def pools(self) -> list[Segment]:
        """Place of each pool in the score vector, as far as it is there."""
        pools = []
        for clusters in self.ranked:
            segments = [cluster.segment for cluster in clusters if cluster.segment]
            if segments:
                dtype = torch.float64 if any(s.dtype == torch.float64 for s in segments) else torch.float32
                pools.append(Segment(segments[0].base, sum(s.channels for s in segments), dtype))
        return pools

    @property
    def members(self) -> list[MemberPlan]:
        return [member for cluster in self.clusters for member in cluster.members]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for member in self.members for piece in member.pieces]


def build_plan(clusters: Sequence[Cluster], path: Path = "auto", pooled: Sequence[int] | None = None) -> Plan:
    """Plan for validated `clusters`; `pooled` says how many of them at a time share one budget (default: one).

    Raises `ValueError` for an unknown path, and on `path="fast"` for a member that needs the
    reference path.
    """
    if path not in get_args(Path):
        raise ValueError(f"unknown path {path!r}; known are {', '.join(get_args(Path))}")
    if path != "reference":
        for cluster in clusters:
            backend(cluster.members[0].parameter.device)
    index: dict[int, int] = {}
    parameters: list[Tensor] = []
    names: list[str | None] = []
    for member in (member for cluster in clusters for member in cluster.members):
        position = index.setdefault(id(member.parameter), len(parameters))
        if position == len(parameters):
            parameters.append(member.parameter)
            names.append(None)
        names[position] = names[position] or member.name

    plans: list[ClusterPlan] = []
    base = count = 0
    pooled = tuple(pooled or [1] * len(clusters))
    for pool in (clusters[end - size : end] for size, end in zip(pooled, itertools.accumulate(pooled), strict=True)):
        flat = path != "reference" and _are_flat(pool)
        for cluster in pool:
            planned = _plan_cluster(cluster, base, count, index, path, flat)
            plans.append(planned)
            base += planned.channels if planned.segment else 0
            count += len(planned.members)
    return _with_counting(Plan(tuple(parameters), tuple(names), tuple(plans), pooled))


def _are_flat(pool: Sequence[Cluster]) -> bool:
    """Do clusters that are ranked together go by ranges of channels? All do or none."""
    sizes, channels = tuning.current(), 0
    for cluster in pool:
        layouts = [layout_of(member.grouper, member.shape, member.arguments) for member in cluster.members]
        channels += layouts[0].channels
        maps = (layout.channel_map for layout in layouts)
        if sum(layout.per_channel for layout in layouts) >= sizes.flat_elements:
            return False
        if not all(map(_is_flat, cluster.members, maps)):
            return False
    return channels >= sizes.flat_channels


def _plan_cluster(
    cluster: Cluster, base: int, count: int, index: dict[int, int], path: Path, flat: bool
) -> ClusterPlan:
    """Plan for one cluster; `base` is its place in the score vector, `count` the number of members before it."""
    members = cluster.members
    layouts = [layout_of(member.grouper, member.shape, member.arguments) for member in members]
    dtype = torch.float64 if any(m.parameter.dtype == torch.float64 for m in members) else torch.float32
    maps = [layout.channel_map for layout in layouts]
    segment = Segment(base, layouts[0].channels, dtype)
    planned = []
    for i, (member, channel_map) in enumerate(zip(members, maps, strict=True)):
        parameter = index[id(member.parameter)]
        if path == "reference":
            planned.append(MemberPlan(member, parameter, "reference", "asked for"))
        elif flat:
            piece = FlatPiece(parameter, channel_map.block, member.scored, counted=False)
            reason = f"few elements a channel: ranges of {channel_map.block}-element runs"
            planned.append(MemberPlan(member, parameter, "flat", reason, flat=piece))
        else:
            planned.append(_plan_views(cluster, i, count + i, parameter, channel_map, segment, path))
    per_channel = sum(layout.per_channel for m, layout in zip(members, layouts, strict=True) if m.scored)
    return ClusterPlan(cluster, segment.channels, per_channel, dtype, tuple(planned), None if flat else segment)


def _is_flat(member: Member, channel_map: ChannelMap) -> bool:
    whole = member.range is None and member.parameter.is_contiguous()
    return whole and channel_map.period == member.parameter.numel() > 0


def _plan_views(
    cluster: Cluster, i: int, number: int, parameter: int, channel_map: ChannelMap, segment: Segment, path: Path
) -> MemberPlan:
    member = cluster.members[i]
    try:
        views = _views_in(member.parameter, member.range, channel_map)
    except NotAView as error:
        if path == "fast":
            raise ValueError(
                f"cluster {cluster.key!r}, {label(member, i)} has no fast path: {error}; use path='auto'"
            ) from None
        return MemberPlan(member, parameter, "reference", str(error))
    shown = "empty" if not views else f"{views[0].rows}x{views[0].cols}, lanes on axis {views[0].axis}"
    reason = shown if len(views) < 2 else f"{len(views)} views of {shown}"
    pieces = tuple(
        Piece(parameter, number, view, segment.base, member.scored, counted=False, dtype=segment.dtype)
        for view in views
    )
    return MemberPlan(member, parameter, "fast", reason, pieces)


def _views_in(parameter: Tensor, span: Range | None, channel_map: ChannelMap) -> list[View]:
    """Views of a range of `parameter`, with offsets from the parameter's start; no torch operator is called."""
    shape, strides, shift = list(parameter.shape), parameter.stride(), 0
    if span is not None:
        shape[span.dim] = span.stop - span.start
        shift = span.start * strides[span.dim]
    return [replace(view, offset=view.offset + shift) for view in make_views(shape, strides, channel_map)]


def _with_counting(plan: Plan) -> Plan:
    """Mark the pieces that count, so that every element of every parameter is counted once."""
    counting: set[int] = set()  # id of the MemberPlan
    fillers: list[Piece] = []
    afterwards: set[int] = set()
    memberships: dict[int, list[MemberPlan]] = {}
    for member in plan.members:
        memberships.setdefault(member.parameter, []).append(member)
    for parameter, members in memberships.items():
        if any(m.path == "reference" for m in members) or (len(members) > 1 and any(m.flat for m in members)):
            afterwards.add(parameter)
            continue
        whole = next((m for m in members if m.member.range is None), None)
        cover = [whole] if whole else _disjoint_ranges(members)
        if not whole:
            try:
                fillers += _gaps(parameter, plan.parameters[parameter], cover)
            except NotAView:
                afterwards.add(parameter)
                continue
        counting.update(id(m) for m in cover)

    def mark(member: MemberPlan) -> MemberPlan:
        if id(member) not in counting:
            return member
        flat = member.flat and replace(member.flat, counted=True)
        return replace(member, flat=flat, pieces=tuple(replace(piece, counted=True) for piece in member.pieces))

    clusters = tuple(replace(c, members=tuple(map(mark, c.members))) for c in plan.clusters)
    return replace(plan, clusters=clusters, fillers=tuple(fillers), counted_afterwards=frozenset(afterwards))


def _resolved(member: MemberPlan) -> tuple[int, int, int]:
    """Range of a member along a non-negative dimension."""
    parameter = member.member.parameter
    dim, start, stop = member.member.range or (0, 0, parameter.size(0))
    return dim % parameter.dim(), start, stop


def _disjoint_ranges(members: Sequence[MemberPlan]) -> list[MemberPlan]:
    """Members along one dimension whose ranges follow each other without overlap."""
    dim = _resolved(members[0])[0]
    chosen: list[MemberPlan] = []
    for member in sorted(members, key=_resolved):
        if _resolved(member)[0] == dim and (not chosen or _resolved(member)[1] >= _resolved(chosen[-1])[2]):
            chosen.append(member)
    return chosen


def _gaps(parameter: int, tensor: Tensor, cover: Sequence[MemberPlan]) -> list[Piece]:
    """Pieces that count what lies between and around the ranges of `cover`."""
    dim = _resolved(cover[0])[0]
    ends = [0, *(stop for _, _, stop in map(_resolved, cover))]
    starts = [*(start for _, start, _ in map(_resolved, cover)), tensor.size(dim)]
    pieces = []
    for start, stop in zip(ends, starts, strict=True):
        shape = list(tensor.shape)
        shape[dim] = stop - start
        one_channel = ChannelMap.row_major(shape, math.prod(shape), 1)
        for view in _views_in(tensor, Range(dim, start, stop), one_channel):
            pieces.append(Piece(parameter, -1, view, 0, scored=False, counted=True, dtype=torch.float32))
    return pieces
