"""The state of a gradient scaler and its one transition, in plain Python numbers.

Nothing here needs a tensor or a device. :class:`~halfstep.scaling.scaler.GradScaler` does the same
arithmetic on the device, without waiting for it; the tests hold the two together bit for bit.

Source: Micikevicius et al., "Mixed Precision Training" (2018, arXiv:1710.03740), section 3.2, with
the dynamic schedule of the PyTorch documentation ("Automatic Mixed Precision package").
"""

from __future__ import annotations

import ctypes
import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

FORMAT_VERSION = 1
"""Version of what stands under the key ``"halfstep"`` of a state dict."""

# Below the smallest normal number of float32 the reciprocal, which gradients are multiplied by,
# may be inf. Above the largest finite one the scale itself is inf.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127

# PyTorch's kernels count in int32.
LARGEST_COUNT = 2**31 - 1

# The field of ScaleState behind each of the five keys that torch.amp writes and reads.
TORCH_KEYS = {
    "scale": "scale",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
    "_growth_tracker": "growth_tracker",
}


def round_to_float32(value: float) -> float:
    """Return the float32 number nearest to ``value`` (inf when it is too large)."""
    return ctypes.c_float(value).value


def checked_number(name: str, value: object) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError: It is not a real number. A bool is not one.
        ValueError: It is NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}): pass a number such as 65536.0"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}: pass a finite number")
    return number


def checked_scale(name: str, value: object) -> float:
    """Return ``value`` rounded to float32, if gradients can be multiplied and divided by it.

    Raises:
        TypeError: It is not a real number.
        ValueError: It is NaN, infinite, zero, negative, or outside the normal range of float32.
    """
    number = round_to_float32(checked_number(name, value))
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} is {value!r}: a scale must lie between {SMALLEST_SCALE:.3g} and "
            f"{LARGEST_SCALE:.3g} (the normal range of float32), for example 65536.0"
        )
    return number


def checked_count(name: str, value: object, *, at_least: int) -> int:
    """Return ``value`` as an int between ``at_least`` and the largest int32.

    Raises:
        TypeError: It is not an integer. A bool is not one.
        ValueError: It is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): pass a whole number")
    count = int(value)
    if not at_least <= count <= LARGEST_COUNT:
        raise ValueError(f"{name} is {count}: it must lie between {at_least} and {LARGEST_COUNT}")
    return count


@dataclass(frozen=True)
class ScaleState:
    """Everything that a gradient scaler remembers from one iteration to the next.

    Attributes:
        scale: What the loss is multiplied by. Held as a float32 number, as on the device.
        growth_tracker: Number of steps taken in a row since the scale last changed.
        growth_factor: The scale is multiplied by it after ``growth_interval`` steps in a row; >= 1.
        backoff_factor: The scale is multiplied by it after an overflow; in (0, 1].
        growth_interval: Number of steps in a row before the scale grows; >= 1.
        min_scale: Backing off stops here. A scale already below it stays where it is.

    Both factors at 1 give a static scale.

    Raises:
        TypeError: A value is not a number of the right kind.
        ValueError: A value is out of range; the message names it.

    Example:
        >>> state = ScaleState(4.0, 0, 2.0, 0.5, growth_interval=1, min_scale=1.0)
        >>> next_state(state, found_inf=False).scale, next_state(state, found_inf=True).scale
        (8.0, 2.0)
    """

    scale: float
    growth_tracker: int
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float

    def __post_init__(self) -> None:
        # Not a change of a frozen value but the end of making it: ints become floats, and the
        # scale becomes the float32 number that the device will hold.
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, float | int]:
        growth_factor = checked_number("growth_factor", self.growth_factor)
        if growth_factor < 1.0:
            raise ValueError(
                f"growth_factor is {growth_factor}: it must be >= 1 "
                "(1 for a scale that never grows)"
            )
        backoff_factor = checked_number("backoff_factor", self.backoff_factor)
        if not 0.0 < backoff_factor <= 1.0:
            raise ValueError(
                f"backoff_factor is {backoff_factor}: it must be > 0 and <= 1 "
                "(1 for a scale that never backs off)"
            )
        return {
            "scale": checked_scale("scale", self.scale),
            "growth_tracker": checked_count("growth_tracker", self.growth_tracker, at_least=0),
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": checked_count("growth_interval", self.growth_interval, at_least=1),
            "min_scale": checked_scale("min_scale", self.min_scale),
        }

    @classmethod
    def first(
        cls,
        init_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> ScaleState:
        """Return the state that a scaler starts with."""
        scale = checked_scale("init_scale", init_scale)
        return cls(scale, 0, growth_factor, backoff_factor, growth_interval, floor_under(scale))

    @property
    def can_amplify(self) -> bool:
        """Whether unscaling may multiply by more than 1, and so make a finite gradient inf."""
        return min(self.scale, self.min_scale) < 1.0

    def with_scale(self, scale: float) -> ScaleState:
        """Return this state with a scale chosen by the user, and the floor no higher than it."""
        return replace(self, scale=scale, min_scale=min(self.min_scale, scale))

    def to_dict(self) -> dict[str, Any]:
        """Return the state with the five keys of torch.amp, and the rest under ``"halfstep"``.

        Keys that torch.amp does not know are ignored by its ``load_state_dict``.
        """
        fields = asdict(self)
        torch_part = {key: fields.pop(field) for key, field in TORCH_KEYS.items()}
        return torch_part | {"halfstep": {"version": FORMAT_VERSION} | fields}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> ScaleState:
        """Return the state that :meth:`to_dict` or torch.amp's ``state_dict()`` saved.

        A state of torch.amp knows no floor: it gets ``min(1.0, scale)``.

        Raises:
            ValueError: A key is missing, a value cannot be right, or a newer halfstep wrote it.
        """
        missing = [key for key in TORCH_KEYS if key not in saved]
        if missing:
            raise ValueError(
                f"the saved scaler state has no {missing[0]!r} (its keys are {sorted(saved)}): "
                "pass what the state_dict() of halfstep.GradScaler or torch.amp.GradScaler returned"
            )
        fields = {field: saved[key] for key, field in TORCH_KEYS.items()}
        extras = dict(saved.get("halfstep") or {})
        version = extras.pop("version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise ValueError(
                f"the saved scaler state has 'halfstep' version {version!r}, this halfstep reads "
                f"version {FORMAT_VERSION}: update halfstep, or delete the key 'halfstep' to load "
                "the five values that torch.amp knows"
            )
        try:
            fields.setdefault("min_scale", floor_under(checked_scale("scale", saved["scale"])))
            return cls(**(fields | extras))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the saved scaler state cannot be used: {error}. Correct it in the dict "
                "(keys: {}), or go on without it to start from init_scale".format(
                    ", ".join(TORCH_KEYS)
                )
            ) from error


def floor_under(scale: float) -> float:
    """Return the floor that goes with a scale chosen by the user: ``min(1.0, scale)``.

    At a scale of 1 or more unscaling multiplies by 1 or less, so that what was finite stays finite.
    Whoever asks for less than 1 gets it, but the scaler does not go below that by itself.
    """
    return min(1.0, scale)


def next_state(state: ScaleState, found_inf: bool) -> ScaleState:
    """Return the state after one iteration.

    After an overflow the scale backs off, but not below ``min_scale``, and the count starts again.
    Otherwise the count goes up by one, and when it reaches ``growth_interval`` the scale grows if
    the result is finite in float32, and the count starts again.

    Args:
        state: The state during the iteration.
        found_inf: Whether any gradient of any optimizer was inf or NaN.
    """
    if found_inf:
        floor = min(state.scale, state.min_scale)
        backed_off = round_to_float32(state.scale * state.backoff_factor)
        return replace(state, scale=max(backed_off, floor), growth_tracker=0)
    if state.growth_tracker + 1 < state.growth_interval:
        return replace(state, growth_tracker=state.growth_tracker + 1)
    grown = round_to_float32(state.scale * state.growth_factor)
    return replace(state, scale=grown if math.isfinite(grown) else state.scale, growth_tracker=0)
