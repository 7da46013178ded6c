"""Checkpoints: TorchAO's layout, and values that come back as they were.

In: a state dictionary of the base optimizer's form. Out: the extras of pruning, put back into a state with
their own dtypes, which `torch.optim.Optimizer.load_state_dict` casts to the parameter's.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coupled_prune import frozen
from coupled_prune.latent import Latents
from coupled_prune.stages import Stages

State = MutableMapping[Tensor, dict[str, Any]]
# What this package adds to the state of a parameter; the base optimizer's own keys are none of these.
EXTRAS = frozenset({"latent", "sparsity_frac", "sv_count", frozen.KEY})
# What it adds to parameter groups: counters in the first regularized one, gamma in each.
COUNTERS = {"num_steps": 0, "latent_weights": True, "frozen_set": False}


def check_loadable(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], latent_weights: bool) -> None:
    """Raises `ValueError` for a state dictionary of other groups, or of the other mode."""
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"the state has parameter groups of {[len(group['params']) for group in saved]} parameters, this optimizer "
            f"has {[len(group['params']) for group in groups]}: build it with the same groups in the same order"
        )
    has_latents = any("latent" in values for values in state_dict["state"].values())
    known = [group["latent_weights"] for group in saved if "latent_weights" in group]
    steps = max((group["num_steps"] for group in saved if "num_steps" in group), default=0)
    if known or has_latents:
        saved_mode = bool(known[0]) if known else True
    elif steps and state_dict["state"]:
        saved_mode = False
    else:
        return  # a bare optimizer's state, or one from before the first step
    if saved_mode != latent_weights:
        raise ValueError(
            f"the state was saved with latent_weights={saved_mode}, but this optimizer has latent_weights="
            f"{latent_weights}; build it with the same mode to resume"
        )


def ids_by_parameter(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, Any]]:
    """Each parameter with its key in `state_dict["state"]`, matched by order as torch does."""
    parameters = [p for group in groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return list(zip(parameters, keys, strict=True))


def restore_extras(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], state: State, stages: Stages, latents: Latents
) -> None:
    """Put the extras of `state_dict` into `state`, each with the dtype it was saved with."""
    latents.forget()
    full = set(map(id, latents.full(stages)))
    for p, key in ids_by_parameter(state_dict, groups):
        for name in EXTRAS:
            state.get(p, {}).pop(name, None)
        for name, value in state_dict["state"].get(key, {}).items():
            if name not in EXTRAS:
                continue
            value = value.detach().to(p.device, copy=True) if isinstance(value, Tensor) else value
            if name == "latent" and id(p) not in full:
                latents.load(p, value)
                continue
            state.setdefault(p, {})[name] = _as_saved(name, value)


def _as_saved(name: str, value: Any) -> Any:
    """A value of a checkpoint that went through an optimizer which cast all of its state, as it was before."""
    dtypes = {"sv_count": torch.int32, frozen.KEY: torch.uint8}
    return value.to(dtypes[name]) if name in dtypes and isinstance(value, Tensor) else value


def add_latents(
    state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]], stages: Stages, latents: Latents
) -> None:
    """Put the latent weights of compact storage into `state_dict`, as full copies."""
    compact = set(map(id, stages.parameters)) - set(map(id, latents.full(stages)))
    for p, key in ids_by_parameter(state_dict, groups):
        if id(p) in compact and frozen.KEY in state_dict["state"].get(key, {}):
            state_dict["state"][key] = {**state_dict["state"][key], "latent": latents.as_full(p)}
