"""Peak of extra memory during one call, from the kernel's own high-water mark (Linux)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the resident set exceeded its size before `call`, at the highest.

    Make the same call once before: code and threads that are loaded only once count as well.
    """
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is allocated now
    Path("/proc/self/clear_refs").write_text("5")  # sets the mark to the present size
    before = _high_water_mark()
    call()
    return _high_water_mark() - before


def _high_water_mark() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
