"""A wrapper that passes for an optimizer wherever one is expected, around a base that does the stepping.

In: calls of training loops, schedulers, scalers and checkpoint tools. Out: the same calls on the base
optimizer, with hooks that run once. What a wrapper does around a step is its subclass's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

_HOOKS = [
    f"_optimizer_{what}_{when}_hooks" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
]
# Attributes of a base optimizer that describe its own step, not the wrapper's.
_NOT_FORWARDED = {"_step_supports_amp_scaling", "_opt_called", "base_optimizer"}


class OptimizerWrapper(Optimizer):
    """Parameter groups, state and defaults are the base optimizer's; so is every attribute not defined here.

    `extras` are the keys that a subclass adds to the state of parameters.
    """

    extras: frozenset[str] = frozenset()

    def _wrap(self, base_optimizer: Optimizer) -> None:
        self.base_optimizer = base_optimizer
        for hooks in _HOOKS:
            setattr(self, hooks, OrderedDict())
        self._patch_step_function()

    # Loading replaces these objects in the base optimizer, so nothing keeps its own reference.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.base_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return getattr(self.base_optimizer, "defaults", {})

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base_optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        base = self.__dict__.get("base_optimizer")
        if base is None or name in _NOT_FORWARDED or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(base, name)

    def _base_step(self, closure: Callable[[], Any] | None) -> Any:
        """The base optimizer's step: it does not see a state that holds nothing of its own, nor global hooks."""
        alone = {
            p: values for p, values in self.state.items() if isinstance(p, Tensor) and values.keys() <= self.extras
        }
        for p in alone:
            del self.state[p]
        try:
            with _without_global_hooks():
                return self.base_optimizer.step() if closure is None else self.base_optimizer.step(closure)
        finally:
            for p, values in alone.items():
                self.state.setdefault(p, {}).update(values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state dictionary."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._save()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dictionary into the base optimizer."""
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _save(self) -> dict[str, Any]:
        return self.base_optimizer.state_dict()

    def _load(self, state_dict: dict[str, Any]) -> None:
        self.base_optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        base = repr(self.base_optimizer).replace("\n", "\n    ")
        return f"{type(self).__name__} (\n    {base}\n)"


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Global step hooks run for the wrapper; run for its base as well, they would see every step twice."""
    registered: list[dict[int, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    kept = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registered, kept, strict=True):
            hooks.update(before)
