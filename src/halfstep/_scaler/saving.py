"""The state of a scaler as a dict, in the format of torch.amp with ours beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfstep._scaler.earlier_norms import NormLimits
from halfstep._scaler.scale_state import ScaleState

OURS = "halfstep"
"""The key of what torch.amp does not know, as JSON text.

A text, since torch.distributed.checkpoint takes a dict apart and loads of it only the keys that the
scaler happens to have when it loads: scales of named losses would be lost without a word.
"""


@dataclass(frozen=True)
class Saved:
    """All that a checkpoint holds.

    Attributes:
        scales: State of the scale of every loss by its name, None for a loss without a name.
        norm_limits: The limits of the norms with the norms seen.
    """

    scales: dict[str | None, ScaleState]
    norm_limits: NormLimits

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that json and ``torch.load(weights_only=True)`` can read."""
        named = {name: state for name, state in self.scales.items() if name is not None}
        result = self.scales[None].to_dict()
        ours = result[OURS] | {
            "losses": {name: state.to_dict() for name, state in named.items()},
            "norm_limits": self.norm_limits.to_dict(),
        }
        return result | {OURS: json.dumps(ours, sort_keys=True)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], first: ScaleState) -> Saved:
        """Read what :meth:`to_dict` or ``torch.amp.GradScaler.state_dict`` returned.

        Args:
            saved: The state.
            first: Gives what torch.amp does not know.

        Raises:
            ValueError: A key is missing or a value cannot be right.
        """
        try:
            ours = dict(json.loads(saved.get(OURS) or "{}"))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the saved scaler state cannot be used: {OURS!r} is not the JSON text that "
                f"state_dict() has written ({error}). Delete the key to load the five values that "
                "torch.amp knows"
            ) from error
        losses = ours.pop("losses", {})
        norm_limits = ours.pop("norm_limits", None)
        default = dict(saved) | ({OURS: ours} if ours else {})
        scales: dict[str | None, ScaleState] = {None: ScaleState.from_dict(default, first)}
        try:
            for name, state in losses.items():
                scales[name] = ScaleState.from_dict(state)
            return cls(scales, NormLimits.from_dict(norm_limits))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"the saved scaler state cannot be used: 'losses' or 'norm_limits' under "
                f"{OURS!r} is damaged ({error!r}). Delete these keys to go on without them"
            ) from error
