"""The state of a script under ``--amp``, and the messages about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch

from halfstep._common.formats import dtype_name
from halfstep._common.numbers import listed
from halfstep._gradients.optimizers import name
from halfstep._tools.replay.replay import is_replaying

_OPTION = {torch.float16: "--amp fp16", torch.bfloat16: "--amp bf16"}


class ScriptState:
    """Facts learned about the script so far. Each message is printed once."""

    def __init__(self, dtype: torch.dtype, say: Callable[[str], None]) -> None:
        self.is_on = True  # once off, it stays off
        self.is_scaling = dtype is torch.float16
        # Names in order of appearance: classes of outermost modules that ran under our autocast,
        # loss functions called outside modules, optimizer classes with their number of steps, and
        # scheduler classes.
        self.modules: dict[str, None] = {}
        self.losses: dict[str, None] = {}
        self.optimizers: dict[str, int] = {}
        self.schedules: dict[str, None] = {}
        self.has_backward = self.has_scaled = self.has_own_autocast = False
        self.has_unscaled = False
        self.is_by_hand = False  # true while gradients are used without an optimizer
        self._option, self._print = _OPTION[dtype], say
        self.say_once = cache(self._say)
        self._has_summed_up = False

    @property
    def is_training(self) -> bool:
        """Whether halfstep is on and this thread runs the training, not a replay of it.

        A replay does its own scaling and must leave no trace.
        """
        return self.is_on and not is_replaying()

    def switch_off(self, reason: str) -> None:
        """Run the script unchanged from now on, and print why."""
        if self.is_on:
            self.is_on = False
            self._say(f"{reason}; it runs unchanged")

    def note_by_hand(self) -> None:
        """Run models in float32 until there is an optimizer; print the reason once."""
        self.is_by_hand = True
        self.say_once(
            "no optimizer of torch.optim was made, so a step with inf or NaN could not be skipped: "
            "the loss is not scaled, and models run in float32 from here on, until there is one "
            "(--amp bf16 needs none)"
        )

    def _say(self, text: str) -> None:
        self._print(f"{self._option}: {text}")

    def note_own_autocast(self, dtype: torch.dtype) -> None:
        """Print once that the script has its own autocast."""
        if not self.has_own_autocast:
            self.has_own_autocast = True
            self._say(
                f"the script has its own autocast, to {dtype_name(dtype)}, which stays "
                f"unchanged{'; the loss is scaled anyway' if self.is_scaling else ''}"
            )

    def note_call(self, names: dict[str, None], name: str) -> None:
        """Note what runs under our autocast.

        In a replay, a checkpoint also calls modules that are inside of others.
        """
        if not is_replaying():
            names.setdefault(name)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; the second step of an optimizer marks the end of the first iteration."""
        steps = self.optimizers.get(name(optimizer), 0)
        self.optimizers[name(optimizer)] = steps + 1
        if steps and self.modules:
            self._sum_up()

    def note_unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step whose gradients come from no scaled backward pass."""
        if not self.has_scaled:
            self.has_unscaled = True
            self.say_once(
                f"{name(optimizer)}.step takes gradients that no scaled backward pass has made "
                "(torch.func, create_graph=True or by hand): small ones may be zero, and it leaves "
                "out those with inf or NaN; --amp bf16 needs no scale"
            )

    def end(self) -> None:
        """Print the remaining messages at the end of the script."""
        if not self.is_on or self.is_by_hand:
            return
        if self.modules or (self.is_scaling and self.has_backward and self.has_own_autocast):
            self._sum_up()
        elif not self.has_own_autocast:
            self._say(
                "found nothing to run in mixed precision: no module with parameters was called "
                "(calls inside a compiled function are not seen; compile the module itself)"
            )

    def _sum_up(self) -> None:
        if not self._has_summed_up:
            self._has_summed_up = True
            self._say("; ".join(self._sentences()))

    def _sentences(self) -> Iterable[str]:
        if self.modules:
            ran = [*(f"{module}.forward" for module in self.modules), *self.losses]
            yield f"{listed(ran)} {'runs' if len(ran) == 1 else 'run'} under autocast"
        if not self.is_scaling:
            if not self.optimizers:
                yield "no optimizer step was seen"
            return
        if self.has_unscaled and not self.has_scaled:
            yield "no loss is scaled"
            return
        if not self.has_backward and not self.optimizers:
            yield "no backward pass and no optimizer step were seen"
            return
        if self.has_scaled:
            yield "the loss is scaled"
        else:
            yield "no loss is scaled" if self.has_backward else "no backward pass was seen"
        if self.optimizers:
            steps = [f"{optimizer}.step" for optimizer in self.optimizers]
            yield f"{listed(steps)} {'goes' if len(steps) == 1 else 'go'} through a GradScaler"
        else:
            yield "no optimizer step was seen"
        if self.schedules:
            waits = "waits" if len(self.schedules) == 1 else "wait"
            yield f"{listed([*self.schedules])} {waits} for steps that are taken"
