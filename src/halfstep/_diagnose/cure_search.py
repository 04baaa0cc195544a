"""Search for a cure: replays a step with one change after another until it is finite.

A change is a smaller scale, more rules, another dtype, or an edit of the user's code. An edit is
text to paste. In a replay it is carried out above autograd: calls of the function at the line get
other arguments, as if the line had been edited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep._autocast.modules import without_wrappers
from halfstep._autocast.policy import Policy, preset
from halfstep._diagnose.blame import OUTSIDE, Blame, scan
from halfstep._diagnose.diagnosis import BadOp, Cure, Line
from halfstep._diagnose.replay import Replayer, StepRun
from halfstep._diagnose.user_code import user_line
from halfstep._diagnose.variant import Variant
from halfstep._numerics.formats import FORMATS
from halfstep._trace.places import OpPlace

Change = Callable[[list[Any]], None]
"""Changes the list of arguments of a call in place."""


class Edit(NamedTuple):
    """Edit of a line that keeps functions of PyTorch away from values where they are not defined.

    In its text, ``...`` stands for the old expression.
    """

    text: str
    functions: tuple[str, ...]
    change: Change


_DIVISIONS = ("div", "div_", "true_divide", "__truediv__", "__itruediv__", "divide")
_RECIPROCALS = ("reciprocal", "reciprocal_", "__rtruediv__", "__rdiv__")


def _clamped(low: float | None, high: float | None) -> Change:
    def change(args: list[Any]) -> None:
        args[0] = args[0].clamp(low, high)

    return change


def _raised(position: int, eps: float) -> Change:
    def change(args: list[Any]) -> None:
        if len(args) > position and isinstance(args[position], Tensor):
            args[position] = args[position] + eps

    return change


def _clamp_to_dtype(args: list[Any]) -> None:
    args[0] = args[0].clamp_min(torch.finfo(args[0].dtype).min)


def edit_for(bad: BadOp) -> Edit | None:
    """Return the edit that keeps an op finite, None if none is known."""
    name = (bad.forward_op or bad.op).removesuffix("_").lstrip("_")
    dtype = next((operand.dtype for operand in bad.inputs), "float32")
    eps = 1e-3 if dtype == "float16" else 1e-6
    edge, both = 1 - eps, (name, f"{name}_")
    match name:
        case "log" | "log2" | "log10":
            return Edit(f"torch.{name}((...).clamp_min({eps:g}))", both, _clamped(eps, None))
        case "log1p":
            return Edit(f"torch.log1p((...).clamp_min({-edge:g}))", both, _clamped(-edge, None))
        case "div":
            return Edit(f"(...) / (... + {eps:g})", _DIVISIONS, _raised(1, eps))
        case "reciprocal":
            return Edit(f"1 / (... + {eps:g})", _RECIPROCALS, _raised(0, eps))
        case "sqrt" | "rsqrt":
            return Edit(f"torch.{name}(... + {eps:g})", both, _raised(0, eps))
        case "pow":
            return Edit(f"(... + {eps:g}) ** (...)", ("pow", "__pow__", "pow_"), _raised(0, eps))
        case "exp" | "expm1" | "exp2" | "cosh" | "sinh":
            # Well below the limit, since a sum may follow.
            high = math.floor(0.9 * math.log(torch.finfo(getattr(torch, dtype)).max))
            return Edit(f"torch.{name}((...).clamp_max({high}))", both, _clamped(None, high))
        case "acos" | "asin" | "atanh":
            text = f"torch.{name}((...).clamp({-edge:g}, {edge:g}))"
            return Edit(text, both, _clamped(-edge, edge))
        case "softmax" | "log_softmax" | "safe_softmax":
            text = "(...).masked_fill(..., torch.finfo(torch.float16).min)  # in place of -inf"
            return Edit(text, ("softmax", "log_softmax"), _clamp_to_dtype)
        case _:
            return None


class EditMode(TorchFunctionMode):
    """Carries out an edit of a line while it is active."""

    def __init__(self, edit: Edit, line: Line) -> None:
        super().__init__()
        self._edit, self._line = edit, line

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, with other arguments if the call is the one to edit."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self._edit.functions:
            line = user_line()
            if line and (line.file, line.number) == (self._line.file, self._line.number):
                changed = list(args)
                self._edit.change(changed)
                args = tuple(changed)
        return func(*args, **kwargs)


# --- trials ---------------------------------------------------------------------------------------

MOST_RULES = 3
"""The most rules that are added to a policy before another dtype is tried."""
SMALLEST_SCALE = 1.0
"""The smallest loss scale that is tried."""
_SCALE_FACTORS = (2.0**-4, 2.0**-10, 0.0)


class CureTrial:
    """Replays of a bad step with one change after another.

    Args:
        replayer: Replays the step.
        run: A run of the step without changes.
    """

    def __init__(self, replayer: Replayer, run: StepRun) -> None:
        self._replayer = replayer
        self.model, self.entered, self.scale = replayer.model, run.entered, run.scale

    def blame(
        self, variant: Variant, around: AbstractContextManager[object] | None = None
    ) -> Blame | None:
        """Return the blame of a replay, None if it is finite."""
        found = scan(self._replayer, variant, around)
        error = found.run.error
        if error is not None and found.blame is None:
            self._replayer.notes.append(f"a replay ended with {type(error).__name__}: {error}")
            return Blame(OUTSIDE, "", OpPlace(), "forward", OUTSIDE)
        return found.blame


def smaller_scale(
    trial: CureTrial, scale: float, bad: BadOp, largest: float | None
) -> float | None:
    """Return a smaller scale of at least 1, a power of two, at which the step is finite, or None.

    Args:
        trial: The step.
        scale: The scale at which it is not finite.
        bad: The op that overflows.
        largest: The largest magnitude, in float32, of the float16 values of the backward pass.
    """
    limit = bad.limit or FORMATS["fp16"].largest
    needed = max(filter(None, (largest, bad.needs)), default=16 * limit)
    first = power_below(scale * min(limit / needed / 2, 0.5))  # one bit of headroom
    for candidate in (first, first / 16, first / 256, SMALLEST_SCALE):
        if candidate >= SMALLEST_SCALE and trial.blame(Variant(scale=candidate)) is None:
            return candidate
    return None


def of_scale(scale: float, *, is_finite: bool | None = None) -> Cure:
    """Return the cure of a smaller scale."""
    text = (
        f"halfstep.GradScaler(init_scale={_scale_text(scale)}, max_scale={_scale_text(scale)})  "
        f"# in a run: scaler.update(new_scale={_scale_text(scale)})"
    )
    return Cure("scale", text, is_finite, scale=scale)


def of_range(trial: CureTrial, blame: Blame, bad: BadOp) -> Cure:
    """Return the cure of rules, or of another dtype, that can hold the values."""
    if not trial.entered:
        what = bad.forward_op or bad.op
        return Cure("code", f"compute {what} there in float32: pass x.float()")
    entered = trial.entered[0]
    cure = _of_rules(trial, blame, entered.policy or preset("standard"))
    if cure is not None:
        return cure
    in_bf16, in_float32 = (
        Variant(dtype, scale=trial.scale) for dtype in (torch.bfloat16, torch.float32)
    )
    if entered.dtype is not torch.bfloat16 and trial.blame(in_bf16) is None:
        text = f'halfstep.autocast("{entered.device}", dtype=torch.bfloat16)'
        return Cure("dtype", text, is_finite=True, dtype="bfloat16")
    if trial.blame(in_float32) is None:
        text = f'halfstep.autocast("{entered.device}", enabled=False)  # float32'
        return Cure("dtype", text, is_finite=True, dtype="float32")
    return Cure("code", "autocast did not choose this dtype: cast to another one with x.float()")


def _of_rules(trial: CureTrial, blame: Blame, base: Policy) -> Cure | None:
    """Add a rule for each op that goes bad, the narrowest rule first."""
    rules: list[str] = []
    for _ in range(MOST_RULES):
        for rule in _rules_for(blame, trial.model):
            policy = _with_rules(base, [*rules, rule])
            if policy is None or rule in rules:
                continue
            after = trial.blame(Variant(policy=policy, scale=trial.scale))
            if after is None:
                return _of_policy(policy, is_finite=True)
            if after.phase == "backward" and blame.phase != "backward":
                scale = _scale_with(trial, policy)
                if scale is not None:
                    return _of_policy(policy, scale, is_finite=True)
            if after.where != blame.where:  # one rule is not enough
                rules.append(rule)
                blame = after
                break
        else:
            return None
    return None


def _rules_for(blame: Blame, model: nn.Module | None) -> Iterator[str]:
    module, op = blame.place.module, blame.place.op or blame.op
    if module and (
        model is None or module not in map(without_wrappers, dict(model.named_modules()))
    ):
        module = ""  # it belongs to another model
    if op and op != "_to_copy":
        yield f"{op}@{module}:fp32" if module else f"{op}:fp32"
    if module:
        yield f"@{module}:fp32"


def _with_rules(base: Policy, rules: list[str]) -> Policy | None:
    try:
        return Policy.parse("; ".join([str(base), *rules]))
    except ValueError:  # the name is not valid in a rule
        return None


def _scale_with(trial: CureTrial, policy: Policy) -> float | None:
    """Return a scale at which a step under a policy is finite, None if there is none."""
    if trial.scale is None:
        return None
    for factor in _SCALE_FACTORS:
        scale = max(trial.scale * factor, SMALLEST_SCALE)
        if trial.blame(Variant(policy=policy, scale=scale)) is None:
            return scale
    return None


def _of_policy(policy: Policy, scale: float | None = None, *, is_finite: bool | None) -> Cure:
    module = ", module=model" if policy.module_rules else ""
    text = f'halfstep.autocast(..., policy="{policy}"{module})'
    if scale is not None:
        text += f"  # at a scale of {_scale_text(scale)}; a GradScaler backs off to it by itself"
    return Cure("policy", text, is_finite, policy=str(policy), scale=scale)


def of_maths(bad: BadOp, trial: CureTrial | None = None) -> Cure | None:
    """Return the cure of an edit that keeps an op away from values where it is not defined."""
    edit, line = edit_for(bad), bad.forward_line or bad.line
    if edit is None:
        return None
    is_finite: bool | None = None
    if trial is not None and line is not None:
        is_finite = trial.blame(Variant(scale=trial.scale), EditMode(edit, line)) is None
    return Cure("code", edit.text, is_finite)


def narrowest_rule(blame: Blame, model: nn.Module | None) -> Cure | None:
    """Return the cure of a rule for an op that needs a wider dtype, without a replay."""
    policies = (_with_rules(preset("standard"), [rule]) for rule in _rules_for(blame, model))
    policy = next(filter(None, policies), None)
    return None if policy is None else _of_policy(policy, is_finite=None)


def power_below(scale: float) -> float:
    """Return the largest power of two that is not larger than a scale."""
    return float(2.0 ** math.floor(math.log2(scale)))


def _scale_text(scale: float) -> str:
    return f"{scale:g}" if scale <= 65536 else f"2.0**{math.log2(scale):g}"
