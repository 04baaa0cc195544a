"""The policy that a run gives to a script's own autocast, and whether it could act."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from halfstep._autocast import Policy, preset
from halfstep._autocast.modules import name_modules
from halfstep._common.patches import TopLevelCalls, not_compiled
from halfstep._diagnose.user_code import whole_model


class PolicyUse(TopLevelCalls):
    """A policy, whose rules for modules go to the first model that has modules of these names.

    Attributes:
        policy: The policy.
        has_autocast: Whether the script has made a ``torch.autocast`` that is on.
    """

    losses = ()

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy, self.has_autocast = policy, False
        self._missing = dict.fromkeys(
            policy.module_rules, "no model was called outside of a compiled function"
        )
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def is_on(self) -> bool:
        return bool(self._missing)

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if module not in self._seen:
            self._name(module)
        with self.inside():
            return original(module, *args, **kwargs)

    @not_compiled
    def _name(self, module: nn.Module) -> None:
        is_first = not self._seen
        self._seen.add(module)
        for rule in [*self._missing]:
            # Diagnoses name modules from the whole on, which a method such as training_step calls.
            for model in dict.fromkeys((module, whole_model(module))):
                try:
                    name_modules(model, Policy([rule]))
                except ValueError as error:
                    if is_first:
                        self._missing[rule] = str(error)
                else:
                    del self._missing[rule]
                    break

    def problems(self) -> Iterator[str]:
        """Yield why the policy, or a rule of it, never acted on the script's own autocast."""
        if not self.has_autocast and self.policy != preset("torch"):
            yield (
                f"the policy {self.policy} never acted: the program used no torch.autocast. "
                "--amp fp16 or --amp bf16 adds one"
            )
            return
        for rule, why in self._missing.items():
            why = why.removeprefix(f"policy rule {rule}: ")
            yield f"the policy's rule {rule} never acted: {why}"
