"""`python -m coupled_prune`: about a minute of training, one coupled projection, what it did."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from coupled_prune.demo import QUICK, Sizes, Transformer, read_sources, report, train


def parser() -> argparse.ArgumentParser:
    """The options; what argparse cannot say about their values, `main` checks."""
    parser = argparse.ArgumentParser(
        prog="python -m coupled_prune",
        description="Trains a small byte-level transformer on the Python standard library's sources for about a minute "
        "on two CPU cores, prunes its residual, feed-forward and attention-head channels in one call, and compares "
        "the fast with the reference path.",
    )
    parser.add_argument("--steps", type=int, help=f"training steps (default {Sizes.steps}; {QUICK.steps} with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default %(default)s)")
    parser.add_argument(
        "--sparsity", type=float, default=0.25, help="share of each cluster's channels to zero (default %(default)s)"
    )
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
    try:
        from tqdm import tqdm
    except ImportError:
        sys.exit("the demo shows its progress with tqdm, which is missing: pip install 'coupled-prune[demo]'")
    try:
        training, validation = read_sources()
    except FileNotFoundError as error:
        sys.exit(str(error))

    model = Transformer(sizes, options.seed)
    megabytes = (len(training) + len(validation)) / 1e6
    print(
        f"data:  {megabytes:.1f} MB of Python's own sources, the last 10 % for validation\n"
        f"model: {sizes.layers} layers, width {sizes.width}, {sizes.heads} heads, feed-forward {sizes.hidden}, "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M weights",
        flush=True,
    )
    with tqdm(total=sizes.steps, desc="training", unit="step", mininterval=0.5) as bar:
        for loss in train(model, training, sizes, options.seed):
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()
    outcome = report(model, validation, sizes, options.sparsity)
    print(f"\n{outcome}")
    return 1 if outcome.different else 0


if __name__ == "__main__":
    sys.exit(main())
