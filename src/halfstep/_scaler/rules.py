"""Rules of how a scale changes: frozen values that belong to a ``ScaleState``.

A rule only holds numbers. :func:`halfstep._scaler.transition.next_state` applies it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from halfstep._scaler.scalars import (
    SMALLEST_SCALE,
    checked_count,
    checked_number,
    checked_scale,
    float32_bits,
    round_to_float32,
)

DEFAULT_SCALE = 2.0**16
"""The default initial scale; compared by identity, so that an equal number counts as given."""
LARGEST_HEADROOM = 2.0**16
"""The smallest power of two that overflows float16."""


@dataclass(frozen=True)
class Static:
    """A rule that never changes the scale.

    The fields of the other rules are neutral constants here, since torch.amp's state dict requires
    factors and an interval from every scaler.

    Attributes:
        scale: The scale, for the constructor of a GradScaler, which then holds it; None:
            ``init_scale``.

    Example:
        >>> from halfstep import GradScaler
        >>> GradScaler(rule=Static(128.0))
        GradScaler(scale=2^7, rule=Static())
    """

    scale: float | None = None
    name: ClassVar[str] = "static"
    growth_factor: ClassVar[float] = 1.0
    backoff_factor: ClassVar[float] = 1.0
    growth_interval: ClassVar[int] = 2000
    hysteresis: ClassVar[int] = 1
    refill: ClassVar[Literal["growth", "step"]] = "growth"
    probe_after: ClassVar[int | None] = None
    keeps_run_scale: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"name": "static"}``."""
        return {"name": self.name}

    def __repr__(self) -> str:
        return "Static()" if self.scale is None else f"Static({self.scale!r})"


@dataclass(frozen=True)
class Dynamic:
    """A rule that backs off after overflows and grows after steps without one, as in torch.amp.

    Source: Micikevicius et al., "Mixed Precision Training" (2018, arXiv:1710.03740), section 3.2,
    with the schedule of the PyTorch documentation ("Automatic Mixed Precision package"). Hysteresis
    is that of Megatron-LM (``refill="growth"``) and of DeepSpeed's ``consecutive_hysteresis``
    (``refill="step"``). Probing is ours.

    Attributes:
        growth_factor: The factor of the scale after ``growth_interval`` consecutive steps; >= 1.
        backoff_factor: The factor of the scale after an overflow; in (0, 1].
        growth_interval: Number of consecutive steps before the scale grows; >= 1.
        hysteresis: Number of the overflow that makes the scale back off; >= 1. Earlier overflows
            are tolerated; each later one backs off too, until the allowance is refilled.
        refill: When the allowance is refilled: ``"growth"``: after every ``growth_interval``
            consecutive steps; ``"step"``: after every taken step.
        probe_after: Number of consecutive overflows that backed off before one iteration runs at
            ``min_scale``; >= 1. If that overflows too, the scale returns to where it was. None:
            no such iteration; the scale ends at ``min_scale``.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range; the message names it.

    Example:
        >>> Dynamic(growth_interval=1000, hysteresis=2).to_dict()["hysteresis"]
        2
    """

    name: ClassVar[str] = "dynamic"
    keeps_run_scale: ClassVar[bool] = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    refill: Literal["growth", "step"] = "growth"
    probe_after: int | None = 8

    def __post_init__(self) -> None:
        # Completes the construction of the frozen value: ints become floats.
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)

    def _checked(self) -> dict[str, float | int | None]:
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
        if self.refill not in ("growth", "step"):
            raise ValueError(f"refill is {self.refill!r}: it must be 'growth' or 'step'")
        probe_after = self.probe_after
        return {
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": checked_count("growth_interval", self.growth_interval, at_least=1),
            "hysteresis": checked_count("hysteresis", self.hysteresis, at_least=1),
            "probe_after": None
            if probe_after is None
            else checked_count("probe_after", probe_after, at_least=1),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the rule and all its fields."""
        return {"name": self.name} | asdict(self)


class LogMaxStatistics(NamedTuple):
    """Exponential averages of the log2 of the largest gradient magnitude, float32 numbers.

    Attributes:
        mean: Mean of the logarithms.
        var: Variance of the logarithms.
        weight: Sum of the weights: 0 before the first value, then approaching 1.
    """

    mean: float
    var: float
    weight: float


@dataclass(frozen=True)
class LogMax(Dynamic):
    """A rule that follows the size of the gradients, to reduce the scale before they overflow.

    The log2 of the largest magnitude of the unscaled gradients (*amax*) is roughly normal with mean
    m and deviation s, which are exponential averages over the taken steps. The scale is ``2 **
    floor(log2(headroom) - (m + sigmas * s))``, within ``min_scale`` and ``max_scale``. An amax of 0
    carries no information and is ignored.

    A gradient inside the network may be larger than those of the parameters and overflow first. So
    the headroom changes like the scale under :class:`Dynamic`: it starts at 65536, shrinks by the
    factor by which the scale backed off in a run of overflows, grows after ``growth_interval``
    consecutive steps, and never exceeds 65536.

    Source: LogMax of OpenSeq2Seq (Kuchaiev et al., "Mixed-Precision Training for NLP and Speech
    Recognition with OpenSeq2Seq", 2018, arXiv:1805.10387). The headroom is ours. The averages are
    those of Finch, "Incremental calculation of weighted mean and variance" (2009), with weights
    that sum to one from the start. log2 is read off the bits of a float32 number (Mitchell, 1962),
    up to 0.087 too small, so that it is the same everywhere.

    Attributes:
        sigmas: Number of deviations above the mean that must fit; in [0, 100]. With 3.09 one
            iteration in a thousand overflows.
        decay: Weight of all earlier steps together relative to the current one; in [0, 1).

    Example:
        >>> rule = LogMax()
        >>> statistics = rule.observe(LogMaxStatistics(0.0, 0.0, 0.0), amax=2.0**-10)
        >>> rule.scale(LARGEST_HEADROOM, statistics) == 2.0**26
        True
    """

    name: ClassVar[str] = "logmax"
    keeps_run_scale: ClassVar[bool] = False  # The headroom remembers how far the scale backed off.
    sigmas: float = 3.09
    decay: float = 0.99

    def _checked(self) -> dict[str, float | int | None]:
        decay = checked_number("decay", self.decay)
        if not 0.0 <= round_to_float32(decay) < 1.0:
            raise ValueError(f"decay is {decay}: it must be >= 0 and < 1 in float32")
        sigmas = checked_number("sigmas", self.sigmas, at_least=0.0, at_most=100.0)
        return super()._checked() | {"sigmas": sigmas, "decay": decay}

    # Each line rounds once, like one op on a device.

    def observe(self, statistics: LogMaxStatistics, amax: float) -> LogMaxStatistics:
        """Return the averages including one more step; unchanged for an amax of 0 or NaN."""
        if not amax > 0.0:
            return statistics
        mean, var, weight = statistics
        newest = round_to_float32(1.0 - self.decay)
        weight = round_to_float32(weight * round_to_float32(self.decay))
        weight = round_to_float32(weight + newest)
        share = round_to_float32(newest / weight)
        difference = round_to_float32(log2(amax) - mean)
        step = round_to_float32(share * difference)
        mean = round_to_float32(mean + step)
        var = round_to_float32(var + round_to_float32(step * difference))
        var = round_to_float32(var * round_to_float32(1.0 - share))
        return LogMaxStatistics(mean, var, weight)

    def scale(self, headroom: float, statistics: LogMaxStatistics) -> float:
        """Return the power of two that keeps almost all steps below this headroom."""
        deviations = round_to_float32(math.sqrt(statistics.var))
        deviations = round_to_float32(deviations * round_to_float32(self.sigmas))
        largest = round_to_float32(statistics.mean + deviations)
        exponent = math.floor(round_to_float32(log2(headroom) - largest))
        return 2.0 ** min(max(exponent, -126), 127)

    def next_headroom(self, headroom: float, backed_off: float, is_growing: bool) -> float:
        """Return the headroom after a step.

        Args:
            headroom: The headroom before the step.
            backed_off: The ratio of the scale after a run of overflows to the one before it; else
                1.
            is_growing: Whether this step completes a growth interval.
        """
        headroom = round_to_float32(headroom * backed_off)
        if is_growing:
            grown = round_to_float32(headroom * self.growth_factor)
            headroom = grown if math.isfinite(grown) else headroom
        return min(max(headroom, SMALLEST_SCALE), LARGEST_HEADROOM)


Rule: TypeAlias = Static | Dynamic
"""The rule of a scale state; :class:`LogMax` is a subclass of :class:`Dynamic`."""

RULES: dict[str, type[Static] | type[Dynamic]] = {
    rule.name: rule for rule in (Static, Dynamic, LogMax)
}


def rule_from_dict(saved: Mapping[str, Any]) -> Rule:
    """Return the rule that ``to_dict`` saved.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: The name is unknown, a key is missing or unknown, or a value is out of range.

    Example:
        >>> rule_from_dict(LogMax(decay=0.9).to_dict()) == LogMax(decay=0.9)
        True
    """
    name = saved.get("name")
    if name not in RULES:
        raise ValueError(f"the name of the rule is {name!r}: it must be one of {list(RULES)}")
    rule = RULES[name]
    expected = set(rule().to_dict())
    for key in sorted(expected ^ set(saved)):
        fault = "has no" if key in expected else "has an unknown key"
        raise ValueError(f"the rule {name!r} {fault} {key!r}")
    return rule(**{key: value for key, value in saved.items() if key != "name"})


def scale_and_rule(
    init_scale: float, rule: Rule | None, numbers: tuple[float, float, int]
) -> tuple[float, Rule]:
    """Return the scale and the rule that the arguments of a GradScaler determine."""
    if rule is None:
        return init_scale, Dynamic(*numbers)
    if not isinstance(rule, Rule):
        raise TypeError(f"rule is {rule!r}: pass Dynamic(...), LogMax(...) or Static()")
    if numbers != (2.0, 0.5, 2000):
        raise ValueError(
            "growth_factor, backoff_factor and growth_interval are numbers of the rule: give "
            f"them to it, rule={type(rule).__name__}(...), and not to the GradScaler too"
        )
    if not isinstance(rule, Static) or rule.scale is None:
        return init_scale, rule
    if init_scale is not DEFAULT_SCALE and init_scale != rule.scale:
        raise ValueError(
            f"init_scale is {init_scale:g} and rule is {rule!r}, which are two scales: leave out "
            "init_scale"
        )
    return checked_scale("the scale of Static", rule.scale), Static()


def log2(value: float) -> float:
    """Return log2 of a float32 number >= 0, read off its bits; -127 for 0.

    Exact for normal powers of two, and at most 0.087 too small in between: the bits of a float32
    number, read as an integer, are its exponent followed by its mantissa.

    Source: Mitchell, "Computer Multiplication and Division Using Binary Logarithms" (1962).
    """
    return round_to_float32(round_to_float32(float32_bits(value)) * 2.0**-23 - 127.0)
