"""The ways a projection can run, as contexts for parametrized tests.

"small tiles" and "tiles" run the Triton kernels in the interpreter. Small tiles cut even tiny tensors in
several tiles, steps and chains, so that every boundary is met. "flat" sends clusters of any size
through the path by ranges of channels, as far as their layouts allow it; "flat beside tiles" sends the
others through the kernels.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from coupled_kernels import tuning
from coupled_kernels.tuning import TileShape

SMALL = {
    "wide": TileShape(rows=4, cols=8, step=2, warps=1),
    "tall": TileShape(rows=8, cols=2, step=4, warps=1),
    "wide_columns": 4,
    "longest_row": 8,
    "chain": 1,
    "fold_lanes": 4,
    "fold_depth": 2,
    "fold_channels": 2,
    "fold_entries": 2,
    "fold_run": 2,
    "select_chunk": 4,
}
TORCH = ["cpu", "flat", "reference"]
KERNELS = ["small tiles", "tiles"]
BACKENDS = [*TORCH, *KERNELS]


@contextlib.contextmanager
def running(backend):
    """Sets the backend up; yields the `path` to pass to `prune_`."""
    if backend in ("cpu", "reference"):
        yield "reference" if backend == "reference" else "auto"
        return
    if backend.startswith("flat"):
        beside = backend.removeprefix("flat").removeprefix(" beside ") or "cpu"
        with running(beside) as path, tuning.override(flat_channels=0):
            yield path
        return
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted: python -m benchmarks.gpu checks them")
    with pytest.MonkeyPatch.context() as patch, tuning.override(**(SMALL if backend == "small tiles" else {})):
        patch.setenv("TRITON_INTERPRET", "1")
        yield "auto"
