"""What a replay and a trial of several steps say against an edit as a cure."""

from __future__ import annotations

from enum import IntEnum

from halfstep._tools.diagnose.diagnosis import Cure, fall, stands
from halfstep._tools.diagnose.several_steps import FAR, Usual


class Flaw(IntEnum):
    """How far a change is from a cure."""

    NONE = 0
    DOUBT = 1  # it may be one
    REWARDED = 2  # the loss falls below 0, as no loss of the run, while values are clamped
    NO_CURE = 3  # it is finite, and no more
    NOT_FINITE = 4


MOST = 0.5  # the share of values above which an edit computes something else
NEARLY = 0.9
"""The factor by which that share falls in a trial if the values come back, and a share of all."""


def flaw_of(cure: Cure, usual: Usual) -> Flaw:
    """Return what is against a change: a finite step alone is no cure if nothing is learned.

    A loss that stays at 0 has nothing to be learned; another one may fall later if the optimizer
    makes small steps. A loss may rise for a while unless values get no gradient to come back.
    """
    if cure.is_finite is False:
        return Flaw.NOT_FINITE
    first, last, least = cure.changed or (0.0, 0.0, 0.0)
    losses = cure.losses or (0.0, 0.0)
    is_rising = fall(losses) < 0 and not cure.has_small_steps
    is_standing = stands(losses) and losses[0] != 0
    is_far = abs(losses[-1]) > FAR**2 * max(abs(losses[0]), 1.0)
    if first and usual.size is not None:
        is_far |= abs(losses[-1]) > FAR**4 * max(usual.size, 1.0)
    is_usual = not cure.losses or usual.is_like(losses[0])
    is_falling = fall(losses) > (0.0 if usual.loss is not None and is_usual else losses[0] / 2)
    is_back = last <= first / 10  # almost all of the values
    is_most = least > NEARLY or (last > MOST and last > NEARLY * first and not is_falling)
    is_still = is_standing and cure.has_small_steps
    has_doubled = not is_usual and abs(losses[-1]) > 2 * abs(losses[0])
    is_running_off = is_rising and (has_doubled or not is_back)
    if is_most or is_far or is_still or is_running_off:
        return Flaw.NO_CURE
    if last and losses[-1] < 0 <= losses[0] and usual.loss == usual.size:
        return Flaw.REWARDED
    is_doubtful = is_standing or is_rising or not is_usual or (last and cure.losses)
    return Flaw.DOUBT if is_doubtful else Flaw.NONE
