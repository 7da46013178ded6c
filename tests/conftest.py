"""Where there is no GPU, the Triton kernels are imported for the interpreter; tests switch it on when they want it.

Triton decides when a kernel is decorated, so the variable has to be set before the first import.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import coupled_kernels.gpu
    except ImportError:  # no triton: the CPU path has to work alone
        pass
    os.environ["TRITON_INTERPRET"] = "0"


@pytest.fixture
def interpreter(monkeypatch):
    """CPU tensors take the Triton kernels, run by the interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
