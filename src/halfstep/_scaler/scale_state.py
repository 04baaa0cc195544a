"""The rule of a scale in plain Python numbers: schedules, the state, and its transition.

A schedule only holds numbers; :func:`next_state` applies it. A device makes the part of the
transition that PyTorch's kernel knows; see :mod:`halfstep._scaler.device_scale`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from halfstep._common.text import shown
from halfstep._gradients.scalars import (
    LARGEST_SCALE,
    check_ascending,
    checked_count,
    checked_number,
    checked_scale,
    round_to_float32,
)


@dataclass(frozen=True)
class Static:
    """A schedule that never changes the scale.

    The fields of the other schedules are neutral constants here, since torch.amp's state dict
    requires factors and an interval from every scaler.

    Example:
        >>> from halfstep import GradScaler
        >>> GradScaler(init_scale=128.0, schedule=Static())
        GradScaler(scale=2^7, schedule=Static())
    """

    name: ClassVar[str] = "static"
    growth_factor: ClassVar[float] = 1.0
    backoff_factor: ClassVar[float] = 1.0
    growth_interval: ClassVar[int] = 2000
    trials: ClassVar[bool] = False


@dataclass(frozen=True)
class Dynamic:
    """A schedule that backs off after overflows and grows after steps without one, as in torch.amp.

    Source: Micikevicius et al., "Mixed Precision Training" (2018, arXiv:1710.03740), section 3.2,
    with the schedule of the PyTorch documentation ("Automatic Mixed Precision package"). Trials are
    ours.

    Attributes:
        growth_factor: The factor of the scale after ``growth_interval`` consecutive steps; >= 1.
        backoff_factor: The factor of the scale after an overflow; in (0, 1].
        growth_interval: Number of consecutive steps before the scale grows; >= 1.
        trials: Whether a scale that was not to blame is restored: after skips whose losses were inf
            or NaN, that have brought it below 1, or at ``min_scale``. False: the scale only grows
            and backs off, as torch.amp's; it ends at ``min_scale``, and skips with a bad loss lower
            it for good.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range; the message names it.

    Example:
        >>> from halfstep import GradScaler
        >>> GradScaler(schedule=Dynamic(growth_interval=1000)).get_growth_interval()
        1000
    """

    name: ClassVar[str] = "dynamic"
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    trials: bool = True

    def __post_init__(self) -> None:
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
        if not isinstance(self.trials, bool):
            raise TypeError(f"trials is {self.trials!r}: pass a bool")
        growth_interval = checked_count("growth_interval", self.growth_interval, at_least=1)
        # Completes the construction of the frozen value: ints become floats.
        vars(self).update(
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )


Schedule: TypeAlias = Static | Dynamic


def schedule_of(schedule: Schedule | None, numbers: tuple[float, float, int]) -> Schedule:
    """Return the schedule that the arguments of a GradScaler determine."""
    if schedule is None:
        return Dynamic(*numbers)
    if numbers != (2.0, 0.5, 2000):
        raise ValueError(
            "growth_factor, backoff_factor and growth_interval are numbers of the schedule: give "
            f"them to it, schedule={type(schedule).__name__}(...), and not to the GradScaler too"
        )
    return schedule


# --- the state ------------------------------------------------------------------------------------

# The key in a state dict of what torch.amp does not have, and the version of its data.
OURS, FORMAT_VERSION = "halfstep", 1
# torch.amp's name of the growth tracker, and its keys for the numbers of a schedule.
TORCH_TRACKER = "_growth_tracker"
TORCH_SCHEDULE_KEYS = ("growth_factor", "backoff_factor", "growth_interval")
TORCH_KEYS = ("scale", *TORCH_SCHEDULE_KEYS, TORCH_TRACKER)

MOST_UNKNOWN = 3  # number of updates that may be unknown to the host when the next one is launched
LOWEST = 2.0**-24  # the default min_scale, the smallest float16 number: gradients below it are 0

NO_RUN = {"run_scale": 0.0, "resume_scale": 0.0, "has_backed_off": False, "reached_floor": False}


class Reason(StrEnum):
    """Why a step was skipped.

    Attributes:
        OVERFLOW: A gradient is inf or NaN; a smaller scale may help.
        LOSS: The loss was inf or NaN before it was scaled.
        NON_FINITE: A gradient is inf or NaN, and since the last taken step one was at
            ``min_scale`` too.
        AFTER_UNSCALE: The gradients were finite when they were unscaled, and code between
            ``unscale_`` and ``step`` made one inf or NaN. No scale is to blame.
        LEFT_OUT: The gradients are finite, and the caller unscaled them and did not step. Only
            records have it.
    """

    OVERFLOW = "overflow"
    LOSS = "loss"
    NON_FINITE = "non-finite down to min_scale"
    AFTER_UNSCALE = "non-finite after unscale_"
    LEFT_OUT = "left out by the script"


@dataclass(frozen=True)
class ScaleState:
    """The complete state of one scale from one iteration to the next.

    A *run* begins with an overflow and ends with the next taken step. After a skip at ``min_scale``
    the scale is where the run began again. If all losses of the run were inf or NaN, or it reached
    ``min_scale``, or fell below 1, one more iteration is a *trial* of the scale at which the run
    began. If it is skipped, the scale was too large, and the lower one stays. After non-finite
    losses the earlier scale is remembered until the scale grows, and below 1 until it is 1 again;
    it is tried again after the next such run. A value of a wrong type, out of range or inconsistent
    with another is an error that names it.
    """

    scale: float  # the factor of the loss, rounded to float32, as on the device
    growth_tracker: int  # consecutive iterations with finite gradients since the scale last changed
    min_scale: float  # the limits of its automatic changes
    max_scale: float
    schedule: Schedule
    run_scale: float = 0.0  # at which the run began, or that is to be restored; otherwise 0
    has_backed_off: bool = False  # whether the scale is below that of the beginning of the run
    resume_scale: float = 0.0  # in a trial: what goes on if its step is skipped; otherwise 0
    reached_floor: bool = False  # whether a step of the run was skipped at `min_scale`
    # Whether it may not be to blame: in a run, no loss was finite; outside, it has not just grown.
    may_restore: bool = True
    skipped_in_a_row: int = 0  # iterations since the last taken one
    num_taken: int = 0  # iterations
    num_skipped: int = 0

    def __post_init__(self) -> None:
        # Completes the construction of the frozen value: ints become floats, and the scale becomes
        # the float32 number that the device will hold.
        vars(self).update(self._checked())
        check_ascending(min_scale=self.min_scale, scale=self.scale, max_scale=self.max_scale)
        if self.run_scale:
            check_ascending(scale=self.scale, run_scale=self.run_scale, max_scale=self.max_scale)
        if self.resume_scale:
            check_ascending(
                min_scale=self.min_scale,
                resume_scale=self.resume_scale,
                run_scale=self.run_scale,
                scale=self.scale,
            )

    def _checked(self) -> dict[str, float | int]:
        values: dict[str, float | int] = {}
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if each.type == "int":  # int32
                values[name] = checked_count(name, value, at_least=0)
            elif each.type == "float":
                is_none = each.default == 0.0 == value
                values[name] = 0.0 if is_none else checked_scale(name, value)
            elif each.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{name} is {shown(value)}: pass a bool")
            elif each.type == "Schedule" and not isinstance(value, Schedule):
                raise TypeError(f"schedule is {shown(value)}: pass Static() or Dynamic()")
        return values

    @classmethod
    def first(
        cls,
        init_scale: float,
        schedule: Schedule,
        min_scale: float | None = None,
        max_scale: float | None = None,
    ) -> ScaleState:
        """Return the initial state of a scaler."""
        scale = checked_scale("init_scale", init_scale)
        low = min(LOWEST, scale) if min_scale is None else checked_scale("min_scale", min_scale)
        high = LARGEST_SCALE if max_scale is None else checked_scale("max_scale", max_scale)
        check_ascending(min_scale=low, max_scale=high)
        check_ascending(min_scale=low, init_scale=scale, max_scale=high)
        return cls(scale, 0, low, high, schedule)

    @property
    def lowest(self) -> float:
        """The lowest number that the scale may have now, if nothing limits it.

        The state may be some updates old, in each of which the scale may have backed off.
        """
        return self.scale * self.schedule.backoff_factor**MOST_UNKNOWN

    @property
    def can_amplify(self) -> bool:
        """Whether unscaling may multiply by more than 1, so that a finite gradient may overflow."""
        return max(self.lowest, self.min_scale) < 1.0

    @property
    def since(self) -> int:
        """The number of the first step of a run of skips, from 1."""
        return self.num_taken + self.num_skipped - self.skipped_in_a_row + 1

    @property
    def is_below_1(self) -> bool:
        """Whether overflows have brought the scale from 1 or more to below 1, as few losses do."""
        return self.schedule.trials and self.scale < 1.0 <= self.run_scale

    @property
    def is_trial(self) -> bool:
        """Whether this iteration runs at the scale from before a run, to show if it is usable."""
        return self.resume_scale != 0.0

    def with_scale(self, scale: float) -> ScaleState:
        """Return this state, out of a run, with a scale set by the user; its limits include it."""
        scale = checked_scale("scale", scale)
        return replace(
            self,
            scale=scale,
            min_scale=min(self.min_scale, scale),
            max_scale=max(self.max_scale, scale),
            **NO_RUN,  # type: ignore[arg-type]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return torch.amp's five keys (it ignores others), and the rest as text.

        json and ``torch.load(weights_only=True)`` can handle it. The rest is text because
        torch.distributed.checkpoint flattens a dict and loads only the keys that the loading scaler
        already has: the numbers of another schedule would be lost silently.
        """
        ours = {field.name: getattr(self, field.name) for field in fields(self)}
        theirs = {"scale": ours.pop("scale")}
        theirs |= {key: getattr(self.schedule, key) for key in TORCH_SCHEDULE_KEYS}
        theirs[TORCH_TRACKER] = ours.pop("growth_tracker")
        numbers = {key: value for key, value in vars(self.schedule).items() if key not in theirs}
        ours["schedule"] = {"name": self.schedule.name} | numbers
        ours["version"] = FORMAT_VERSION
        return theirs | {OURS: json.dumps(ours, sort_keys=True)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], first: ScaleState) -> ScaleState:
        """Return the state that :meth:`to_dict` or torch.amp's ``state_dict()`` saved.

        torch.amp saves only the scale, its factors and its interval. ``first`` supplies the rest:
        limits, kind and other numbers of the schedule; ``Static()`` stays.
        """
        for key in (key for key in TORCH_KEYS if key not in saved):
            raise ValueError(
                f"the saved scaler state has no {key!r} (its keys are {sorted(saved)}): pass what "
                "the state_dict() of halfstep.GradScaler or torch.amp.GradScaler returned"
            )
        try:
            ours = dict(json.loads(saved.get(OURS) or "{}"))
            version = ours.pop("version", FORMAT_VERSION)
            if version != FORMAT_VERSION:
                raise ValueError(
                    f"{OURS!r} version {version!r} is not {FORMAT_VERSION}: update halfstep"
                )
            return cls._from_parts({key: saved[key] for key in TORCH_KEYS}, ours, first)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the saved scaler state cannot be used: {error}. Correct it in the dict (keys: "
                f"{', '.join(TORCH_KEYS)}; without {OURS!r}, the JSON text that state_dict() has "
                "written, only these are loaded), or go on without it to start from init_scale"
            ) from error

    @classmethod
    def _from_parts(
        cls, theirs: dict[str, Any], ours: dict[str, Any], first: ScaleState
    ) -> ScaleState:
        factors = {key: theirs.pop(key) for key in TORCH_SCHEDULE_KEYS}
        tracker = theirs.pop(TORCH_TRACKER)
        if not ours:
            alone = cls.first(theirs["scale"], Dynamic(**factors))
            if isinstance(first.schedule, Dynamic):
                first = replace(first, schedule=replace(first.schedule, **factors))
            return replace(first.with_scale(alone.scale), growth_tracker=tracker)
        numbers = dict(ours.get("schedule", {}))
        is_static = numbers.pop("name", None) == Static.name
        schedule = Static() if is_static else Dynamic(**factors, **numbers)
        state = cls(**theirs | ours | {"growth_tracker": tracker, "schedule": schedule})
        if json.loads(state.to_dict()[OURS]) != ours | {"version": FORMAT_VERSION}:
            raise ValueError(f"{OURS!r} is not what state_dict() has written")
        return state


def reason(state: ScaleState, found_inf: bool, loss_is_finite: bool = True) -> Reason | None:
    """Return why an iteration in this state is skipped, None if it is taken."""
    if not found_inf:
        return None
    if not loss_is_finite:
        return Reason.LOSS
    was_at_floor = state.reached_floor or state.scale <= state.min_scale
    return Reason.NON_FINITE if was_at_floor else Reason.OVERFLOW


# --- the next state -------------------------------------------------------------------------------


def next_state(
    state: ScaleState, *, found_inf: bool, loss_is_finite: bool = True, went_bad: bool = False
) -> ScaleState:
    """Return the state after one iteration.

    Args:
        state: The state during the iteration.
        found_inf: Whether any gradient of any optimizer was inf or NaN, so that the step was
            skipped.
        loss_is_finite: Whether the loss was finite before it was scaled. If not, the scale may not
            be to blame, and it is restored for a trial after the next step.
        went_bad: Whether a step was skipped because of gradients that were finite when they were
            unscaled. That shows that the scale is usable, whatever was done to them afterwards: it
            moves as after a step, and only the counts are those of a skip.

    Example:
        >>> state = ScaleState.first(4.0, Dynamic(growth_interval=1))
        >>> next_state(state, found_inf=False).scale, next_state(state, found_inf=True).scale
        (8.0, 2.0)
    """
    if not found_inf:
        return tallied(_after_step(state), is_skipped=went_bad)
    state = changed(tallied(state, is_skipped=True), growth_tracker=0)
    if state.schedule.backoff_factor == 1.0:
        return state
    is_blameless = not loss_is_finite and state.schedule.trials
    return _after_overflow(changed(state, may_restore=state.may_restore and is_blameless))


def _after_overflow(state: ScaleState) -> ScaleState:
    if state.is_trial:  # It failed: a smaller scale is needed.
        return changed(state, scale=state.resume_scale, resume_scale=0.0)
    state = changed(state, run_scale=state.run_scale or state.scale)
    if state.scale > state.min_scale:
        lower = max(round_to_float32(state.scale * state.schedule.backoff_factor), state.min_scale)
        return changed(state, scale=lower, has_backed_off=True)
    if not state.schedule.trials:
        return state
    return changed(state, scale=state.run_scale, has_backed_off=False, reached_floor=True)


def _after_step(state: ScaleState) -> ScaleState:
    schedule, scale = state.schedule, state.scale
    may_be_blameless = state.may_restore or state.reached_floor or state.is_below_1
    is_restored = state.has_backed_off and may_be_blameless
    ends_interval = state.growth_tracker + 1 >= schedule.growth_interval
    is_growing = ends_interval and not (state.is_trial or is_restored)
    run = NO_RUN.copy()
    if is_restored:
        run |= {"run_scale": state.run_scale, "resume_scale": scale}
        return changed(state, **run, scale=state.run_scale, may_restore=True)
    if is_growing:
        grown = round_to_float32(scale * schedule.growth_factor)
        scale = grown if grown <= state.max_scale else scale
    remembers = state.may_restore and not (is_growing or state.reached_floor or state.is_trial)
    if remembers or changed(state, scale=scale).is_below_1:
        run["run_scale"] = state.run_scale
    return changed(
        state,
        **run,
        scale=scale,
        growth_tracker=0 if state.is_trial or is_growing else state.growth_tracker + 1,
        may_restore=not is_growing and schedule.trials,
    )


def num_calm(state: ScaleState) -> int:
    """Return how many steps in a row, taken from this state on, do nothing but count."""
    left = state.schedule.growth_interval - state.growth_tracker - 1
    return left if left > 0 and next_state(state, found_inf=False) == counted(state, 1) else 0


def counted(state: ScaleState, num: int) -> ScaleState:
    """Return the state after ``num`` calm steps."""
    return changed(
        state, growth_tracker=state.growth_tracker + num, num_taken=state.num_taken + num
    )


def tallied(state: ScaleState, *, is_skipped: bool) -> ScaleState:
    """Return the state with one more iteration in its counts."""
    num_taken, num_skipped = state.num_taken + (not is_skipped), state.num_skipped + is_skipped
    in_a_row = state.skipped_in_a_row + 1 if is_skipped else 0
    return changed(state, num_taken=num_taken, num_skipped=num_skipped, skipped_in_a_row=in_a_row)


def changed(state: ScaleState, **values: Any) -> ScaleState:
    """Return a state with other values; not validated, since a transition preserves validity."""
    after = object.__new__(ScaleState)
    vars(after).update(vars(state), **values)
    return after
