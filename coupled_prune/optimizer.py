"""PruneOptimizer: a base optimizer, with pruning around its steps.

In: a base optimizer whose parameter groups carry TorchAO's pruning keys. Out: steps that train, prune and
heal. The settings of the groups become stages (`settings`), the stages of a step run in `pruner`; what a
step needs of the last one lies in the base optimizer's state, where checkpoints find it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from coupled_prune import checkpoint, frozen, reference
from coupled_prune.frozen import Frozen
from coupled_prune.latent import Latents
from coupled_prune.metrics import Metrics
from coupled_prune.ordinary import Due
from coupled_prune.pruner import Outcome, Pruner
from coupled_prune.schedule import Phase, Schedule
from coupled_prune.settings import Settings, resolve
from coupled_prune.stages import Ordinary, Stages
from coupled_prune.wrapper import OptimizerWrapper


class PruneOptimizer(OptimizerWrapper):
    """Trains with `base_optimizer` and prunes what its parameter groups ask for.

    For the first `warmup_steps` steps only the base optimizer works; then every step is projected; from
    `healing_start_step` on, what is zero by then stays zero. `reg_lambda` is the strength of soft
    projections in groups that set none. With `latent_weights` the base optimizer steps from the weights
    before projection, of which `latent_storage="full"` keeps copies in `state[p]["latent"]`, and "compact"
    only the values that were zeroed; without, it steps from the projected weights. Group keys are TorchAO's;
    the README lists them.

    Raises `ValueError` or `TypeError`, naming the group, parameter or cluster and the value, before a key of
    a parameter group has changed.
    """

    extras = checkpoint.EXTRAS

    def __init__(
        self,
        base_optimizer: Optimizer,
        warmup_steps: int = 0,
        healing_start_step: int = sys.maxsize,
        reg_lambda: float = 0.0,
        latent_weights: bool = True,
        *,
        latent_storage: Literal["full", "compact"] = "full",
    ) -> None:
        if latent_storage not in ("full", "compact"):
            raise ValueError(f"latent_storage must be 'full' or 'compact', got {latent_storage!r}")
        if latent_storage == "compact" and not latent_weights:
            raise ValueError("latent_storage='compact' stores latent weights, which latent_weights=False does without")
        schedule = Schedule(warmup_steps, healing_start_step)
        settings = Settings(schedule, reg_lambda, latent_weights)
        settings.stages(base_optimizer.param_groups)
        self._set_up(base_optimizer, settings, latent_storage == "compact")
        self._complete_groups()

    def _set_up(self, base_optimizer: Optimizer, settings: Settings, compact: bool) -> None:
        self._wrap(base_optimizer)
        self._settings = settings
        self._latents = Latents(compact)
        self._metrics = Metrics()
        self._pruner: tuple[Stages, Pruner] | None = None
        self._frozen: Frozen | None = None
        self._masks: dict[str, Tensor] = {}

    def _complete_groups(self) -> None:
        """Give groups the keys that checkpoints carry: counters in the first regularized one, gamma in each."""
        for group in self.regularized_param_groups():
            group.setdefault("gamma", 0.0)
            group.setdefault("reg_lambda", self._settings.reg_lambda)
        for name, value in {**checkpoint.COUNTERS, "latent_weights": self._settings.latent_weights}.items():
            self._counters.setdefault(name, value)

    # Where training stands.

    def regularized_param_groups(self) -> Iterator[dict[str, Any]]:
        """Parameter groups with a projection."""
        return (group for group in self.param_groups if group.get("prox_type"))

    @property
    def _counters(self) -> dict[str, Any]:
        """The group that carries the counters."""
        return next(self.regularized_param_groups(), self.param_groups[0])

    @property
    def num_steps(self) -> int:
        """Number of steps done."""
        return self._counters.get("num_steps", 0)

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._counters["num_steps"] = value

    @property
    def warmup_steps(self) -> int:
        return self._settings.schedule.warmup_steps

    @property
    def healing_start_step(self) -> int:
        return self._settings.schedule.healing_start_step

    @property
    def phase(self) -> Phase:
        """Phase of the next step: "warmup", "pruning" or "healing"."""
        return self._settings.schedule.phase(self.num_steps)

    @property
    def relative_sparsity(self) -> float:
        """Share of literal zeros among the elements of all regularized parameters.

        It belongs to the step `metrics_step`, the last one in which every projection ran; before the first one,
        and after loading a checkpoint, the weights are counted as they are. Of parameters with an SVD grouper
        it is what their factors would save. Reading it waits for the device.
        """
        if self._metrics.step is not None:
            return self._metrics.relative_sparsity
        parameters = self._settings.known(self.param_groups).parameters
        numel = sum(p.numel() for p in parameters)
        return sum(int(reference.count_zeros(p)) for p in parameters) / numel if numel else 0.0

    @property
    def relative_factored_frac(self) -> float:
        """Elements of the low-rank factors among those of all parameters with an SVD grouper, at `metrics_step`."""
        return self._metrics.relative_factored_frac

    @property
    def metrics_step(self) -> int | None:
        """Number of steps that were done when the totals were taken; `None` before that."""
        return self._metrics.step

    @property
    def latent_bytes(self) -> int:
        """Bytes that latent weights take beside the parameters."""
        stages = self._settings.known(self.param_groups)
        copies = [self.state.get(p, {}).get("latent") for p in stages.parameters]
        return self._latents.nbytes + sum(copy.nbytes for copy in copies if copy is not None)

    def masks(self) -> dict[str, list[int]]:
        """Zeroed channels of every coupled cluster, as plain integers: of the last projection, or the frozen ones."""
        stages = self._settings.known(self.param_groups)
        masks = frozen.masks(stages, self.state) if self._counters.get("frozen_set") else self._masks
        keys = [stage.cluster.key for stage in stages.coupled]
        return {key: masks[key].nonzero().squeeze(1).tolist() for key in keys if key in masks}

    # Steps.

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, in the phase that `phase` names; returns what the base optimizer's step returns.

        A closure is evaluated on the pruned weights first, as if it had been called before the step. Settings that
        have become invalid raise before anything has changed.
        """
        if self._is_priming(closure):
            loss = self._base_step(closure)
            self._create_state(self._settings.stages(self.param_groups))
            return loss
        phase = self.phase
        if phase == "pruning":
            loss = self._pruning_step(closure)
        elif phase == "healing":
            loss = self._healing_step(closure)
        else:
            loss = self._base_step(closure)
            self._create_state(self._settings.known(self.param_groups))
        if phase != "pruning":
            self._latents.forget()
        self.num_steps += 1
        return loss

    def _pruning_step(self, closure: Callable[[], Any] | None) -> Any:
        stages, schedule, n = self._settings.stages(self.param_groups), self._settings.schedule, self.num_steps
        if self._pruner is None or self._pruner[0] is not stages:
            self._pruner = stages, Pruner()
        closure = closure and _evaluated(closure)
        if n > schedule.warmup_steps:
            self._latents.restore_(stages, self.state)
        self._latents.forget()
        loss = self._base_step(closure)
        for group in self.regularized_param_groups():
            group["gamma"] = group["gamma"] + group.get("lr", 0.0)
        self._create_state(stages)
        if self._settings.latent_weights:
            self._latents.keep(stages, self.state)

        ordinary = [stage for stage in stages.ordinary if self._is_due(stage)]
        coupled = [stage for stage in stages.coupled if schedule.due(stage.prox_freq, True, n)]
        outcome = self._pruner[1].run(
            [self._due(stage) for stage in ordinary],
            [(stage, schedule.target(stage.cluster.min_sparsity, stage.ramped, n)) for stage in coupled],
            functools.partial(self._latents.before_write, stages),
        )
        self._account(
            stages, outcome, all_ran=len(ordinary) + len(coupled) == len(stages.ordinary) + len(stages.coupled)
        )
        last = n == schedule.healing_start_step - 1
        self._frozen, self._counters["frozen_set"] = None, last
        if last:
            frozen.freeze(stages, self.state, outcome.masks)
        return loss

    def _is_due(self, stage: Ordinary) -> bool:
        return self._settings.schedule.due(stage.prox_freq, stage.kind.hard, self.num_steps)

    def _due(self, stage: Ordinary) -> Due:
        target = self._settings.schedule.target(stage.min_sparsity, stage.ramped, self.num_steps)
        return Due(stage, target, self.param_groups[stage.group]["gamma"])

    def _account(self, stages: Stages, outcome: Outcome, all_ran: bool) -> None:
        self._masks.update(outcome.masks)
        self._metrics.record(self.state, outcome, self.num_steps + 1, all_ran)
        for stage in stages.ordinary:
            for p, rank in outcome.ranks:
                if any(member.parameter is p for member in stage.members):
                    left = int(rank.count.sum())
                    self.param_groups[stage.group]["factored_frac"] = (rank.rows + rank.cols) * left / p.numel()

    def _healing_step(self, closure: Callable[[], Any] | None) -> Any:
        stages = self._settings.known(self.param_groups)
        if not self._counters.get("frozen_set"):  # a run that was begun elsewhere, or with another schedule
            self._create_state(stages)
            frozen.freeze(stages, self.state, None)
            self._counters["frozen_set"], self._frozen = True, None
        if self._frozen is None:
            self._frozen = Frozen(stages, self.state)
        self._frozen.zero_gradients_()
        loss = self._base_step(closure and functools.partial(self._frozen_closure, closure))
        self._frozen.zero_weights_()
        self._create_state(stages)
        repeated = [stage for stage in stages.ordinary if stage.through_heal and self._is_due(stage)]
        for p, rank in Pruner().run([self._due(stage) for stage in repeated], [], lambda projection: None).ranks:
            self.state[p]["sv_count"] = rank.count
        return loss

    def _frozen_closure(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self._frozen:
            self._frozen.zero_gradients_()
        return loss

    def _is_priming(self, closure: Callable[[], Any] | None) -> bool:
        """True for a step that only makes the base optimizer create its state, and trains nothing.

        `torch.distributed.checkpoint.state_dict` takes one on an optimizer without state, with gradients and
        learning rates of zero. A learning rate that starts at zero comes with gradients.
        """
        if closure is not None or self.state or not all(float(group.get("lr", 1)) == 0 for group in self.param_groups):
            return False
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)

    def _create_state(self, stages: Stages) -> None:
        """Give every regularized parameter its keys, after the base optimizer's, which looks for an empty state."""
        for p in stages.parameters:
            self.state.setdefault(p, {})
        frozen.create(stages, self.state)
        self._metrics.create(stages, self.state)
        if self._settings.latent_weights:
            self._latents.create(stages, self.state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer, after it was validated together with the others."""
        if isinstance(param_group, dict) and not isinstance(param_group.get("params", ()), Tensor):
            param_group["params"] = list(param_group.get("params", ()))
        resolve([*self.param_groups, _completed(param_group, self.defaults)], *self._settings.arguments)
        self.base_optimizer.add_param_group(param_group)
        self._complete_groups()

    # Checkpoints and copies.

    def _save(self) -> dict[str, Any]:
        """In TorchAO's layout: latent weights are in it as full copies, however they are stored."""
        stages = self._settings.known(self.param_groups)
        if self.state:  # of the base optimizer's alone, a loader that goes by keys would drop ours
            self._create_state(stages)
        state_dict = self.base_optimizer.state_dict()
        if self._settings.latent_weights and self._latents.compact:
            checkpoint.add_latents(state_dict, self.param_groups, stages, self._latents)
        return state_dict

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of TorchAO's `PruneOptimizer` or of the bare base optimizer.

        Raises `ValueError` for other groups, or for a state that was saved with the other `latent_weights`.
        """
        checkpoint.check_loadable(state_dict, self.param_groups, self._settings.latent_weights)
        self.base_optimizer.load_state_dict(state_dict)
        self._complete_groups()
        stages = self._settings.stages(self.param_groups)
        checkpoint.restore_extras(state_dict, self.param_groups, self.state, stages, self._latents)
        self._metrics, self._frozen, self._masks = Metrics(), None, {}

    def patch_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take counters from `state_dict`, for code that calls this after `torch.distributed.checkpoint.load`."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            if group.get("prox_type"):
                group.update({key: saved[key] for key in ("reg_lambda", "num_steps", "gamma") if key in saved})

    def __getstate__(self) -> dict[str, Any]:
        return {
            "base_optimizer": self.base_optimizer,
            "settings": self._settings.arguments,
            "latents": self._latents,
            "metrics": self._metrics,
            "masks": self._masks,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        latents = state["latents"]
        self._set_up(state["base_optimizer"], Settings(*state["settings"]), latents.compact)
        self._latents, self._metrics, self._masks = latents, state["metrics"], dict(state["masks"])


def _completed(param_group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A new group as the base optimizer will hold it, as far as stages depend on that."""
    params = param_group["params"]
    listed = [params] if isinstance(params, Tensor) else list(params)
    named = bool(listed) and isinstance(listed[0], tuple)
    group = {**defaults, **param_group, "params": [p[1] for p in listed] if named else listed}
    return {**group, "param_names": [p[0] for p in listed]} if named else group


def _evaluated(closure: Callable[[], Any]) -> Callable[[], Any]:
    """`closure`, called once now, where the weights are pruned; its first call gives back what that returned."""
    with torch.enable_grad():
        results = [closure()]
    return lambda: results.pop() if results else closure()
