"""Finding what makes a step finite, by replaying it with one cure after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from halfstep._autocast.modules import without_wrappers
from halfstep._autocast.policy import Policy, preset
from halfstep._diagnose.blame import Blame
from halfstep._diagnose.diagnosis import BadOp, Cure
from halfstep._diagnose.edits import Editing, edit_for
from halfstep._diagnose.precision import AS_IT_IS, Entered, Precision
from halfstep._diagnose.replay import Setting
from halfstep._numerics.formats import FORMATS

MOST_RULES = 3
"""So many rules are added to a policy before another dtype is the cure."""
SMALLEST_SCALE = 1.0
"""Below this a loss is not scaled up any more."""
_SCALE_FACTORS = (2.0**-4, 2.0**-10, 0.0)

Replayed = Callable[[Setting, AbstractContextManager[object]], "Blame | None"]
"""Replays the step and returns what is to blame, None if it is finite."""


@dataclass(frozen=True)
class Patient:
    """A step that is to be cured.

    Attributes:
        replayed: Replays it.
        model: The model; None if none was called.
        entered: What the step asked of autocast.
        scale: The scale of its loss; None without one.
    """

    replayed: Replayed
    model: nn.Module | None
    entered: list[Entered]
    scale: float | None

    def is_finite(self, setting: Setting) -> bool:
        """Say whether a replay is finite."""
        return self.replayed(setting, nullcontext()) is None


def smaller_scale(patient: Patient, bad: BadOp, largest: float | None) -> float | None:
    """Return a power of two by which the loss can be scaled, None if there is none above 1.

    Args:
        patient: The step.
        bad: The op that overflows.
        largest: The largest magnitude, in float32, of what is float16 in the backward pass.
    """
    assert patient.scale is not None
    limit = bad.limit or FORMATS["fp16"].largest
    needed = max(filter(None, (largest, bad.needs)), default=16 * limit)
    scale = power_below(patient.scale * min(limit / needed / 2, 0.5))  # a bit of headroom
    for candidate in (scale, scale / 16, scale / 256, SMALLEST_SCALE):
        if candidate >= SMALLEST_SCALE and _is_finite_at(patient, candidate):
            return candidate
    return None


def _is_finite_at(patient: Patient, scale: float) -> bool:
    return patient.is_finite(Setting(scale=scale))


def of_scale(scale: float) -> Cure:
    """Return the cure that is a smaller scale, which was replayed."""
    text = (
        f"halfstep.GradScaler(init_scale={_literal(scale)}, max_scale={_literal(scale)})  "
        f"# in a run: scaler.update(new_scale={_literal(scale)})"
    )
    return Cure("scale", text, is_finite=True, scale=scale)


def of_range(patient: Patient, blame: Blame, bad: BadOp) -> Cure:
    """Return rules, or another dtype, with which the values are held."""
    if not patient.entered:
        what = bad.forward_op or bad.op
        return Cure("code", f"compute {what} there in float32: give it x.float()")
    entered = patient.entered[0]
    base = entered.policy or preset("standard")
    cure = _of_rules(patient, blame, base)
    if cure is not None:
        return cure
    if entered.dtype is not torch.bfloat16 and patient.is_finite(
        Setting(Precision(torch.bfloat16), patient.scale)
    ):
        text = f'halfstep.autocast("{entered.device}", dtype=torch.bfloat16)'
        return Cure("dtype", text, is_finite=True, dtype="bfloat16")
    if not patient.is_finite(Setting(Precision(torch.float32), patient.scale)):
        return Cure("code", "autocast did not choose this dtype: cast to another one, x.float()")
    text = f'halfstep.autocast("{entered.device}", enabled=False)  # float32'
    return Cure("dtype", text, is_finite=True, dtype="float32")


def _of_rules(patient: Patient, blame: Blame, base: Policy) -> Cure | None:
    """Add a rule for each op that goes bad, the narrowest that helps first."""
    rules: list[str] = []
    for _ in range(MOST_RULES):
        found = blame
        for rule in _rules_for(blame, patient.model):
            policy = _with_rules(base, [*rules, rule])
            if policy is None or rule in rules:
                continue
            after = _replayed_with(patient, policy)
            if after is None:
                return _of_policy(policy)
            if after.phase == "backward" and blame.phase != "backward":
                scale = _scale_with(patient, policy)
                if scale is not None:
                    return _of_policy(policy, scale)
            if not is_same_place(after, blame):
                rules.append(rule)
                found = after
                break
        if found is blame:
            return None
        blame = found
    return None


def _rules_for(blame: Blame, model: nn.Module | None) -> Iterator[str]:
    module, op = blame.place.module, blame.place.op or blame.op
    if module and (
        model is None or module not in map(without_wrappers, dict(model.named_modules()))
    ):
        module = ""  # of another model
    if op and op != "_to_copy":
        yield f"{op}@{module}:fp32" if module else f"{op}:fp32"
    if module:
        yield f"@{module}:fp32"


def _with_rules(base: Policy, rules: list[str]) -> Policy | None:
    try:
        return Policy.parse("; ".join([str(base), *rules]))
    except ValueError:  # a name that no rule can have
        return None


def _replayed_with(patient: Patient, policy: Policy) -> Blame | None:
    setting = Setting(Precision(policy=policy), patient.scale)
    return patient.replayed(setting, nullcontext())


def is_same_place(one: Blame, other: Blame) -> bool:
    """Say whether two replays went bad at the same op of a module."""

    def place(blame: Blame) -> tuple[object, ...]:
        return (blame.place.op or blame.op, blame.place.module, blame.phase)

    return place(one) == place(other)


def _scale_with(patient: Patient, policy: Policy) -> float | None:
    """Return a scale at which a step under a policy is finite, None if there is none."""
    if patient.scale is None:
        return None
    for factor in _SCALE_FACTORS:
        scale = max(patient.scale * factor, SMALLEST_SCALE)
        if patient.is_finite(Setting(Precision(policy=policy), scale)):
            return scale
    return None


def _of_policy(policy: Policy, scale: float | None = None) -> Cure:
    module = ", module=model" if policy.module_rules else ""
    text = f'halfstep.autocast(..., policy="{policy}"{module})'
    if scale is not None:
        text += f"  # at a scale of {_literal(scale)}, to which a GradScaler backs off by itself"
    return Cure("policy", text, is_finite=True, policy=str(policy), scale=scale)


def of_maths(patient: Patient, bad: BadOp) -> Cure | None:
    """Return the edit that keeps an op away from where it is not defined."""
    edit, line = edit_for(bad), bad.forward_line or bad.line
    if edit is None or line is None:
        return edit_of(bad)
    setting = Setting(AS_IT_IS, patient.scale)
    is_finite = patient.replayed(setting, Editing(edit, line)) is None
    return Cure("code", edit.text, is_finite=is_finite)


def edit_of(bad: BadOp) -> Cure | None:
    """Return that edit without a replay."""
    edit = edit_for(bad)
    return None if edit is None else Cure("code", edit.text)


def narrowest_rule(blame: Blame, model: nn.Module | None) -> Cure | None:
    """Return a policy with a rule for an op that needs a wider dtype, without a replay."""
    for rule in _rules_for(blame, model):
        policy = _with_rules(preset("standard"), [rule])
        if policy is not None:
            return replace(_of_policy(policy), is_finite=None)
    return None


def power_below(scale: float) -> float:
    """Return the largest power of two that is not larger."""
    return float(2.0 ** math.floor(math.log2(scale)))


def _literal(scale: float) -> str:
    return f"{scale:g}" if scale <= 65536 else f"2.0**{math.log2(scale):g}"
