"""Parameter groups from a model: TorchAO's `get_param_groups` and `build_prune_optimizer`.

In: a model and a configuration by name, pattern or module type. Out: groups for a base optimizer.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from coupled_prune.optimizer import PruneOptimizer

PATTERN = ":"


def get_param_groups(
    model: nn.Module,
    prune_config: Mapping[Any, Mapping[str, Any]],
    skip_wd_names: Collection[str] | None = None,
    verbose: bool = True,
) -> list[dict[str, Any]]:
    """Parameter groups of `model`, one for each key of `prune_config` that matches, and for the rest.

    A key is a parameter's name, `":"` and a regular expression that matches from the start of names, or a
    module class and the last part of a name, as in `(nn.Linear, "weight")`. Expressions come first, in their
    order, then names, then classes. Of the parameters that are left, biases and those whose last part is in
    `skip_wd_names` get a group with `weight_decay=0`, all others one without settings. A tensor with several
    names (tied weights) is taken once, by its first. `verbose` prints the number of parameters by key.

    Warns of a key that matches nothing. Raises `ValueError` for a key of another form and for a bad expression.
    """
    patterns = {key: _compiled(key) for key in prune_config if isinstance(key, str) and key.startswith(PATTERN)}
    for key in prune_config:
        if not isinstance(key, str) and not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type)):
            raise ValueError(
                f"prune_config: key {key!r} is neither a parameter's name, nor ':' and a regular expression, nor a "
                "module class and the last part of a name"
            )
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        key = _key_of(name, model, prune_config, patterns)
        settings: Mapping[str, Any] = prune_config[key] if key is not None else {}
        if key is None:
            plain = name.rpartition(".")[2] == "bias" or name.rpartition(".")[2] in (skip_wd_names or ())
            key, settings = ("no_wd", {"weight_decay": 0}) if plain else ("wd", {})
        groups.setdefault(key, {**settings, "params": []})["params"].append(parameter)
    for key in prune_config:
        if key not in groups:
            warnings.warn(f"prune_config: no parameter is left for {key!r}", stacklevel=2)
    if verbose:
        for key, group in groups.items():
            print(f"{key}: {len(group['params'])} parameters")
    return list(groups.values())


def build_prune_optimizer(
    base_optimizer: Optimizer,
    prune_reg_lambda: float,
    prune_warmup_steps: int = 0,
    prune_healing_start_step: int = sys.maxsize,
    latent_weights: bool = True,
) -> PruneOptimizer:
    """`PruneOptimizer` with TorchAO's names for its arguments."""
    return PruneOptimizer(
        base_optimizer, prune_warmup_steps, prune_healing_start_step, prune_reg_lambda, latent_weights=latent_weights
    )


def _compiled(key: str) -> re.Pattern[str]:
    try:
        return re.compile(key[len(PATTERN) :])
    except re.error as error:
        raise ValueError(f"prune_config: key {key!r} is not a regular expression: {error}") from None


def _key_of(
    name: str, model: nn.Module, prune_config: Mapping[Any, Any], patterns: Mapping[str, re.Pattern[str]]
) -> Any:
    for key, pattern in patterns.items():
        if pattern.match(name):
            return key
    if name in prune_config:
        return name
    module, _, last = name.rpartition(".")
    by_class = (type(model.get_submodule(module)), last)
    return by_class if by_class in prune_config else None
