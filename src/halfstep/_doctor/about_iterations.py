"""The calls of an iteration: too early, too late, twice, or missing.

``Iteration`` is the state of the gradients, the optimizers and the scalers at one point of the
source; ``_Simulation`` computes the next one for each call on each path through the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import NameScope, dotted
from halfstep._doctor.read_paths import Names, Path, Walk, call_key, condition_of
from halfstep._doctor.read_program import Program, Root
from halfstep._doctor.read_sites import Site
from halfstep._doctor.read_values import argument

_UNKNOWN = -1
_AMP = "<mixed precision>"
_AMP_WORDS = re.compile(r"amp|fp16|float16|half|mixed|scaler|precision|autocast|scaling", re.I)
_OPAQUE = re.compile(r"backward|optim|step|train|closure|scale", re.I)
"""Names of functions of other files that may run a backward pass, or step."""
_RELEVANT = re.compile(rf"zero_grad|update|clip|div_|mul_|{_OPAQUE.pattern}", re.I)
_OBJECTS = re.compile(r"(opt\w*|optim\w*|scaler)(\[.*\])?$", re.I)
_LOSSES = re.compile(r"loss|cost|err|objective", re.I)
_METHODS = ("backward", "step", "zero_grad", "unscale_", "update", "get_scale", "scale")
_STEPS = re.compile(r"step|batch|iter|update|__call__|optimi", re.I)
"""Names of functions that run once for each step."""
_KEEPING = ("mean", "sum", "to", "float", "squeeze", "view", "reshape", "cuda", "half", "double")
_ADDING = ("sum", "torch.stack", "torch.cat", "torch.mean", "torch.sum", "torch.add", "max", "min")
_Calls: TypeAlias = "frozenset[tuple[str, str, int]]"
"""Calls of a scaler for an optimizer: the two, and the line."""


@dataclass(frozen=True)
class Iteration:
    """What happened since the last steps, on one path."""

    losses: frozenset[int] = frozenset()  # scaled how often; of the gradients that wait
    scaler: str = ""  # that scaled the last loss
    line: int = 0  # of a backward pass, of one that is not scaled if there is any
    loss: str = ""  # of this pass
    is_used: bool = False  # a step has used the gradients
    is_dropped: bool = False  # zero_grad came after the backward pass
    is_uncertain: bool = False  # a call that is not known may have changed them
    unscaled: _Calls = frozenset()  # since update
    is_unscaled: bool = False  # since the last backward pass
    stepped: _Calls = frozenset()  # since update
    clipped: int = 0  # the line that clipped scaled gradients
    has_clip: bool = False  # since update
    zeroed: frozenset[tuple[str, int]] = frozenset()  # optimizers whose gradients were dropped
    updated: frozenset[tuple[str, int]] = frozenset()  # scalers, since the last backward pass
    made: frozenset[tuple[str, tuple[int, ...], int]] = frozenset()  # scalers, their loops, lines


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with the calls of an iteration."""
    for root in program.roots:
        if any(program.is_backward(site) or site.method == "step" for site in root.sites):
            calls = _Simulation(program, root)
            Walk(program.meaning, calls).sites(root.node, Iteration())
            yield from {(each.id, each.line): each for each in calls.found}.values()
        yield from _schedules(program, root)
    yield from _never_updated(program)
    yield from _closures(program)


class _Simulation:
    """Follows the calls on each path."""

    def __init__(self, program: Program, root: Root) -> None:
        self.program = program
        self.is_step = bool(_STEPS.search(getattr(root.node, "name", "")))
        self.found: list[Finding] = []
        self._kinds: dict[ast.Call, str] = {}

    # --- what the walk asks for -------------------------------------------------------------------

    def may_matter(self, call: ast.Call) -> bool:
        """Return whether a call may be relevant, by its name and arguments."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        return bool(_RELEVANT.search(name)) or any(
            dotted(each).lower().endswith("scaler") for each in arguments
        )

    def is_relevant(self, site: Site, walk: Walk) -> bool:
        """Return whether a call may change the state."""
        kind = self._kinds.get(site.call)
        if kind is None:
            kind = self._kinds[site.call] = self._kind(site, walk)
        return bool(kind)

    def _kind(self, site: Site, walk: Walk) -> str:
        program = self.program
        if site.method in _METHODS:
            return "method"
        if program.is_clip(site):
            return "clip"
        if program.meaning.makes_scaler(site.call, site.scope):
            return "scaler"
        return "other" if walk.followed(site) is None and self._may_change(site) else ""

    def is_object(self, key: str) -> bool:
        """Return whether a key is that of an optimizer or a scaler."""
        return bool(_OBJECTS.search(key)) and "(" not in key

    def is_loss(self, key: str) -> bool:
        """Return whether a name is that of a loss."""
        return bool(_LOSSES.search(key))

    def after_call(self, site: Site, path: Path, walk: Walk) -> Hashable:
        """Return the state after a call."""
        now = path.state
        assert isinstance(now, Iteration)
        key = walk.key(site.owner, site.scope, path.names)
        if self._kinds[site.call] == "scaler":
            return self._made(now, site, path.names, walk)
        program, method = self.program, site.method
        if program.is_backward(site):
            return self._backward(now, site, path.names, walk)
        if self._is_scaler(site.owner, site.scope, key):
            return self._of_scaler(now, site, key, path.names, walk)
        if method == "step" and (
            program.meaning.is_optimizer(site.owner, site.scope) or _is_optimizer_name(key)
        ):
            return self._plain_step(now, site, key)
        if method == "zero_grad":
            return self._zero_grad(now, site, key)
        if self._kinds[site.call] == "clip":
            is_scaled = max(now.losses, default=0) > 0 and not now.is_uncertain
            if is_scaled and not now.is_unscaled and not now.is_used:
                now = replace(now, clipped=site.line)
            return replace(now, has_clip=True)
        if walk.followed(site) is not None or not self._may_change(site):
            return now
        cleared = replace(now, unscaled=frozenset(), stepped=frozenset(), zeroed=frozenset())
        return replace(cleared, is_uncertain=True, updated=frozenset())

    def after_assignment(self, key: str, value: ast.expr | None, state: Hashable) -> Hashable:
        """Return the state after a variable got a new value: it is another object."""
        assert isinstance(state, Iteration)
        if not any(key in pair for pair in (*state.unscaled, *state.stepped, *state.zeroed)):
            return state
        return replace(
            state,
            unscaled=frozenset(pair for pair in state.unscaled if key not in pair),
            stepped=frozenset(pair for pair in state.stepped if key not in pair),
            zeroed=frozenset(pair for pair in state.zeroed if key not in pair),
        )

    def after_failure(self, state: Hashable) -> Hashable:
        """Return the state after an exception was caught: gradients may be of any kind."""
        assert isinstance(state, Iteration)
        return replace(state, is_uncertain=True, zeroed=frozenset())

    def condition(self, test: str) -> tuple[str, int]:
        """Return one name for all conditions that say whether the loss is scaled."""
        which = self._switches.get(test)
        return (test, 0) if which is None else (_AMP, which)

    @cached_property
    def _switches(self) -> Mapping[str, int]:
        """The conditions with a scaler in one arm and plain calls in the other."""
        found: dict[str, int] = {}
        for node in ast.walk(self.program.tree):
            match node:
                case ast.If(test=test, body=body, orelse=orelse):
                    arms = [_calls_in(body), _calls_in(orelse)]
                case ast.IfExp(test=test, body=yes, orelse=no):
                    arms = [_calls_in([yes]), _calls_in([no])]
                case _:
                    continue
            scales = ["scaler" in arm for arm in arms]
            plain = [not scaled and bool(arm) for scaled, arm in zip(scales, arms, strict=True)]
            text, which = condition_of(test, 0)
            is_named = bool(_AMP_WORDS.search(text)) and not arms[1] and scales[0]
            if (scales[0] and plain[1]) or (is_named and not isinstance(test, ast.BoolOp)):
                found[text] = which
            elif scales[1] and plain[0]:
                found[text] = 1 - which
        return found

    # --- losses -----------------------------------------------------------------------------------

    def value(self, node: ast.expr, scope: NameScope, names: Names, walk: Walk) -> int:
        """Return how often a value was multiplied by a scale; -1 if uncertain."""

        def of(part: ast.expr) -> int:
            return self.value(part, scope, names, walk)

        match node:
            case ast.Constant():
                return 0
            case ast.Name() | ast.Attribute():
                return self._named(node, scope, names, walk)
            case ast.Subscript(value=part) | ast.Starred(value=part) | ast.NamedExpr(value=part):
                return of(part)
            case ast.Call():
                return self._returned(node, scope, names, walk)
            case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
                return _added([of(left), of(right)])
            case ast.BinOp(left=left, right=right):
                if "scale" in ast.unparse(node).lower().replace("scaler.scale(", ""):
                    return _UNKNOWN
                factors = [of(e) for e in (left, right) if not isinstance(e, ast.Constant)]
                # A known loss times anything is not scaled; an unknown one may be.
                return _added([0] if 0 in factors and max(factors) <= 0 else factors)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return _added([of(part) for part in parts])
            case ast.IfExp(body=body, orelse=orelse):
                either = {of(body), of(orelse)}
                return either.pop() if len(either) == 1 else _UNKNOWN
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return _UNKNOWN if any(of(child) > 0 for child in inner) else 0

    def _named(
        self, node: ast.Name | ast.Attribute, scope: NameScope, names: Names, walk: Walk
    ) -> int:
        key = walk.key(node, scope, names)
        found = names.get(key)
        if isinstance(found, int):
            return found
        if "[*]" in key:
            return _UNKNOWN
        if isinstance(node, ast.Attribute):
            is_of_other = isinstance(node.value, ast.Name) and node.value.id != "self"
            return self.value(node.value, scope, names, walk) if is_of_other else _UNKNOWN
        is_local = node.id in scope.bindings and node.id not in scope.parameters
        return 0 if is_local else _UNKNOWN

    def _returned(self, call: ast.Call, scope: NameScope, names: Names, walk: Walk) -> int:
        """Return the same for the result of a call."""
        found = names.get(call_key(call))
        if isinstance(found, int):
            return found
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        values = [self.value(each, scope, names, walk) for each in arguments]
        if isinstance(call.func, ast.Attribute):
            owner, method = call.func.value, call.func.attr
            key = walk.key(owner, scope, names)
            if method == "scale" and self._is_scaler(owner, scope, key):
                return max([0, *values]) + 1 if self._is_on(owner, scope) else max([0, *values])
            if method in _KEEPING and not dotted(call.func).startswith("torch."):
                return self.value(owner, scope, names, walk)
        name = dotted(call.func)
        if name in _ADDING:
            return _added(values)
        is_opaque = "scale" in name.lower() or any("scale" in dotted(e).lower() for e in arguments)
        return _UNKNOWN if is_opaque or any(value > 0 for value in values) else 0

    def _is_scaler(self, node: ast.expr, scope: NameScope, key: str) -> bool:
        return key.lower().endswith("scaler") or self.program.meaning.is_scaler(node, scope)

    def _is_on(self, node: ast.expr, scope: NameScope) -> bool:
        scaler = self.program.meaning.scaler(node, scope)
        return scaler is None or scaler.enabled is not False

    # --- transitions ------------------------------------------------------------------------------

    def _backward(self, now: Iteration, site: Site, names: Names, walk: Walk) -> Iteration:
        loss: ast.expr | None = site.owner
        if site.call.args or dotted(site.owner) == "torch.autograd":
            is_function = dotted(site.owner) == "torch.autograd"
            loss = site.call.args[0] if is_function and site.call.args else None
        scaled = _UNKNOWN if loss is None else self.value(loss, site.scope, names, walk)
        scaler = self.program.scaled_by(site) or now.scaler or "scaler"
        if scaled > 1:
            self._report("scaled-twice", site.line, scaler=scaler, loss=_of(site.owner))
        fresh = Iteration(
            unscaled=now.unscaled, stepped=now.stepped, has_clip=now.has_clip, made=now.made
        )
        if now.losses and not (now.is_used or now.is_dropped):
            fresh = replace(fresh, losses=now.losses, is_uncertain=now.is_uncertain)
            fresh = replace(fresh, clipped=now.clipped)
        fresh = replace(fresh, losses=fresh.losses | {scaled}, scaler=scaler)
        if scaled == 0 or 0 not in now.losses:
            return replace(fresh, line=site.line, loss=_of(site.owner))
        return replace(fresh, line=now.line, loss=now.loss)

    def _of_scaler(
        self, now: Iteration, site: Site, key: str, names: Names, walk: Walk
    ) -> Iteration:
        if not self._is_on(site.owner, site.scope):
            return now
        given = argument(site.call, "optimizer", 0)
        match site.method:
            case "unscale_" if given is not None:
                return self._unscale(now, site, key, walk.key(given, site.scope, names))
            case "step" if given is not None:
                return self._step(now, site, key, walk.key(given, site.scope, names))
            case "update":
                return self._update(now, site, key)
            case "scale" if isinstance(site.statement, ast.Expr):
                self._check_use(site)
                return now
            case "scale" | "is_enabled" | "state_dict" | "load_state_dict" | "get_scale":
                is_read = site.method == "get_scale"
                return replace(now, is_uncertain=now.is_uncertain or is_read)
        return replace(now, is_uncertain=True)

    def _check_use(self, site: Site) -> None:
        """Report a scaled loss that is thrown away, where the loss itself is differentiated."""
        assert isinstance(site.statement, ast.Expr)
        loss, names = _of(argument(site.call, "outputs", 0)), {"scaler": _of(site.owner)}
        backward = (each for each in self.program.sites if self.program.is_backward(each))
        if site.statement.value is site.call and any(_of(each.owner) == loss for each in backward):
            self._report("loss-not-scaled", site.line, optimizer="optimizer", loss=loss, **names)

    def _unscale(self, now: Iteration, site: Site, scaler: str, optimizer: str) -> Iteration:
        pair = scaler, optimizer
        is_one = "[*]" not in optimizer
        is_stepped = pair in {each[:2] for each in now.stepped}
        lines = [line for *of, line in now.unscaled if tuple(of) == pair]
        # Where both are called again in the next pass, it is `update` that is missing.
        if is_one and (lines or is_stepped) and not (is_stepped and site.line in lines):
            first = "step" if is_stepped else "unscale_"
            self._report("unscale-twice", site.line, first=first, **_names(site))
        now = replace(now, updated=frozenset())  # gradients of a pass without a visible backward
        return replace(now, unscaled=now.unscaled | {(*pair, site.line)}, is_unscaled=True)

    def _step(self, now: Iteration, site: Site, scaler: str, optimizer: str) -> Iteration:
        lines = [line for a, b, line in now.stepped if (a, b) == (scaler, optimizer)]
        is_one = "[*]" not in optimizer
        is_certain = bool(now.losses) and not now.is_uncertain and len(site.call.args) < 2
        if lines and is_one and site.line not in lines:
            self._report("step-twice", site.line, first=lines[0], **_names(site))
        elif lines and is_one:
            self._report("update-missing", site.line, **_names(site))
        elif is_certain and is_one:
            self._check_step(now, site, scaler, optimizer)
        around = _loops(site)
        for key, loops, line in now.made:
            is_same = loops[: len(around)] == around and (bool(around) or self.is_step)
            if key == scaler and is_same:
                self._report("scaler-in-loop", line, **_names(site))
        stepped = now.stepped | {(scaler, optimizer, site.line)}
        return replace(now, stepped=stepped, is_used=True, zeroed=frozenset(), clipped=0)

    def _check_step(self, now: Iteration, site: Site, scaler: str, optimizer: str) -> None:
        names = _names(site)
        updated = [line for key, line in now.updated if key == scaler]
        zeroed = [line for key, line in now.zeroed if key == optimizer]
        if updated:
            self._report("update-before-step", updated[0], **names)
        elif zeroed and not now.is_used:
            self._dropped(now, site, zeroed[0], names["optimizer"])
        elif not (now.is_used or now.is_dropped) and (
            0 in now.losses or (max(now.losses) < 0 and self._is_idle(site))
        ):
            self._report("loss-not-scaled", now.line, loss=now.loss, **names)
        elif now.clipped:
            self._report("clip-before-unscale", now.clipped, **names)

    def _is_idle(self, site: Site) -> bool:
        """Return whether a scaler that is made in this file scales nothing in it."""
        made = self.program.meaning.scaler(site.owner, site.scope)
        scales = (each for each in self.program.sites if each.method == "scale")
        return (
            made is not None
            and bool(made.line)
            and not _is_inherited(self.program.tree, site)
            and not any(self._is_scaler(s.owner, s.scope, dotted(s.owner)) for s in scales)
        )

    def _dropped(self, now: Iteration, site: Site, line: int, optimizer: str) -> None:
        self._report("gradients-dropped", line, first=now.line, step=site.line, optimizer=optimizer)

    def _update(self, now: Iteration, site: Site, scaler: str) -> Iteration:
        unscaled = {b for a, b, _ in now.unscaled if a == scaler}
        stepped = {b for a, b, _ in now.stepped if a == scaler}
        is_one = not any("[*]" in key for key in unscaled | stepped)
        is_certain = max(now.losses, default=0) > 0 and not now.is_uncertain
        if is_certain and not now.is_used and not unscaled and not stepped:
            name = _of(site.owner)
            self._report("update-before-step", site.line, scaler=name, optimizer="optimizer")
        if is_one and now.has_clip and unscaled - stepped and stepped - unscaled:
            other, right = (_shown(min(s)) for s in (unscaled - stepped, stepped - unscaled))
            line = next(line for _, key, line in now.stepped if key not in unscaled)
            name = _of(site.owner)
            self._report("unscale-of-another", line, scaler=name, other=other, optimizer=right)
        return replace(
            now,
            unscaled=frozenset(pair for pair in now.unscaled if pair[0] != scaler),
            stepped=frozenset(step for step in now.stepped if step[0] != scaler),
            updated=now.updated | {(scaler, site.line)},
            has_clip=False,
        )

    def _plain_step(self, now: Iteration, site: Site, optimizer: str) -> Iteration:
        is_scaled = max(now.losses, default=0) > 0 and not now.is_uncertain
        zeroed = [line for key, line in now.zeroed if key == optimizer]
        names = {"scaler": now.scaler, "optimizer": _of(site.owner)}
        is_stepped = any(key == optimizer for _, key, _ in now.stepped)
        is_plain = not site.call.args and not site.call.keywords
        if is_plain and is_stepped and now.losses and not now.is_uncertain:
            first = next(line for _, key, line in now.stepped if key == optimizer)
            self._report("step-twice", site.line, first=first, **names)
        elif is_scaled and not now.is_used and is_plain:
            self._report("scaler-bypassed", site.line, **names)
        elif zeroed and now.losses and not now.is_uncertain and not now.is_used:
            self._dropped(now, site, zeroed[0], names["optimizer"])
        return replace(now, is_used=True, zeroed=frozenset(), clipped=0)

    def _zero_grad(self, now: Iteration, site: Site, key: str) -> Iteration:
        if now.is_used or not now.losses:
            return now
        optimizers = {key} if _is_optimizer_name(key) else self.program.optimizers_of(site.owner)
        zeroed = now.zeroed | {(each, site.line) for each in optimizers}
        return replace(now, zeroed=zeroed, is_dropped=True)

    def _made(self, now: Iteration, site: Site, names: Names, walk: Walk) -> Iteration:
        match site.statement:
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                key = walk.key(target, site.scope, names)
            case _:
                return now
        return replace(
            now,
            made=frozenset(each for each in now.made if each[0] != key)
            | {(key, _loops(site), site.line)},
            unscaled=frozenset(pair for pair in now.unscaled if pair[0] != key),
            stepped=frozenset(step for step in now.stepped if step[0] != key),
        )

    def _may_change(self, site: Site) -> bool:
        """Return whether a function of another file may step, or run a backward pass."""
        arguments = [*site.call.args, *(keyword.value for keyword in site.call.keywords)]
        if any(self._is_scaler(each, site.scope, dotted(each)) for each in arguments):
            return True
        if site.method in ("div_", "mul_"):
            return "grad" in ast.unparse(site.owner)
        if site.method in ("train", "eval"):
            return False
        name = dotted(site.call.func).rpartition(".")[2]
        is_hook = name.lower().startswith(("before_", "after_", "on_"))
        return (
            bool(_OPAQUE.search(name))
            and not is_hook
            and not self.program.meaning.is_scheduler(site.owner, site.scope)
        )

    # --- findings ---------------------------------------------------------------------------------

    def _report(self, id: str, line: int, **values: object) -> None:
        self.found.append(_finding(id, line, **values))


def _finding(id: str, line: int, **values: object) -> Finding:
    text, cure, code = (part.format(**values) for part in _TEXTS[id])
    names = [str(values[each]) for each in ("scaler", "optimizer", "loss") if each in values]
    return Finding(id, text, cure, code, tuple(names), line=line)


_TEXTS = {
    "clip-before-unscale": (
        "gradients are clipped while they are still multiplied by the scale (65536 at first) of "
        "`{scaler}`: after unscaling they are almost zero, and training looks stuck",
        "unscale before you clip, or let halfstep's `{scaler}` clip, in one pass less",
        "{scaler}.unscale_({optimizer})  # before clipping\n"
        "# or: {scaler}.step({optimizer}, max_norm=1.0)",
    ),
    "gradients-dropped": (
        "`zero_grad` stands between `backward` (line {first}) and the step of `{optimizer}` (line "
        "{step}): the gradients are gone before they are used, and nothing is learned",
        "call it before `backward`, or after the step",
        "",
    ),
    "loss-not-scaled": (
        "`{scaler}.step({optimizer})` divides gradients by the scale (65536 at first), but the "
        "loss of this `backward` was not multiplied by it: the updates are almost zero",
        "scale the loss whose gradients this step uses",
        "{scaler}.scale({loss}).backward()",
    ),
    "scaled-twice": (
        "`{loss}` is multiplied by the scale of `{scaler}` twice, and divided by it once: the "
        "gradients are 65536 times too large, or inf",
        "scale each loss once, in the call of `backward`",
        "{scaler}.scale(loss).backward()",
    ),
    "scaler-bypassed": (
        "`{optimizer}.step()` takes gradients that `{scaler}` has multiplied by the scale: "
        "they are 65536 times too large, and inf and NaN get through",
        "step through the scaler, then call `{scaler}.update()`",
        "{scaler}.step({optimizer})\n{scaler}.update()",
    ),
    "scaler-in-loop": (
        "a new `{scaler}` is made for each step: the scale starts at 65536 every time, never "
        "learns from an overflow, and the same steps are skipped again and again",
        "make one scaler before the loop, beside the optimizer",
        "",
    ),
    "step-twice": (
        "`{optimizer}` is stepped a second time with the same gradients (first in line {first}): "
        "the second `{scaler}.step` raises, and a plain step moves the weights twice",
        "step each optimizer once for each `{scaler}.update()`",
        "",
    ),
    "unscale-of-another": (
        "`{scaler}.unscale_({other})` before clipping, but it is `{optimizer}` that is stepped: "
        "its gradients are clipped while they are still multiplied by the scale",
        "unscale the optimizer whose gradients are clipped",
        "{scaler}.unscale_({optimizer})",
    ),
    "unscale-twice": (
        "`{scaler}.unscale_({optimizer})` comes after `{first}` of the same optimizer, without "
        "`{scaler}.update()` between: it raises, or the gradients are divided twice",
        "unscale once, before the step; with accumulation only in the pass that steps",
        "",
    ),
    "update-before-step": (
        "`{scaler}.update()` comes between `backward` and the step of `{optimizer}`: it raises "
        "where nothing was checked yet, else the gradients are divided by another scale than "
        "their loss was multiplied by",
        "update once, after all steps of the iteration",
        "{scaler}.step({optimizer})\n{scaler}.update()",
    ),
    "update-missing": (
        "`{scaler}.step` without `{scaler}.update()` before the next one: the scale never moves, "
        "and the second step is refused",
        "call it once at the end of each iteration, after the last step",
        "{scaler}.update()",
    ),
}
"""Text, cure and code of the findings."""


# --- names ----------------------------------------------------------------------------------------


def _is_optimizer_name(key: str) -> bool:
    last = re.split(r"[./]", re.sub(r"\[.*?\]$", "", key))[-1].lower()
    return "optim" in last or last.startswith("opt") or last.endswith("_opt")


def _of(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _optimizer(site: Site) -> str:
    """Return the argument of ``scaler.step`` or ``scaler.unscale_`` as text."""
    return _of(argument(site.call, "optimizer", 0)) or "optimizer"


def _names(site: Site) -> dict[str, str]:
    return {"scaler": _of(site.owner), "optimizer": _optimizer(site)}


def _shown(key: str) -> str:
    """Return a key as the source has it, without the function around it."""
    return key.rpartition("/")[2]


def _loops(site: Site) -> tuple[int, ...]:
    """Return the lines of the loops around a call."""
    return tuple(around.line for around in site.inside if around.kind == "loop")


def _added(values: Sequence[int]) -> int:
    """Return how often a sum was scaled, of how often its parts were."""
    most = max([0, *values])
    return most if most or _UNKNOWN not in values else _UNKNOWN


def _calls_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the calls of a training iteration below nodes: ``"scaler"`` for those of a scaler."""
    found: set[str] = set()
    for node in (inner for each in nodes for inner in ast.walk(each)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = dotted(node.func.value).lower()
            if owner.endswith("scaler"):
                found.add("scaler")
            elif node.func.attr in ("backward", "step"):
                found.add(node.func.attr)
    return found


# --- after the step -------------------------------------------------------------------------------


def _schedules(program: Program, root: Root) -> Iterator[Finding]:
    sites = root.sites
    steps = [site for site in sites if program.is_scaler_step(site)]
    for site in sites:
        call = site.call
        if site.method != "step" or call.args or call.keywords:
            continue
        if not program.meaning.is_scheduler(site.owner, site.scope):
            continue
        scheduler = dotted(site.owner)
        beside = [
            s for s in steps if s.around("loop") == site.around("loop") and not s.excludes(site)
        ]
        gates = [test for test in site.arms if "sched" not in test.lower()]
        ungated = [step for step in beside if set(gates) <= set(step.arms)]
        if not ungated or not scheduler:
            continue
        scaler = dotted(ungated[0].owner)
        known = program.meaning.scaler(ungated[0].owner, ungated[0].scope)
        yield Finding(
            "scheduler-ungated",
            f"`{scheduler}.step()` also runs after steps that `{scaler}` skipped, so that the "
            "learning rate moves on without the weights",
            "let the schedule wait for steps that were taken; keep it to count attempts",
            _gated(scaler, scheduler, known is not None and known.is_torch),
            (scheduler, scaler),
            line=site.line,
        )


def _gated(scaler: str, scheduler: str, is_torch: bool) -> str:
    if not is_torch:
        return f"{scaler}.step_scheduler({scheduler})  # after {scaler}.update()"
    return (
        f"# halfstep.GradScaler has a call for it; with PyTorch's:\n"
        f"scale = {scaler}.get_scale()\n{scaler}.update()\n"
        f"if {scaler}.get_scale() >= scale:\n    {scheduler}.step()"
    )


def _never_updated(program: Program) -> Iterator[Finding]:
    """Yield scalers that are made and used only in this file and never updated."""
    for site in program.sites:
        name = dotted(site.owner)
        made = program.meaning.scaler(site.owner, site.scope)
        if made is None or not made.line or not program.is_scaler_step(site):
            continue
        if not _is_handed_on(program.tree, name) and not _is_inherited(program.tree, site):
            yield _finding("update-missing", site.line, scaler=name, optimizer=_optimizer(site))


def _is_handed_on(tree: ast.Module, name: str) -> bool:
    """Return whether a scaler is updated, or is used in another way than by its methods."""
    last = name.rpartition(".")[2]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = {id(node.value) for node in attributes}
    is_updated = any(
        node.attr == "update" and dotted(node.value).rpartition(".")[2] == last
        for node in attributes
    )
    return is_updated or any(
        dotted(node) == name and isinstance(node.ctx, ast.Load) and id(node) not in owners
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )


def _is_inherited(tree: ast.Module, site: Site) -> bool:
    """Return whether the class has bases, which may use an attribute of ``self`` elsewhere."""
    return any(
        isinstance(node, ast.ClassDef) and node.name == site.scope.class_name and node.bases
        for node in ast.walk(tree)
    )


def _closures(program: Program) -> Iterator[Finding]:
    for site in program.sites:
        if not program.is_scaler_step(site) or len(site.call.args) < 2:
            continue
        scaler = program.meaning.scaler(site.owner, site.scope)
        if scaler is not None and scaler.is_torch:
            optimizer, closure = map(ast.unparse, site.call.args[:2])
            name = dotted(site.owner)
            yield Finding(
                "closure-not-unscaled",
                f"PyTorch's `{name}.step` hands `{closure}` to `{optimizer}`, which then steps "
                "with gradients that are neither unscaled nor checked",
                "use halfstep's scaler, which unscales and checks in every evaluation",
                "from halfstep import GradScaler\n"
                f"{name} = GradScaler()\n{name}.step({optimizer}, {closure})",
                (name, optimizer),
                line=site.line,
            )
