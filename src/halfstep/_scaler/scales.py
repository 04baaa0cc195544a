"""The scale of every loss by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.losses import Multiplier
from halfstep._scaler.rules import Rule
from halfstep._scaler.scale_state import ScaleState


class Scales(dict[str | None, LossScale]):
    """The scales that there are so far; that of losses without a name, None, is always there.

    Args:
        first: The state that the scale of every loss starts from.
    """

    def __init__(self, first: ScaleState) -> None:
        super().__init__({None: LossScale(first)})
        self.first = first

    def multiply(self, outputs: Any, loss: str | None) -> Any:
        """Multiply all tensors in ``outputs`` by the scale of a loss. Sync: none."""
        scale = self.get(loss) or LossScale(self.first)
        scaled = Multiplier(scale.see_loss)(outputs)
        self[loss] = scale  # not if that was refused
        return scaled

    def forget_bad_losses(self) -> None:
        """Forget which losses were not finite. Sync: none."""
        if len(self) > 1:  # one alone has been asked by update()
            for scale in self.values():
                scale.forget_bad_loss()

    def device_type(self) -> str | None:
        """Return the type of the device that the first loss came from, None before it."""
        for scale in self.values():
            if scale.on_device is not None:
                return scale.on_device.device.type
        return None

    def set_first(self, scale: object) -> None:
        """Set the scale that every loss starts from, before there is one. Sync: none."""
        self[None].set(scale)
        self.first = self.first.with_scale(self[None].host.scale)

    def set_rule(self, rule: Rule) -> None:
        """Move all scales by another rule. Sync: none."""
        self.first = replace(self.first, rule=rule)
        for scale in self.values():
            scale.set_rule(rule)

    def read(self) -> dict[str | None, ScaleState]:
        """Return the states of all. Sync: one for each."""
        return {loss: scale.read() for loss, scale in self.items()}

    def load(self, states: Mapping[str | None, ScaleState]) -> None:
        """Take over what :meth:`read` returned. Sync: none."""
        rule = states[None].rule
        self.first = replace(self.first, rule=rule, hysteresis_left=rule.hysteresis)
        for loss in self.keys() - states.keys():
            del self[loss]
        for loss, state in states.items():
            self.setdefault(loss, LossScale(state)).load(state)
