"""Schedules, which say how a scale changes: frozen values that belong to a ``ScaleState``.

A schedule only holds numbers. :func:`halfstep._scaler.scale_state.next_state` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from halfstep._gradients.scalars import checked_count, checked_number, checked_scale

DEFAULT_SCALE = 2.0**16
"""The default initial scale; compared by identity, so that an equal number counts as given."""


@dataclass(frozen=True)
class Static:
    """A schedule that never changes the scale.

    The fields of the other schedules are neutral constants here, since torch.amp's state dict
    requires factors and an interval from every scaler.

    Attributes:
        scale: The scale, for the constructor of a GradScaler, which then holds it; None:
            ``init_scale``.

    Example:
        >>> from halfstep import GradScaler
        >>> GradScaler(schedule=Static(128.0))
        GradScaler(scale=2^7, schedule=Static())
    """

    scale: float | None = None
    name: ClassVar[str] = "static"
    growth_factor: ClassVar[float] = 1.0
    backoff_factor: ClassVar[float] = 1.0
    growth_interval: ClassVar[int] = 2000
    hysteresis: ClassVar[int] = 1
    refill: ClassVar[Literal["growth", "step"]] = "growth"
    trials: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"name": "static"}``."""
        return {"name": self.name}

    def __repr__(self) -> str:
        return "Static()" if self.scale is None else f"Static({self.scale!r})"


@dataclass(frozen=True)
class Dynamic:
    """A schedule that backs off after overflows and grows after steps without one, as in torch.amp.

    Source: Micikevicius et al., "Mixed Precision Training" (2018, arXiv:1710.03740), section 3.2,
    with the schedule of the PyTorch documentation ("Automatic Mixed Precision package"). Hysteresis
    is that of Megatron-LM (``refill="growth"``) and of DeepSpeed's ``consecutive_hysteresis``
    (``refill="step"``). Trials are ours.

    Attributes:
        growth_factor: The factor of the scale after ``growth_interval`` consecutive steps; >= 1.
        backoff_factor: The factor of the scale after an overflow; in (0, 1].
        growth_interval: Number of consecutive steps before the scale grows; >= 1.
        hysteresis: Number of the overflow that makes the scale back off; >= 1. Earlier overflows
            are tolerated; each later one backs off too, until the allowance is refilled.
        refill: When the allowance is refilled: ``"growth"``: after every ``growth_interval``
            consecutive steps; ``"step"``: after every taken step.
        trials: Whether a scale that was not to blame is restored: after skips whose losses were inf
            or NaN, that have brought it below 1, or at ``min_scale``. False: the scale only grows
            and backs off, as torch.amp's; it ends at ``min_scale``, and skips with a bad loss lower
            it for good.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range; the message names it.

    Example:
        >>> Dynamic(growth_interval=1000, hysteresis=2).to_dict()["hysteresis"]
        2
    """

    name: ClassVar[str] = "dynamic"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    refill: Literal["growth", "step"] = "growth"
    trials: bool = True

    def __post_init__(self) -> None:
        # Completes the construction of the frozen value: ints become floats.
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, float | int]:
        growth_factor = checked_number("growth_factor", self.growth_factor, 2.0)
        if growth_factor < 1.0:
            raise ValueError(
                f"growth_factor is {growth_factor}: it must be >= 1 "
                "(1 for a scale that never grows)"
            )
        backoff_factor = checked_number("backoff_factor", self.backoff_factor, 0.5)
        if not 0.0 < backoff_factor <= 1.0:
            raise ValueError(
                f"backoff_factor is {backoff_factor}: it must be > 0 and <= 1 "
                "(1 for a scale that never backs off)"
            )
        if self.refill not in ("growth", "step"):
            raise ValueError(f"refill is {self.refill!r}: it must be 'growth' or 'step'")
        if not isinstance(self.trials, bool):
            raise TypeError(f"trials is {self.trials!r}: pass a bool")
        return {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": checked_count("growth_interval", self.growth_interval, at_least=1),
            "hysteresis": checked_count("hysteresis", self.hysteresis, at_least=1),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the schedule and all its fields."""
        return {"name": self.name} | asdict(self)


Schedule: TypeAlias = Static | Dynamic
"""The schedule of a scale state."""

SCHEDULES: dict[str, type[Static] | type[Dynamic]] = {
    schedule.name: schedule for schedule in (Static, Dynamic)
}


def schedule_from_dict(saved: Mapping[str, Any]) -> Schedule:
    """Return the schedule that ``to_dict`` saved.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: The name is unknown, a key is missing or unknown, or a value is out of range.

    Example:
        >>> schedule_from_dict(Dynamic(hysteresis=2).to_dict()) == Dynamic(hysteresis=2)
        True
    """
    name = saved.get("name")
    if name not in SCHEDULES:
        raise ValueError(
            f"the name of the schedule is {name!r}: it must be one of {list(SCHEDULES)}"
        )
    schedule = SCHEDULES[name]
    expected = set(schedule().to_dict())
    for key in sorted(expected ^ set(saved)):
        fault = "has no" if key in expected else "has an unknown key"
        raise ValueError(f"the schedule {name!r} {fault} {key!r}")
    return schedule(**{key: value for key, value in saved.items() if key != "name"})


def scale_and_schedule(
    init_scale: float, schedule: Schedule | None, numbers: tuple[float, float, int]
) -> tuple[float, Schedule]:
    """Return the scale and the schedule that the arguments of a GradScaler determine."""
    if schedule is None:
        return init_scale, Dynamic(*numbers)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is {schedule!r}: pass Dynamic(...) or Static()")
    if numbers != (2.0, 0.5, 2000):
        raise ValueError(
            "growth_factor, backoff_factor and growth_interval are numbers of the schedule: give "
            f"them to it, schedule={type(schedule).__name__}(...), and not to the GradScaler too"
        )
    if not isinstance(schedule, Static) or schedule.scale is None:
        return init_scale, schedule
    if init_scale is not DEFAULT_SCALE and init_scale != schedule.scale:
        raise ValueError(
            f"init_scale is {init_scale:g} and schedule is {schedule!r}, which are two scales: "
            "leave out init_scale"
        )
    return checked_scale("the scale of Static", schedule.scale), Static()
