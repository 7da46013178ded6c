"""The schedule: which phase a step belongs to, how much is pruned in it, and which projections are due.

In: the number of steps done. Out: a phase, a target, yes or no.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

Phase = Literal["warmup", "pruning", "healing"]


@dataclass(frozen=True)
class Schedule:
    """Warmup for `n < warmup_steps` steps done, healing for `n >= healing_start_step`, pruning in between."""

    warmup_steps: int
    healing_start_step: int

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "healing_start_step"):
            value = getattr(self, name)
            whole = isinstance(value, int) or (isinstance(value, float) and value == float("inf"))
            if isinstance(value, bool) or not whole:
                raise TypeError(f"{name} must be an integer, got {value!r}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if self.warmup_steps >= self.healing_start_step:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be less than healing_start_step "
                f"({self.healing_start_step}): at least one step has to prune"
            )

    @property
    def heals(self) -> bool:
        """True where healing starts at a finite step."""
        return self.healing_start_step < sys.maxsize

    def phase(self, n: int) -> Phase:
        """Phase of the step that is taken when `n` are done."""
        if n < self.warmup_steps:
            return "warmup"
        return "pruning" if n < self.healing_start_step else "healing"

    def target(self, min_sparsity: float, ramped: bool, n: int) -> float:
        """Sparsity of step `n`: `min_sparsity`, or on its cubic way there from 0 at the end of warmup.

        `min_sparsity * (1 - (1 - t)^3)` with `t` the share of the pruning phase that is over (Zhu and Gupta,
        "To prune, or not to prune", 2017), and the whole of it in the last pruning step.
        """
        if not ramped or n >= self.healing_start_step - 1:
            return min_sparsity
        if n <= self.warmup_steps:
            return 0.0
        t = (n - self.warmup_steps) / (self.healing_start_step - self.warmup_steps)
        return min_sparsity * (1 - (1 - t) ** 3)

    def due(self, prox_freq: int, hard: bool, n: int) -> bool:
        """Every `prox_freq` steps after warmup; a hard constraint in the last pruning step in any case."""
        if hard and n == self.healing_start_step - 1:
            return True
        return (n - self.warmup_steps) % prox_freq == 0
