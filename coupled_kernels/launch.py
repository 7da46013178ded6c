"""Launches: the one door to the device. In: a kernel, its grid and arguments. Out: the launch, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_launches: Counter[str] = Counter()


def launches() -> Counter[str]:
    """Triton launches so far, by kernel name. Subtract two readings to count a step's."""
    return _launches.copy()


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, warps: int, **constants: Any) -> None:
    """Run `kernel` with `programs` programs on `device`, which need not be the current one."""
    if programs == 0:  # an empty grid is an error on some backends
        return
    _launches[kernel.__name__] += 1
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, num_warps=warps, **constants)
    else:
        kernel[(programs,)](*arguments, num_warps=warps, **constants)
