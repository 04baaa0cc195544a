"""The state of an iteration at a point of its source, its transitions, and their findings."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from halfstep._tools.doctor import finding as catalog
from halfstep._tools.doctor.finding import Finding

_Calls: TypeAlias = "frozenset[tuple[str, str, int]]"
"""The calls of scalers for optimizers: the key of each, and the line."""
Report: TypeAlias = Callable[..., None]
"""A function of the id of a finding, its line, and the values for its text."""


@dataclass(frozen=True)
class Iteration:
    """The state of the current gradients and their iteration, on one path."""

    losses: frozenset[int] = frozenset()  # how often the losses of the gradients were scaled
    scaler: str = ""  # the scaler of the last loss, as named in the source
    scalers: frozenset[str] = frozenset()  # the keys of all their scalers; "" for unknown ones
    line: int = 0  # the line of a backward pass, of an unscaled one if there is any
    loss: str = ""  # the loss of this pass
    # Optimizers that have stepped with the gradients, and the line of a scaler's step, or 0.
    used: frozenset[tuple[str, int]] = frozenset()
    is_dropped: bool = False  # zero_grad came after the backward pass
    is_uncertain: bool = False  # an unknown call may have changed the gradients
    unscaled: _Calls = frozenset()  # calls of unscale_ since update
    is_unscaled: bool = False  # unscale_ was called since the last backward pass
    decided: frozenset[str] = frozenset()  # the conditions decided at unscale_, or else the clip
    stepped: _Calls = frozenset()  # calls of scaler.step since update
    clipped: int = 0  # the line that clipped scaled gradients
    updated: frozenset[tuple[str, int]] = frozenset()  # scalers updated since backward, lines
    made: frozenset[tuple[str, tuple[ast.AST, ...], int]] = frozenset()  # scalers, loops, lines

    def steps_of(self, optimizer: str) -> list[int]:
        """Return the lines of the scaler's steps that have used the gradients, 0 of plain ones."""
        return [line for key, line in self.used if key == optimizer]

    @property
    def is_scaled(self) -> bool:
        """Whether the gradients certainly include those of a scaled loss."""
        return max(self.losses, default=0) > 0 and not self.is_uncertain

    def without(self, key: str) -> Iteration:
        """Return the state after a variable was bound to another object."""
        kept: dict[str, Any] = {
            name: frozenset(each for each in getattr(self, name) if key not in each)
            for name in ("unscaled", "stepped")
        }
        return replace(self, **kept)


@dataclass(frozen=True)
class Call:
    """A call: its line, the keys of its objects, and their names in the source."""

    line: int
    scaler: str = ""
    optimizer: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    has_closure: bool = False
    decided: frozenset[str] = frozenset()  # the conditions that are decided

    @property
    def is_one(self) -> bool:
        """Whether the optimizer is a single object, not an element of a sequence."""
        return "[*]" not in self.optimizer

    def lines_in(self, calls: _Calls) -> list[int]:
        """Return the sorted lines of those calls that have the same scaler and optimizer."""
        return sorted(line for *of, line in calls if of == [self.scaler, self.optimizer])


def after_backward(now: Iteration, call: Call, scaled: int, report: Report) -> Iteration:
    """Return the state after the backward pass of a loss that was scaled ``scaled`` times."""
    if scaled > 1:
        report("scaled-twice", call.line, **call.names)
    fresh = Iteration(unscaled=now.unscaled, stepped=now.stepped, made=now.made)
    if now.losses and not (now.used or now.is_dropped):
        fresh = replace(
            fresh,
            losses=now.losses,
            scalers=now.scalers,
            is_uncertain=now.is_uncertain,
            clipped=now.clipped,
        )
    losses, scalers = fresh.losses | {scaled}, fresh.scalers | {call.scaler}
    fresh = replace(fresh, losses=losses, scalers=scalers, scaler=call.names["scaler"])
    if scaled == 0 or 0 not in now.losses:
        return replace(fresh, line=call.line, loss=call.names["loss"])
    return replace(fresh, line=now.line, loss=now.loss)


def after_unscale(now: Iteration, call: Call, report: Report) -> Iteration:
    lines, is_stepped = call.lines_in(now.unscaled), bool(call.lines_in(now.stepped))
    # If both calls are repeated in the next pass of a loop, `update` is what is missing.
    if call.is_one and (lines or is_stepped) and not (is_stepped and call.line in lines):
        first = "step" if is_stepped else "unscale_"
        report("unscale-twice", call.line, first=first, **call.names)
    elif now.line and not now.is_uncertain and call.is_one:
        _check_scale(now, call, report)
    unscaled = now.unscaled | {(call.scaler, call.optimizer, call.line)}
    # Clear `updated`: these gradients come from a backward pass that is not visible.
    now = replace(now, updated=frozenset(), unscaled=unscaled, is_unscaled=True)
    return replace(now, decided=call.decided)


def after_step(now: Iteration, call: Call, is_idle: bool, report: Report) -> Iteration:
    """Return the state after ``scaler.step(optimizer)``; an idle scaler never scales a loss."""
    lines = call.lines_in(now.stepped)
    if lines and call.is_one and call.line not in lines:
        report("step-twice", call.line, first=lines[0], **call.names)
    elif lines and call.is_one:
        report("update-missing", call.line, **call.names)
    elif now.losses and not now.is_uncertain and not call.has_closure and call.is_one:
        _check_step(now, call, is_idle, report)
    stepped = now.stepped | {(call.scaler, call.optimizer, call.line)}
    return replace(now, stepped=stepped, used=now.used | {(call.optimizer, call.line)}, clipped=0)


def _check_step(now: Iteration, call: Call, is_idle: bool, report: Report) -> None:
    is_unscaled = 0 in now.losses or (max(now.losses) < 0 and is_idle)
    if _check_scale(now, call, report) or now.used:
        return
    if is_unscaled and not now.is_dropped:
        report("loss-not-scaled", now.line, **{**call.names, "loss": now.loss})
    elif now.clipped:
        where = ", both only where the step is" if call.decided - now.decided else ""
        report("clip-before-unscale", now.clipped, where=where, **call.names)


def _check_scale(now: Iteration, call: Call, report: Report) -> bool:
    """Report gradients whose scale differs from that of their loss; return whether they do."""
    if now.steps_of(call.optimizer):  # no new gradients since its step
        return False
    updated = [line for key, line in now.updated if key == call.scaler]
    is_other = bool(now.scalers) and all(_are_beside(call.scaler, scaler) for scaler in now.scalers)
    if updated:
        report("update-before-step", min(updated), **call.names)
    elif is_other:
        report("loss-not-scaled", now.line, **{**call.names, "loss": now.loss})
    return bool(updated) or is_other


def _are_beside(one: str, other: str) -> bool:
    """Return whether two keys differ only in the last name, as for attributes of one object."""
    owner, other_owner = (re.sub(r"\w*$", "", key) for key in (one, other))
    return bool(other) and one != other and owner == other_owner


def after_plain_step(now: Iteration, call: Call, report: Report) -> Iteration:
    steps = now.steps_of(call.optimizer)
    is_unscaled = any(key == call.optimizer for _, key, _ in now.unscaled)
    is_late = bool(now.used) and min(now.losses, default=0) <= 0  # others may have used them
    names = {"scaler": now.scaler or "scaler", **call.names}
    is_known = bool(now.losses) and not now.is_uncertain and not call.has_closure
    if is_known and any(steps):
        report("step-twice", call.line, first=min(filter(None, steps)), **names)
    elif is_known and is_unscaled and not steps:
        if call.decided <= now.decided:  # no condition since unscale_, such as isfinite(norm)
            report("step-unchecked", call.line, **names)
    elif is_known and now.is_scaled and not is_late:
        report("scaler-bypassed", call.line, **names)
    return replace(now, used=now.used | {(call.optimizer, 0)}, clipped=0)


def after_update(now: Iteration, call: Call, report: Report) -> Iteration:
    is_checked = any(scaler == call.scaler for scaler, *_ in now.unscaled | now.stepped)
    if now.is_scaled and not now.used and not is_checked:
        report("update-before-step", call.line, optimizer="optimizer", **call.names)
    return replace(
        now,
        unscaled=frozenset(each for each in now.unscaled if each[0] != call.scaler),
        stepped=frozenset(each for each in now.stepped if each[0] != call.scaler),
        updated=now.updated | {(call.scaler, call.line)},
    )


def after_zero_grad(now: Iteration) -> Iteration:
    return replace(now, is_dropped=bool(now.losses) and not now.used)


def after_clip(now: Iteration, call: Call) -> Iteration:
    """Return the state after gradients were clipped without unscaling them."""
    if now.is_scaled and not now.is_unscaled and not now.used:
        return replace(now, clipped=call.line, decided=call.decided)
    return now


def next_iteration(now: Iteration) -> Iteration:
    """Return the first state of the next call of a function that ended in this state."""
    return Iteration(unscaled=now.unscaled, stepped=now.stepped)


def after_unknown(now: Iteration) -> Iteration:
    """Return the state after a call that may step or run a backward pass."""
    no_calls: _Calls = frozenset()
    return replace(now, unscaled=no_calls, stepped=no_calls, updated=frozenset(), is_uncertain=True)


def finding(id: str, line: int, is_updated: bool = False, **values: object) -> Finding:
    """Return a finding about the calls of an iteration, in a file that may update the scaler."""
    values["update"] = "" if is_updated else f"\n{values.get('scaler')}.update()"
    return catalog.finding(id, line, **values)
