"""Validation: everything that can be wrong is found here, before anything is written.

In: clusters as the caller says them. Out: nothing, or one error that names the cluster, the
parameter and the value, and says what would be right.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from coupled_prune.groupers import dimension, layout_of
from coupled_prune.member import Member

if TYPE_CHECKING:
    from coupled_prune.cluster import Cluster

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCORE_TYPES = ("l2", "rms", "param_cost")


def check_clusters(clusters: Sequence[Cluster]) -> None:
    """Check each cluster, and that together they claim no element twice along one axis."""
    for cluster in clusters:
        _check_alone(cluster)
    for key, times in Counter(cluster.key for cluster in clusters).items():
        if times > 1:
            raise ValueError(f"cluster {key!r}: the key is used {times} times in one call")
    _check_one_device([(cluster, member) for cluster in clusters for member in cluster.members])
    for same_parameter in _claims(clusters).values():
        for first, second in _clashes(same_parameter):
            raise ValueError(
                f"{second} claims elements that {first} already claims along the same axis. Tied weights "
                f"(one parameter under two names) are one member; ranges of one parameter must not overlap"
            )
    check_memory(clusters)


def check_cluster(cluster: Cluster) -> None:
    """Check one cluster's settings and members.

    Raises `TypeError` for values of a wrong type and `ValueError` for everything else.
    """
    check_clusters([cluster])


def _check_alone(cluster: Cluster) -> None:
    where = f"cluster {cluster.key!r}"
    if not isinstance(cluster.key, str):
        raise TypeError(f"{where}: the key must be a string")
    _check_settings(cluster, where)
    if not cluster.members:
        raise ValueError(f"{where} has no members")
    for index, member in enumerate(cluster.members):
        if not isinstance(member, Member):
            raise TypeError(f"{where}: member {index} must be a Member, got {type(member).__name__}")
        check_member(member, f"{where}, {label(member, index)}")
    if not any(member.scored for member in cluster.members):
        raise ValueError(f"{where}: every member has scored=False, so nothing votes; at least one must be scored")
    _check_channels(cluster, where)


def check_member(member: Member, where: str) -> None:
    """Check that a parameter can be pruned in place and that its grouper fits; errors begin with `where`."""
    try:
        check_tensor(member.parameter)
        _check_range(member)
        if not isinstance(member.grouper, str):
            raise TypeError(f"the grouper must be a name or a class, got {member.grouper!r}")
        if not isinstance(member.scored, bool):
            raise TypeError(f"scored must be True or False, got {member.scored!r}")
        layout_of(member.grouper, member.shape, member.arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from None


def label(member: Member, index: int) -> str:
    """How messages call a member: by name where it has one."""
    if member.name:
        return f"parameter {member.name!r}"
    known = isinstance(member.parameter, Tensor) and not is_lazy(member.parameter)
    return f"member {index} of shape {tuple(member.parameter.shape)}" if known else f"member {index}"


def _check_settings(cluster: Cluster, where: str) -> None:
    target = cluster.min_sparsity
    if not isinstance(target, numbers.Real) or isinstance(target, bool):
        raise TypeError(f"{where}: min_sparsity must be a number in [0, 1], got {target!r}")
    if not 0 <= target <= 1:  # NaN fails too
        raise ValueError(f"{where}: min_sparsity must be in [0, 1], got {target!r}")
    if cluster.score_type not in SCORE_TYPES:
        raise ValueError(f"{where}: unknown score_type {cluster.score_type!r}; known are {', '.join(SCORE_TYPES)}")
    multiple = cluster.keep_multiple_of
    if multiple is not None and (not isinstance(multiple, int) or isinstance(multiple, bool)):
        raise TypeError(f"{where}: keep_multiple_of must be a positive integer or None, got {multiple!r}")
    if multiple is not None and multiple < 1:
        raise ValueError(f"{where}: keep_multiple_of must be a positive integer or None, got {multiple!r}")


def check_tensor(tensor: Any) -> None:
    """Can this be read as numbers and written in place?"""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a tensor, got {type(tensor).__name__}")
    if is_lazy(tensor):
        raise ValueError("a lazy parameter has no shape yet; run a forward pass first")
    if hasattr(tensor, "ds_shape"):
        raise ValueError("a DeepSpeed ZeRO-3 placeholder holds no weights; this layout is not supported")
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(f"{type(tensor).__name__} is a wrapper around other tensors; pass plain (local) tensors")
    if tensor.is_nested:
        raise ValueError("a nested tensor has rows of different lengths; expected a dense (strided) tensor")
    if hasattr(tensor, "fake_mode"):
        raise ValueError("a fake tensor has no data; prune the real model, outside of FakeTensorMode")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ValueError("a tensor inside a torch.func transform has no memory of its own; prune outside of it")
    if tensor.dim() == 0:
        raise ValueError("a scalar has no channels; expected at least one dimension")
    if tensor.layout != torch.strided:
        raise ValueError(f"layout {tensor.layout} is not supported; expected a dense (strided) tensor")
    if tensor.device.type == "meta":
        raise ValueError("a meta tensor has no data; materialize the model first")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"dtype {tensor.dtype} is not supported; expected one of {', '.join(map(str, DTYPES))}")
    if tensor._is_zerotensor():
        raise ValueError("a zero tensor (an undefined gradient) has no memory; pass a tensor of numbers")
    if tensor.is_neg():
        raise ValueError("its negative bit is set (a lazily negated view): its memory is not its values; pass a copy")
    if _span(tensor)[1] - tensor.untyped_storage().data_ptr() > tensor.untyped_storage().nbytes():
        raise ValueError(
            f"its storage holds {tensor.untyped_storage().nbytes()} bytes, too few for shape {tuple(tensor.shape)}: "
            "it was freed or belongs to a wrapper that gathers it later; pass the tensor that holds the weights"
        )
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError(
            "the tensor is computed from others (a slice or a re-parametrized weight), so writing to it would not "
            "last; pass the parameter itself, with rows= or narrow= for a range of it"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("an inference tensor can only be written inside torch.inference_mode()")
    if _overlaps_itself(tensor):
        raise ValueError(f"strides {tensor.stride()} make its elements share memory (expand); pass a real copy")


def _check_range(member: Member) -> None:
    if member.rows is not None and member.narrow is not None:
        raise TypeError("rows and narrow both name the range; give one of them")
    if member.rows is None and member.narrow is None:
        return
    given = member.rows if member.rows is not None else member.narrow
    values = list(given) if isinstance(given, Sequence) else [given]
    if len(values) != (2 if member.rows is not None else 3) or not all(type(value) is int for value in values):
        raise TypeError(f"a range is rows=(start, stop) or narrow=(dim, start, stop), got {given!r}")
    dim, start, stop = member.range or (0, 0, 0)
    shape = tuple(member.parameter.shape)
    dim = dimension(dim, shape, "the range's dimension")
    if not 0 <= start <= stop <= shape[dim]:
        raise ValueError(f"range {start}:{stop} does not lie in dimension {dim} of size {shape[dim]}")


def _check_channels(cluster: Cluster, where: str) -> None:
    counts = [layout_of(m.grouper, m.shape, m.arguments).channels for m in cluster.members]
    if len(set(counts)) > 1:
        shown = [f"{label(m, i)} has {count}" for i, (m, count) in enumerate(zip(cluster.members, counts, strict=True))]
        different = next(i for i, count in enumerate(counts) if count != counts[0])
        listed = [shown[0], shown[different], *(line for i, line in enumerate(shown) if i not in (0, different))]
        more = f", and {len(listed) - 8} more" if len(listed) > 8 else ""
        raise ValueError(f"{where}: all members need the same number of channels, but {', '.join(listed[:8])}{more}")
    if counts[0] == 0:
        raise ValueError(f"{where}: {label(cluster.members[0], 0)} has 0 channels; there is nothing to choose from")


def _check_one_device(members: Sequence[tuple[Cluster, Member]]) -> None:
    first_cluster, first = members[0] if members else (None, None)
    for cluster, member in members:
        if first and first_cluster and member.parameter.device != first.parameter.device:
            raise ValueError(
                f"cluster {cluster.key!r}, {label(member, cluster.members.index(member))} is on "
                f"{member.parameter.device}, but {label(first, 0)} of cluster {first_cluster.key!r} is on "
                f"{first.parameter.device}; one call works on one device"
            )


class _Claim(NamedTuple):
    cluster: Cluster
    member: Member
    axes: frozenset[int]
    box: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        place = self.member.range
        span = f" ({place.start}:{place.stop} of dimension {place.dim})" if place else ""
        return f"cluster {self.cluster.key!r}, {label(self.member, self.cluster.members.index(self.member))}{span}"

    def clashes(self, other: _Claim) -> bool:
        overlap = all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(self.box, other.box, strict=True))
        return overlap and bool(self.axes & other.axes)


def _claims(clusters: Sequence[Cluster]) -> dict[int, list[_Claim]]:
    """What is claimed of each parameter, by its id."""
    claims: dict[int, list[_Claim]] = {}
    for cluster in clusters:
        for member in cluster.members:
            claims.setdefault(id(member.parameter), []).append(_claim(cluster, member))
    return claims


def check_memory(clusters: Sequence[Cluster]) -> None:
    """Check that no memory lies under two parameter objects."""
    for first, second in _sharing_memory([same_parameter[0] for same_parameter in _claims(clusters).values()]):
        raise ValueError(
            f"{second} shares memory with {first}, but they are different tensor objects (tied weights, or two views "
            f"of one tensor); pass one parameter object for both, with rows= or narrow= for ranges of it"
        )


def _clashes(claims: Sequence[_Claim]) -> Iterator[tuple[_Claim, _Claim]]:
    """Pairs of claims on one parameter that clash, each in the order in which they were made."""
    # A sweep along the dimension that most of them are ranges of: thousands of ranges stay quick.
    extents = [len({claim.box[dim] for claim in claims}) for dim in range(len(claims[0].box))]
    dim = extents.index(max(extents))
    open_claims: list[int] = []
    for i in sorted(range(len(claims)), key=lambda i: claims[i].box[dim]):
        open_claims = [j for j in open_claims if claims[j].box[dim][1] > claims[i].box[dim][0]]
        for j in open_claims:
            if claims[i].clashes(claims[j]):
                yield claims[min(i, j)], claims[max(i, j)]
        open_claims.append(i)


def _claim(cluster: Cluster, member: Member) -> _Claim:
    box = [(0, size) for size in member.parameter.shape]
    if member.range is not None:
        dim, start, stop = member.range
        box[dim] = (start, stop)
    axes = layout_of(member.grouper, member.shape, member.arguments).axes
    return _Claim(cluster, member, axes, tuple(box))


def _sharing_memory(claims: Sequence[_Claim]) -> Iterator[tuple[_Claim, _Claim]]:
    """Pairs of different tensor objects that have a byte in common, each in the order of memory."""
    together: list[_Claim] = []  # claims whose spans of memory overlap, one after the other
    reach = 0
    for claim in sorted(claims, key=lambda claim: _span(claim.member.parameter)):
        start, stop = _span(claim.member.parameter)
        if start >= reach:
            yield from _sharing_bytes(together)
            together = []
        together.append(claim)
        reach = max(reach, stop)
    yield from _sharing_bytes(together)


def _sharing_bytes(claims: Sequence[_Claim]) -> Iterator[tuple[_Claim, _Claim]]:
    """Such pairs among claims whose spans overlap; interleaved slices of one tensor have no byte in common."""
    if len(claims) < 2:
        return
    tensors = [claim.member.parameter for claim in claims]
    start, stop = _span(tensors[0])[0], max(_span(tensor)[1] for tensor in tensors)
    # What sizes and places of all elements are multiples of: as a rule, one element.
    unit = math.gcd(*(tensor.element_size() for tensor in tensors), *(tensor.data_ptr() - start for tensor in tensors))
    taken = torch.zeros((stop - start) // unit, dtype=torch.bool, device="cpu")

    def place(tensor: Tensor) -> Tensor:
        width = tensor.element_size() // unit
        strides = [stride * width for stride in tensor.stride()]
        return taken.as_strided((*tensor.shape, width), (*strides, 1), (tensor.data_ptr() - start) // unit)

    for i, tensor in enumerate(tensors):
        if place(tensor).any():
            for first, other in zip(claims[:i], tensors[:i], strict=True):
                taken.zero_()
                place(other).fill_(True)
                if place(tensor).any():
                    yield first, claims[i]
        place(tensor).fill_(True)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor's memory and the byte after its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def _overlaps_itself(tensor: Tensor) -> bool:
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    if tensor.numel() == 0:
        return False
    reach = 1  # elements spanned by the dimensions looked at so far
    for stride, size in dims:
        if stride < reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    if dims[0][0] == 0:
        return True
    # Interleaved strides may still be free of overlap: list every element's place and compare.
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return places.unique().numel() != tensor.numel()
