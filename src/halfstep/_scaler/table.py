"""The layout of a scale state in a device buffer, and its transition as a lookup table.

A buffer has a slot of four bytes for every number: float32, or int32 in the same bytes. It begins
with three rows of slots with the same columns: the *row* holds the state and the findings of an
iteration, the *limits* are compared with its columns, and the *next row* is the row with some
columns counted up. Intermediate values of the transition follow.

An iteration is fully described by whether each of ten columns of the row exceeds its limit. These
answers, read as a binary number, select the table row that lists the slot from which each column
takes its next value. So a device needs a dozen small ops and no branch, whatever the rule. Positive
float32 numbers have the same order as their bits read as integers, so all comparisons are between
integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._pytorch.amp import update_scale_
from halfstep._pytorch.devices import to_device
from halfstep._scaler.rules import Rule
from halfstep._scaler.scalars import (
    LARGEST_COUNT,
    LARGEST_SCALE,
    float32_bits,
    float32_from_bits,
)
from halfstep._scaler.scale_state import COUNTS, NO_RUN, ScaleState

# --- the buffer -----------------------------------------------------------------------------------

# Slots that are copied, cleared or computed together are adjacent.
_TOGETHER = (
    *("scale", "growth_tracker", "grown", "counted"),
    *("run_scale", "overflows", "has_backed_off", "resume_scale", "held", "bad_loss"),
    *("found_inf", "outlier"),
)
_FIELDS = [field.name for field in fields(ScaleState) if field.name not in ("rule", "min_scale")]

ROW = (*_TOGETHER, *(name for name in _FIELDS if name not in _TOGETHER))
"""The columns: all state fields that a transition changes or depends on."""

_BEHIND = (*("0", "1", "true", "refilled", "lowered", "run", "in doubt"),)
_NAMES = (*ROW, *(f"limit {name}" for name in ROW), *(f"next {name}" for name in ROW), *_BEHIND)

SLOT = {name: position for position, name in enumerate(_NAMES)}
"""The position of each number in a buffer."""

# The limit of the scale. As the first limit it directly follows the row.
SLOT["min_scale"] = SLOT["limit scale"]
NUM_STATE = len(ROW) + 1
"""Number of leading slots that hold a whole state: the row and ``min_scale``."""

_INTS = {n for n in SLOT if n.split()[-1] in {*COUNTS, "held", "has_backed_off", "counted"}}
_INTS |= {"0", "1", "refilled"}


def on_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host numbers as a tensor on a device. Sync: as ``to_device``."""
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


def rule_slots(rule: Rule) -> dict[str, float]:
    """Return the slots that a rule determines, with their values."""
    probe_after = LARGEST_COUNT if rule.probe_after is None else rule.probe_after
    return {
        "refilled": rule.hysteresis,
        "limit overflows": probe_after - 2,
    }


def encode(state: ScaleState) -> list[int]:
    """Return the bits of all slots of a buffer, as int32 numbers."""
    values: dict[str, float] = {name: getattr(state, name) for name in (*_FIELDS, "min_scale")}
    # The counting kernel tests for equality: a count beyond the interval would never match.
    values["growth_tracker"] = min(state.growth_tracker, state.rule.growth_interval - 1)
    values |= {"1": 1, "true": 1.0, "limit hysteresis_left": 1} | rule_slots(state.rule)
    values["has_backed_off"] = state.overflows > 0
    bits = [0] * len(_NAMES)
    for name, value in values.items():
        bits[SLOT[name]] = int(value) if name in _INTS else float32_bits(value)
    return bits


def decode(bits: Sequence[int], state: ScaleState) -> ScaleState:
    """Return ``state`` with the values of a buffer; the first NUM_STATE slots suffice."""
    values: dict[str, Any] = {
        name: bits[SLOT[name]] if name in _INTS else float32_from_bits(bits[SLOT[name]])
        for name in (*_FIELDS, "min_scale")
    }
    values |= {name: bool(values[name]) for name in ("held", "may_restore")}
    # Existing code writes to scaler._scale in place, which ends a run.
    scale, run_scale = values["scale"], values["run_scale"]
    expected = (run_scale, values["min_scale"]) if values["resume_scale"] else (scale,)
    is_written = scale < values["min_scale"] or (
        run_scale and (scale > run_scale or scale not in expected)
    )
    values["min_scale"] = min(values["min_scale"], scale)
    values["max_scale"] = max(values["max_scale"], scale)
    return replace(state, **values | (NO_RUN if is_written else {}))


def views(buffer: Tensor) -> dict[str, Tensor]:
    """Return each slot of a float32 buffer as a scalar of its dtype, and some groups of slots."""
    bits = buffer.view(torch.int32)
    found = {name: (bits if name in _INTS else buffer)[slot] for name, slot in SLOT.items()}
    rows = bits[: 3 * len(ROW)].view(3, 1, len(ROW))

    def group(first: str, last: str, of: Tensor) -> Tensor:
        return of[SLOT[first] : SLOT[last] + 1]

    return found | {
        "bits": bits,
        "state": bits[:NUM_STATE],
        "row": rows[0],
        "limits": rows[1],
        "next row": rows[2],
        "scale, growth_tracker": group("scale", "growth_tracker", bits),
        "grown, counted": group("grown", "counted", bits),
        "run fields": group("run_scale", "held", bits),
        "run fields and bad_loss": group("run_scale", "bad_loss", bits),
    }


# --- the transition -------------------------------------------------------------------------------


class Answers(NamedTuple):
    """Whether each of nine columns of the row exceeds its limit."""

    found_inf: bool
    outlier: bool
    scale: bool
    """Above ``min_scale``."""
    held: bool
    resume_scale: bool
    """The iteration is a probe, or a trial."""
    hysteresis_left: bool
    """The overflow is tolerated."""
    overflows: bool
    """One more overflow triggers a probe."""
    counted: bool
    """The growth interval is not complete."""
    may_restore: bool
    has_backed_off: bool
    """There were overflows in the run, since the last probe."""


STEPS = {"num_taken": 1, "num_skipped": 1, "skipped_in_a_row": 1, "overflows": 1} | {
    "hysteresis_left": -1
}
"""The increments from the row to the next row."""


class Kind(NamedTuple):
    """The properties of a rule that its table depends on."""

    refill: str
    probes: bool
    backs_off: bool


def kind_of(rule: Rule) -> Kind:
    """Return the kind of a rule."""
    backs_off = rule.backoff_factor != 1.0
    return Kind(rule.refill, rule.probe_after is not None, backs_off)


def next_sources(answers: Answers, kind: Kind) -> dict[str, str]:
    """Return the source slot of each column's next value; columns without one stay.

    This is :func:`halfstep._scaler.transition.next_state` in terms of slots, for rules of a kind.
    """
    ended = dict.fromkeys(("found_inf", "outlier", "bad_loss"), "0")
    if not (answers.found_inf or answers.outlier):
        return ended | _after_step(answers, kind)
    skipped = ended | {
        "growth_tracker": "0",
        "num_skipped": "next num_skipped",
        "skipped_in_a_row": "next skipped_in_a_row",
    }
    if not answers.found_inf or not kind.backs_off:
        return skipped
    return skipped | {"may_restore": "in doubt"} | _after_overflow(answers, kind.probes)


def _after_overflow(answers: Answers, probes: bool) -> dict[str, str]:
    if answers.scale and answers.resume_scale:
        return {"scale": "resume_scale", "resume_scale": "0"}
    if answers.scale and answers.hysteresis_left:
        return {"hysteresis_left": "next hysteresis_left"}
    after, none = {"run_scale": "run"}, {"overflows": "0", "has_backed_off": "0"}
    if not answers.scale:
        if not probes:
            return after
        return after | none | {"held": "1", "scale": "run", "resume_scale": "0"}
    if answers.overflows:
        return after | none | {"scale": "min_scale", "resume_scale": "lowered"}
    after |= {"overflows": "next overflows", "has_backed_off": "1"}
    is_waiting = answers.held and probes
    return after | ({} if is_waiting else {"scale": "lowered"})


def _after_step(answers: Answers, kind: Kind) -> dict[str, str]:
    is_probe = answers.resume_scale and not answers.scale
    after = dict.fromkeys(("run_scale", "overflows", "has_backed_off", "resume_scale", "held"), "0")
    after |= {"num_taken": "next num_taken", "skipped_in_a_row": "0"}
    if kind.refill == "step":
        after["hysteresis_left"] = "refilled"
    has_backed_off = is_probe or (answers.has_backed_off and not answers.held)
    if answers.may_restore and has_backed_off:
        resume = "resume_scale" if is_probe else "scale"
        return after | {"scale": "run", "run_scale": "run", "resume_scale": resume}
    after["may_restore"] = "true"
    if answers.resume_scale:
        return after | {"growth_tracker": "0"} | ({"scale": "resume_scale"} if is_probe else {})
    if not answers.counted:
        after |= {"hysteresis_left": "refilled", "may_restore": "0"}
    elif answers.may_restore and not answers.held:
        del after["run_scale"]
    return after | {"scale": "grown", "growth_tracker": "counted"}


class Table(NamedTuple):
    """The transition of some rules, on one device.

    Attributes:
        sources: int64 ``[2 ** 10, columns]``, the source slot of each column's next value.
        weights: int32 ``[1, columns]``, whose sum over the columns above their limits is the row
            index in ``sources``.
        steps: int32 ``[1, columns]``, the increments from the row to the next row.
    """

    sources: Tensor
    weights: Tensor
    steps: Tensor

    def choose_(self, slots: Mapping[str, Tensor]) -> None:
        """Replace every column of the row by its next value."""
        answers = slots["row"] > slots["limits"]
        sources = self.sources.index_select(0, (answers * self.weights).sum(1))
        slots["row"].copy_(torch.take(slots["bits"], sources))


@cache
def table(kind: Kind, device: torch.device) -> Table:
    """Return the table of the rules of a kind."""
    rows = []
    for answers in itertools.product((False, True), repeat=len(Answers._fields)):
        sources = next_sources(Answers(*answers), kind)
        rows.append([SLOT[sources.get(name, name)] for name in ROW])
    highest_first = reversed(range(len(Answers._fields)))
    weight = {name: 2**k for name, k in zip(Answers._fields, highest_first, strict=True)}
    with torch.inference_mode(False):
        return Table(
            on_device(rows, torch.int64, device),
            on_device([[weight.get(name, 0) for name in ROW]], torch.int32, device),
            on_device([[STEPS.get(name, 0) for name in ROW]], torch.int32, device),
        )


def scale_candidates(slots: Mapping[str, Tensor], state: ScaleState) -> None:
    """Compute the candidates for the next scale and counts.

    ``state`` supplies the rule, and whether there is a ``max_scale``.
    """
    slots["grown, counted"].copy_(slots["scale, growth_tracker"])
    update_scale_(
        slots["grown"],
        slots["counted"],
        slots["found_inf"],
        state.rule.growth_factor,
        state.rule.backoff_factor,
        state.rule.growth_interval,
    )
    # After an overflow the kernel has applied the backoff factor.
    torch.maximum(slots["grown"], slots["min_scale"], out=slots["lowered"])
    torch.maximum(slots["run_scale"], slots["scale"], out=slots["run"])
    # NaN after a non-finite loss, which fmin ignores; else 0.
    torch.fmin(slots["bad_loss"], slots["may_restore"], out=slots["in doubt"])
    if state.max_scale < LARGEST_SCALE:
        too_large = slots["grown"] > slots["max_scale"]
        torch.where(too_large, slots["scale"], slots["grown"], out=slots["grown"])
