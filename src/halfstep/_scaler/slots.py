"""How a scale state lies in a buffer on a device.

A buffer has a slot of four bytes for every number: float32, or int32 in the same bytes. Three rows
of slots with the same columns come first: the *row* holds the state and what is found in an
iteration, the *limits* are what its columns are compared with, and the *next row* is the row with
some columns counted up. Behind them are values that are only needed on the way to the next state
(:mod:`halfstep._scaler.table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from halfstep._scaler.checks import LARGEST_COUNT, float32_bits, float32_from_bits
from halfstep._scaler.rules import LogMax, Rule
from halfstep._scaler.scale_state import COUNTS, ScaleState

# Neighbours are copied, cleared or computed together.
_TOGETHER = (
    *("scale", "growth_tracker", "grown", "counted"),
    *("run_scale", "overflows", "resume_scale", "held", "bad_loss"),
    *("headroom", "amax"),
    *("log2_mean", "log2_var", "log2_weight"),
    *("found_inf", "outlier"),
)
_FIELDS = [field.name for field in fields(ScaleState) if field.name not in ("rule", "min_scale")]

ROW = (*_TOGETHER, *(name for name in _FIELDS if name not in _TOGETHER))
"""The columns: all fields of a state that a transition changes, and what it depends on."""

_BEHIND = (
    *("0", "1", "refilled", "lowered", "run"),
    *("backed off", "headroom's tracker", "newest", "log2 headroom", "log2 amax", "power"),
)
_NAMES = (*ROW, *(f"limit {name}" for name in ROW), *(f"next {name}" for name in ROW), *_BEHIND)

SLOT = {name: position for position, name in enumerate(_NAMES)}
"""The position of every number in a buffer."""

# The limit of the scale. Being the first of the limits, it is next to the row.
SLOT["min_scale"] = SLOT["limit scale"]
NUM_STATE = len(ROW) + 1
"""So many slots, from the first, hold a whole state: the row and ``min_scale``."""

_INTS = {name for name in SLOT if name.split()[-1] in {*COUNTS, "held", "counted"}}
_INTS |= {"0", "1", "refilled", "headroom's tracker"}


def on_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of the host as a tensor on a device. Sync: none."""
    # From memory that is not pinned, CUDA has taken the values when the call returns.
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def rule_slots(rule: Rule) -> dict[str, float]:
    """Return the slots that a rule decides, and their values."""
    probe_after = LARGEST_COUNT if rule.probe_after is None else rule.probe_after
    return {
        "refilled": rule.hysteresis,
        "limit overflows": probe_after - 2,
        "newest": 1.0 - rule.decay if isinstance(rule, LogMax) else 0.0,
    }


def encode(state: ScaleState) -> list[int]:
    """Return the bits of all slots of a buffer, as int32 numbers."""
    values: dict[str, float] = {name: getattr(state, name) for name in (*_FIELDS, "min_scale")}
    # The kernel that counts tests for equality: a count past the interval would never get there.
    values["growth_tracker"] = min(state.growth_tracker, state.growth_interval - 1)
    values |= {"1": 1, "limit hysteresis_left": 1} | rule_slots(state.rule)
    bits = [0] * len(_NAMES)
    for name, value in values.items():
        bits[SLOT[name]] = int(value) if name in _INTS else float32_bits(value)
    return bits


def decode(bits: Sequence[int], state: ScaleState) -> ScaleState:
    """Return ``state`` with the values of a buffer, of which the first slots are enough."""
    values: dict[str, Any] = {
        name: bits[SLOT[name]] if name in _INTS else float32_from_bits(bits[SLOT[name]])
        for name in (*_FIELDS, "min_scale")
    }
    return replace(state, **values | {"held": bool(values["held"])})


def views(buffer: Tensor) -> dict[str, Tensor]:
    """Return every slot of a buffer as a scalar of its dtype, and some groups of slots.

    Args:
        buffer: float32 ``[slots]``.
    """
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
        "next headroom, amax": group("next headroom", "next amax", bits),
        "log2s": group("log2 headroom", "log2 amax", buffer),
        "statistics": group("log2_mean", "log2_weight", buffer),
        "next statistics": group("next log2_mean", "next log2_weight", buffer),
        "power's bits": bits[SLOT["power"]],
    }
