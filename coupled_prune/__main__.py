"""`python -m coupled_prune`: two short trainings, one dense and one that prunes on the way, and what became of both."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from coupled_prune.demo.model import QUICK, Sizes, Transformer, read_sources
from coupled_prune.demo.report import plot, report
from coupled_prune.demo.training import Step, dense_optimizer, pruning_optimizer, train


def parser() -> argparse.ArgumentParser:
    """The options; what argparse cannot say about their values, `main` checks."""
    parser = argparse.ArgumentParser(
        prog="python -m coupled_prune",
        description="Trains a small byte-level transformer on the Python standard library's sources twice, about a "
        "minute each on two CPU cores: once dense and pruned at the end, once pruned while it trains. Compares both at "
        "equal steps and sparsity, and the fast with the reference path.",
    )
    parser.add_argument("--steps", type=int, help=f"training steps (default {Sizes.steps}; {QUICK.steps} with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default %(default)s)")
    parser.add_argument(
        "--sparsity", type=float, default=0.5, help="share of each cluster's channels to zero (default %(default)s)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture of loss and sparsity over steps")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: a few seconds")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns 1 where the fast and the reference path chose different channels."""
    command = parser()
    options = command.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    if options.steps is not None:
        sizes = replace(sizes, steps=options.steps)
    if sizes.steps < 1:
        command.error(f"argument --steps: must be at least 1, got {sizes.steps}")
    if not 0 <= options.sparsity <= 1:
        command.error(f"argument --sparsity: must be in [0, 1], got {options.sparsity}")
    if not 0 <= options.seed < 2**63:
        command.error(f"argument --seed: must be in [0, 2**63), got {options.seed}")
    if options.plot and not Path(options.plot).resolve().parent.is_dir():
        command.error(f"argument --plot: {Path(options.plot).parent} is not a folder")
    try:
        from tqdm import tqdm

        if options.plot:
            import matplotlib  # noqa: F401
    except ImportError as error:
        sys.exit(f"the demo needs {error.name}, which is missing: pip install 'coupled-prune[demo]'")
    try:
        training, validation = read_sources()
    except FileNotFoundError as error:
        sys.exit(str(error))

    dense, on_the_way = Transformer(sizes, options.seed), Transformer(sizes, options.seed)
    megabytes = (len(training) + len(validation)) / 1e6
    print(
        f"data:  {megabytes:.1f} MB of Python's own sources, the last 10 % for validation\n"
        f"model: {sizes.layers} layers, width {sizes.width}, {sizes.heads} heads, feed-forward {sizes.hidden}, "
        f"{sum(p.numel() for p in dense.parameters()) / 1e6:.1f} M weights",
        flush=True,
    )

    def run(name: str, model: Transformer, optimizer: torch.optim.Optimizer) -> list[Step]:
        steps = []
        with tqdm(total=sizes.steps, desc=name, unit="step", mininterval=0.5) as bar:
            for step in train(model, optimizer, training, sizes, options.seed):
                steps.append(step)
                bar.set_postfix_str(f"loss {step.loss:.3f}, {step.phase}, {step.sparsity:.0%} zero", refresh=False)
                bar.update()
        return steps

    dense_steps = run("dense  ", dense, dense_optimizer(dense))
    optimizer = pruning_optimizer(on_the_way, sizes, options.sparsity)
    pruning_steps = run("pruning", on_the_way, optimizer)
    outcome = report(dense, on_the_way, optimizer.masks(), validation, sizes, options.sparsity)
    print(f"\n{outcome}")
    if options.plot:
        plot(dense_steps, pruning_steps, outcome, options.plot)
        print(f"picture: {options.plot}")
    return 1 if outcome.different else 0


if __name__ == "__main__":
    sys.exit(main())
