"""Where there is no GPU, the Triton kernels are imported for the interpreter; tests switch it on when they want it.

Triton decides when a kernel is decorated, so the variable has to be set before the first import.
"""

from __future__ import annotations

import contextlib
import importlib
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):  # without triton the CPU path has to work alone
        importlib.import_module("coupled_kernels.gpu")
    os.environ["TRITON_INTERPRET"] = "0"
