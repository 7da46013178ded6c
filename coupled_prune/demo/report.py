"""Report of the demo: pruned on the way against pruned at the end, and the fast path against the reference.

In: both trained models and their steps. Out: tables, and a picture of loss and sparsity over steps.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coupled_kernels import backend
from coupled_prune.demo.model import Sizes
from coupled_prune.demo.training import Step, clusters_of, validation_loss
from coupled_prune.plan import Path
from coupled_prune.prune import apply_masks_, prune_
from coupled_prune.result import PruneResult, table


@dataclass(frozen=True)
class Pruned:
    """A pruned copy of a model, what was done to it, and the milliseconds that the call took."""

    model: nn.Module
    result: PruneResult
    milliseconds: float


def pruned(model: nn.Module, sizes: Sizes, sparsity: float, path: Path, calls: int = 3) -> Pruned:
    """Prune copies of `model`, which stays as it is: one to warm up, then `calls`, of which the fastest counts."""
    runs = []
    for _ in range(1 + calls):
        twin = copy.deepcopy(model)
        clusters = clusters_of(twin, sizes, sparsity)
        start = time.perf_counter()
        result = prune_(clusters, path=path)
        runs.append(Pruned(twin, result, 1e3 * (time.perf_counter() - start)))
    return min(runs[1:], key=lambda run: run.milliseconds)


@dataclass(frozen=True)
class Report:
    """Validation losses in nats per byte at equal steps and sparsity, and one projection on both paths."""

    dense: float
    at_the_end: float
    on_the_way: float
    fast: Pruned
    reference: Pruned
    pruned_on_the_way: PruneResult

    @property
    def different(self) -> list[str]:
        """Clusters in which the two paths chose different channels."""
        fast, reference = self.fast.result.masks(), self.reference.result.masks()
        return [key for key in fast if fast[key] != reference[key]]

    @property
    def remark(self) -> str:
        """What the times mean."""
        if backend(torch.device("cpu")) == "triton":
            return "which says nothing: the Triton kernels ran in the interpreter"
        ratio = self.reference.milliseconds / self.fast.milliseconds
        return f"ratio {ratio:.1f} (at this size fixed costs rule; the ratio grows with the weights)"

    def __str__(self) -> str:
        rows = [("trained as long", "elements zero", "validation loss", "perplexity")]
        for name, result, loss in (
            ("dense", None, self.dense),
            ("pruned once at the end", self.fast.result, self.at_the_end),
            ("pruned while training", self.pruned_on_the_way, self.on_the_way),
        ):
            zeros = f"{result.sparsity:.1%}" if result else "0.0%"
            rows.append((name, zeros, f"{loss:.4f}", f"{math.exp(loss):.2f}"))
        fast, reference = self.fast.milliseconds, self.reference.milliseconds
        choice = (
            f"the fast and the reference path chose DIFFERENT channels in {', '.join(self.different)}"
            if self.different
            else f"the fast and the reference path chose the same channels in all {len(self.fast.result)} clusters"
        )
        return "\n".join(
            [
                "channels that were pruned while training:",
                str(self.pruned_on_the_way),
                "",
                table(rows),
                "(nats and perplexity per byte of validation text)",
                "",
                choice,
                f"time of one projection: fast path {fast:.1f} ms, reference path {reference:.1f} ms, {self.remark}",
            ]
        )


def report(
    dense: nn.Module,
    on_the_way: nn.Module,
    masks: Mapping[str, Sequence[int]],
    validation: Tensor,
    sizes: Sizes,
    sparsity: float,
) -> Report:
    """Compare a dense model, pruned copies of it, and a model that was pruned while training.

    `masks` are those of its optimizer, `validation` is uint8 (bytes,). The models stay as they are.
    """
    fast, reference = (pruned(dense, sizes, sparsity, path) for path in ("fast", "reference"))
    losses = [validation_loss(model, validation, sizes) for model in (dense, fast.model, on_the_way)]
    masked = apply_masks_(clusters_of(copy.deepcopy(on_the_way), sizes, sparsity), masks)
    return Report(losses[0], losses[1], losses[2], fast, reference, masked)


def plot(dense: Sequence[Step], on_the_way: Sequence[Step], outcome: Report, file: str) -> None:
    """Write a picture of both runs to `file`: training loss and sparsity over steps.

    Raises `ImportError` without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, sparsity = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    last = len(dense)
    for steps, name, final, color in (
        (dense, "dense, then pruned once", outcome.at_the_end, "tab:orange"),
        (on_the_way, "pruned while training", outcome.on_the_way, "tab:blue"),
    ):
        smoothed = running_mean([step.loss for step in steps])
        losses.plot(range(1, last + 1), smoothed, color=color, label=f"{name}: training loss")
        losses.plot([last], [final], "o", color=color, label=f"{name}: validation loss at the end, {final:.2f}")
    losses.plot([last], [outcome.dense], "x", color="black", label=f"dense: validation loss, {outcome.dense:.2f}")
    losses.set_ylabel("nats per byte")
    losses.legend(fontsize="small")
    sparsity.plot(range(1, last + 1), [100 * step.sparsity for step in on_the_way], color="tab:blue")
    at_the_end = [0.0] * (last - 1) + [100 * outcome.fast.result.sparsity]
    sparsity.plot(range(1, last + 1), at_the_end, color="tab:orange")
    sparsity.set_ylabel("elements zero, %")
    sparsity.set_xlabel("step")
    for before, after, number in zip(on_the_way, on_the_way[1:], range(1, last), strict=False):
        if before.phase != after.phase:
            for axes in (losses, sparsity):
                axes.axvline(number + 0.5, color="gray", linestyle=":")
            sparsity.annotate(f" {after.phase}", (number + 0.5, 0), color="gray", fontsize="small")
    figure.savefig(file, dpi=150)


def running_mean(values: Sequence[float], width: int = 10) -> list[float]:
    """Mean of each value and up to `width - 1` before it."""
    parts = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]
