"""Which path the tensors' device takes: Triton kernels on a GPU, blocked torch operations on a CPU.

On a machine without a GPU, `TRITON_INTERPRET=1` sends CPU tensors through the very same Triton
kernels, run by Triton's interpreter: slow, for debugging and tests.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coupled_kernels import tuning
from coupled_kernels.cpu import CpuStep
from coupled_kernels.pieces import Piece, Segment

if TYPE_CHECKING:
    from coupled_kernels.gpu import GpuStep

# Tables on the device of the last few plans; they belong to addresses, not to tensors, and keep no weight alive.
_CACHED = 8
_steps: OrderedDict[tuple, GpuStep] = OrderedDict()
_captured: set[GpuStep] = set()  # a CUDA graph reads their tables whenever it is replayed


def backend(device: torch.device) -> str:
    """ "triton" or "torch": what runs the fast path on `device`.

    Raises `ValueError` for a device that has neither, with the reason.
    """
    if device.type == "cpu":
        return "triton" if _interpreting() else "torch"
    if device.type != "cuda":  # ROCm devices call themselves cuda, too
        raise ValueError(f"there is no fast path for tensors on {device}; use path='reference'")
    try:
        import triton  # noqa: F401
    except ImportError:
        raise ValueError(f"tensors on {device} need triton, which is not installed; use path='reference'") from None
    return "triton"


def make_step(
    pieces: Sequence[Piece],
    fillers: Sequence[Piece],
    tensors: Sequence[Tensor],
    segments: Sequence[Segment],
    pools: Sequence[Segment],
) -> CpuStep | GpuStep:
    """The step for one plan; on a GPU, its tables are kept and found again as long as nothing has moved.

    `segments` are the clusters' places in the score vector, `pools` what is ranked together: a segment, or
    several that follow each other.
    """
    device = tensors[0].device
    if backend(device) == "torch":
        return CpuStep(pieces, fillers, tensors, segments, pools)
    from coupled_kernels.gpu import GpuStep

    places = tuple((tensor.data_ptr(), tensor.dtype) for tensor in tensors)
    key = (tuple(pieces), tuple(fillers), tuple(segments), tuple(pools), device, places, tuning.current())
    step = _steps.pop(key, None) or GpuStep(pieces, fillers, tensors, segments, pools)
    _steps[key] = step
    if device.type == "cuda":
        step.used_on(torch.cuda.current_stream(device))
        if torch.cuda.is_current_stream_capturing():
            _captured.add(step)
    while len(_steps) > _CACHED:
        _steps.popitem(last=False)
    return step


def _interpreting() -> bool:
    if not (os.environ.get("TRITON_INTERPRET") or "triton" in sys.modules):
        return False  # importing triton takes longer than pruning a small model
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)
