"""Refusals: a call raises the error it should and leaves every bit of the tensors involved as it was."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from coupled_prune import Member


def weight(*shape, dtype=torch.float32):
    """Values without a zero, so that every write shows."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def state(tensor):
    """Bits and version of any tensor that has them."""
    if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    if tensor.is_nested or tensor._is_zerotensor():
        return None
    if tensor.layout == torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes():
        return None
    version = None if tensor.is_inference() else tensor._version
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    dense = dense.int_repr() if dense.is_quantized else dense
    dense = getattr(dense, "a", dense).resolve_neg()
    return dense.contiguous().flatten().view(torch.uint8).tolist(), version


def refused(call, error, words, tensors):
    """`call` raises `error` with all `words` in its message and leaves `tensors` untouched."""
    before = [state(tensor) for tensor in tensors]
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"
    assert [state(tensor) for tensor in tensors] == before


def dim0(tensor, **options):
    return Member(tensor, "Dim0Grouper", **options)


def tensors_of(clusters):
    members = [member for cluster in clusters for member in cluster.members]
    return [getattr(member, "parameter", member) for member in members]
