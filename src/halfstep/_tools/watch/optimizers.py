"""The optimizer's side of bad steps: its settings, its learning rate and its state."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, starmap
from numbers import Number
from pathlib import Path
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.numbers import listed, number, power
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import is_pytorchs, members
from halfstep._scaler import GradScaler
from halfstep._scaler.access import is_unscaled
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis, pasted
from halfstep._tools.measure import is_finite
from halfstep._tools.replay.blame import name_in_code, names_in
from halfstep._tools.replay.kept_calls import Made
from halfstep._tools.source import Source
from halfstep._tools.user_code import (
    is_users,
    model_of,
    tree_of,
    user_line,
    user_place,
    variable_of,
)
from halfstep._tools.watch.bad_steps import have_finite_values
from halfstep._tools.watch.schedules import (
    lines_that_set,
    lines_with,
    of_function,
    of_lines,
    schedules_of,
)

_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SETTINGS = frozenset(
    ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "betas", "rho", "lambd")
)
"""The numbers in a group that steps compute with; others may be infinite on purpose."""
_USUAL_DECAY = 0.01


def with_bad_setting(optimizer: Optimizer) -> Diagnosis | None:
    """Return the diagnosis of an optimizer whose next step has a number that is not finite.

    Sync: none; a setting that is a tensor on an accelerator is not read.
    """
    for name, value in _settings(optimizer):
        if isinstance(value, complex) or not math.isfinite(value):
            of, line = type(optimizer).__name__, user_line()
            schedules = schedules_of(optimizer) if name == "lr" else []
            why = f"{name} of {of} is {value}, and so is every weight after this step"
            names = {name, *(type(each).__name__ for each in schedules)}
            text = f"{why}: check what sets it: {variable_of(optimizer)}.param_groups[0][{name!r}]"
            lines = lines_that_set(names, [line.file] if line else [])
            cure = of_function(schedules, why) or of_lines(name, why)
            cure = cure or Cure("data", "\n".join([text, *lines]))
            return Diagnosis("data", tensor=f"{name} of {of}", cure=cure)
    return None


Search = Literal["PyTorch's", "own"]  # a line search of an optimizer, by whose code it is


def search_of(optimizer: Optimizer) -> Search | None:
    """Return the line search that the calls of an optimizer's closure are, or None."""
    if any(group.get("line_search_fn") for group in _groups(optimizer)):
        return "PyTorch's"
    step = inspect.unwrap(type(optimizer).step)  # PyTorch has wrapped it
    return "own" if _has_search(step.__code__) else None


@cache  # asked in each step with a closure
def _has_search(code: CodeType) -> bool:
    """Return whether a step of the user has a loop that calls its closure and compares numbers."""
    closure, is_own = code.co_varnames[1:2], is_users(code.co_filename)
    for loop in ast.walk(tree_of(code.co_filename).root) if is_own else ():
        nodes = [*ast.walk(loop)] if isinstance(loop, ast.For | ast.While) else []
        is_called = any(isinstance(n, ast.Call) and ast.unparse(n.func) in closure for n in nodes)
        if is_called and any(isinstance(node, _ORDERS) for node in nodes):
            return True
    return False


def still_scaled(optimizer: Optimizer, scaler: GradScaler | None) -> Diagnosis | None:
    """Return the diagnosis of an optimizer that steps with gradients of scaled losses; or None."""
    if scaler is None or is_unscaled(scaler, optimizer):
        return None
    of, where = type(optimizer).__name__, _where()
    event = (
        f"the gradients of this step of {of} are still multiplied by the scale "
        f"({power(scaler.get_scale())}){where}"
    )
    own, by = variable_of(optimizer), variable_of(scaler, "scaler")
    text = f"{by}.step({own})  # in place of {own}.step(); then {by}.update()"
    return Diagnosis("optimizer", happened=event, cure=Cure("code", text))


_SUMS = ("add", "iadd", "sum", "mean", "stack")  # and no division, as by the scale


def scaled_again(
    losses: Iterable[Tensor], made_by: Callable[[Tensor], Made | None]
) -> Diagnosis | None:
    """Return the diagnosis of a loss that is a sum of losses which are scaled already; or None."""
    calls = [made.call for loss in losses if (made := made_by(loss)) is not None]
    for call in calls:
        calls += call.of if call.name.strip("_") in _SUMS else ()
    if not any(call.name == "scale" for call in calls):
        return None
    event = (
        f"this loss is multiplied by the scale twice{_where()}: its gradients are divided by it "
        "once, and so are still multiplied by it"
    )
    cure, place = Cure("code", "scale each loss, or their sum, and not both"), user_place()
    match place and place.node:
        case ast.Call(args=[loss]) as node:
            source = Source(place.code.co_filename)  # type: ignore[union-attr]
            edits = source.put(node, ast.unparse(loss)) and source.edited()
            cure = pasted(edits) if edits else cure
    return Diagnosis("optimizer", happened=event, cure=cure)


def not_skipped(optimizer: Optimizer) -> Diagnosis | None:
    """Return the diagnosis of a step beside the scaler with bad gradients; or None. Sync: one."""
    gradients = (w.grad for w in parameters(optimizer) if w.grad is not None)
    if not is_pytorchs(optimizer) or have_finite_values(gradients):  # another may clean them
        return None
    of, where = type(optimizer).__name__, _where()
    event = (
        f"this step of {of}{where} is not the scaler's, which skips gradients with inf or NaN as "
        "these are"
    )
    text = (
        "leave this line out if scaler.step(optimizer) stands before it, which has stepped or "
        "skipped already; else put scaler.step(optimizer) in its place"
    )
    return Diagnosis("optimizer", happened=event, cure=Cure("code", text))


def _where() -> str:
    line = user_line()
    return "" if line is None else f" ({Path(line.file).name}:{line.number})"


def _settings(optimizer: Optimizer) -> Iterator[tuple[str, float | complex]]:
    for group in _groups(optimizer):
        for name in _SETTINGS.intersection(group):
            value = group[name]
            for each in value if isinstance(value, tuple) else (value,):
                on_cpu = isinstance(each, Tensor) and each.device.type == "cpu"
                if isinstance(each, Number) or (on_cpu and each.numel() == 1):
                    yield name, each if isinstance(each, complex) else float(each)


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for member in members(optimizer) for group in member.param_groups]


_CLIP = "torch.nn.utils.clip_grad_norm_({model}.parameters(), 1.0)"
SQUARED = (
    "{} is inf, and the rest of the state and the weight are finite, so a gradient was too large "
    "to be squared. Check why, as unscaled data or a loss without a mean"
)


def with_bad_state(
    optimizer: Optimizer,
    model: Callable[[], nn.Module | None],
    written: Callable[[Tensor], list[str]],
    *,
    is_loaded: bool,
    checked: Sequence[int],
) -> Diagnosis | None:
    """Return the diagnosis of an optimizer whose state has inf or NaN before a step.

    ``written`` returns what is to be said of the line that last wrote to a tensor, if one did.
    ``checked`` are the steps before which the state was checked, this one last.
    """
    of = type(optimizer).__name__
    for weight, state in getattr(optimizer, "state", {}).items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and not is_finite(value):
                name, line = names_in(model())(weight) or name_in_code(weight), user_line()
                which = ", the first one with a state that was loaded or set" if is_loaded else ""
                loads = lines_with(line.file, {"load_state_dict"}) if line and is_loaded else []
                before = f"than that of {listed(loads)}" if loads else f"from before {key} went bad"
                bad = (
                    f"the state of {of}, with which it steps {name}, was not finite before this "
                    f"step{which}"
                )
                text = f"load an earlier checkpoint {before}: {bad}. Else begin with a new {of}"
                rest = [v for k, v in state.items() if k != key and isinstance(v, Tensor)]
                is_square = "sq" in key and not is_loaded and not bool(value.isnan().any())
                if is_square and all(map(is_finite, [weight, *rest])):
                    clip = _CLIP.format(model=model_of(parameters(optimizer)))
                    text = f"{clip}  # before each step of a new run\n{bad}: {SQUARED.format(key)}"
                lines = written(value)
                text = "\n".join([*lines, text] if is_loaded or not lines else lines)
                tensor = f"{key} of {name} in {of}"
                last_two = [] if is_loaded else [*pairwise(checked)][-1:]
                notes = tuple(starmap(_between, last_two))
                return Diagnosis("data", tensor=tensor, cure=Cure("data", text), notes=notes)
    return None


def _between(good: int, bad: int) -> str:
    """Return in which step the state went bad that was finite before the first of two steps."""
    which = f"step {good}" if bad == good + 1 else f"one of the steps {good} to {bad - 1}"
    return f"the state was finite before step {good}, so it went bad in {which}"


def of_settings(optimizer: Optimizer, begun: float = math.inf) -> str:
    """Return the cure of a setting that makes weights larger, as a momentum may; else nothing."""
    if type(optimizer) is torch.optim.LBFGS and not _groups(optimizer)[0]["line_search_fn"]:
        return 'LBFGS(..., line_search_fn="strong_wolfe")  # limits its steps; or a lower lr'
    is_of_sgd = type(optimizer) is torch.optim.SGD
    for group in _groups(optimizer):
        if group.get("maximize"):
            return f"{type(optimizer).__name__}(..., maximize=False)  # True lets the loss grow"
        momentum = group.get("momentum")
        if isinstance(momentum, float | int) and momentum >= 1:
            return f"lower momentum: at {momentum:g} past gradients never decay; 0.9 is usual"
        rate, decay = group.get("lr"), group.get("weight_decay")
        is_direct = is_of_sgd or group.get("decoupled_weight_decay", False)
        rate = min(rate, begun) if isinstance(rate, float) else 0.0  # not one raised since
        if is_direct and decay and decay > _USUAL_DECAY and rate * decay > 2:  # else lr is too high
            return (
                f"lower weight_decay: {decay:g} at lr={rate:g} multiplies each weight by "
                f"1 - {rate:g} * {decay:g} = {1 - rate * decay:g} in a step. Below 2 / lr = "
                f"{2 / rate:g} weights shrink; weight_decay={_USUAL_DECAY} is usual"
            )
    return ""


# --- learning rates that rise ---------------------------------------------------------------------

_BOUNDS = {
    **dict.fromkeys(("ExponentialLR", "StepLR", "MultiStepLR"), "give it a gamma of at most 1"),
    **dict.fromkeys(("LambdaLR", "MultiplicativeLR"), "bound what its function returns"),
    **dict.fromkeys(("OneCycleLR", "CyclicLR"), "give it a lower max_lr"),
    "LinearLR": "give it a lower end_factor",
}


def rate_of(optimizer: Optimizer) -> float:
    """Return the largest learning rate of an optimizer; 0 if it has none."""
    rates = (group["lr"].real for group in _groups(optimizer) if "lr" in group)
    return max(map(float, rates), default=0.0)


def first_rate(optimizer: Optimizer, measured: float) -> float:
    """Return the learning rate that a schedule began with, else the one that was measured."""
    begun = [float(group["initial_lr"]) for group in _groups(optimizer) if "initial_lr" in group]
    return max(begun, default=measured)


def of_high_rate(optimizer: Optimizer, growths: Sequence[float], *, clips: bool) -> str:
    """Return the cure of steps that are too long, in which a weight grew so many-fold each.

    ``growths`` are of a step between each two that were measured, the last one to the bad step.
    """
    text, rate = f"lower the learning rate of {type(optimizer).__name__}", rate_of(optimizer)
    growth, before = growths[-1], growths[-2:][0]
    # Of a linear model, each step multiplies by the same number; others grow ever faster.
    is_steady = len(growths) > 1 and growth < max(before, 1.0) ** 1.5
    if type(optimizer) is torch.optim.SGD and (2 < growth < 1000 or (growth > 2 and is_steady)):
        # Of a loss near a parabola, whose curvature c multiplies by 1 - lr * c.
        much = f"at {number(rate)} its largest weight grew {number(growth)}-fold a step"
        return f"{text} to {number(rate / (growth + 1))}: {much}"
    clip = _CLIP.format(model=model_of(parameters(optimizer)))
    # Steps of Adam and its like are as long with smaller gradients.
    clips &= not any({"betas", "eps"} & group.keys() for group in _groups(optimizer))
    return f"{text}, or clip the gradients before its step:\n{clip}" if clips else text


def of_raised_rate(optimizer: Optimizer, begun: float, files: Iterable[str]) -> str:
    """Return the cure of a learning rate that the code has raised, with its lines.

    The lines are those of the first file that makes the schedules of the optimizer, or writes to
    ``["lr"]``: of ``files``, or else of the modules of the program.
    """
    schedules = dict.fromkeys(type(each).__name__ for each in schedules_of(optimizer))
    who, advice = listed([*schedules]) or "the loop", _BOUNDS.get(next(iter(schedules), ""), "")
    text = (
        f"{who} raised the learning rate of {type(optimizer).__name__} from {number(begun)} to "
        f"{number(rate_of(optimizer))}: {advice or 'let it end at a lower rate'}"
    )
    return "\n".join([text, *lines_that_set({"lr", *schedules}, files)])


def of_negative_rate(optimizer: Optimizer, files: Iterable[str]) -> Cure | None:
    """Return the cure of a learning rate below 0, with which steps raise the loss, or None."""
    rates = [
        float(group.get("lr", 0).real) for group in _groups(optimizer) if not group.get("maximize")
    ]
    rate, schedules = min(rates, default=0.0), schedules_of(optimizer)
    if not rate < 0:
        return None
    why = f"the learning rate of {type(optimizer).__name__} is {number(rate)}"
    names = dict.fromkeys(type(each).__name__ for each in schedules)
    by = f"{listed([*names]) or 'the loop'} to end at 0: below 0, each step raises the loss"
    lines = lines_that_set({"lr", *names}, files)
    return of_function(schedules, why) or Cure("code", "\n".join([f"{why}: change {by}", *lines]))
