"""Checks for calls of an iteration that are too early, too late, repeated or missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from halfstep._tools.doctor import iteration
from halfstep._tools.doctor.finding import Finding
from halfstep._tools.doctor.iteration import Call, Iteration, finding, next_iteration
from halfstep._tools.doctor.read_names import Function, NameScope, arguments, dotted
from halfstep._tools.doctor.read_paths import LOSSES, UNKNOWN, Walk, is_object
from halfstep._tools.doctor.read_program import Program, Root
from halfstep._tools.doctor.read_sites import MIXED, Names, Path, Site
from halfstep._tools.doctor.read_values import argument

_OPAQUE = re.compile(r"backward|optim|step|train|closure|scale", re.I)
"""A pattern for functions of other files that may run a backward pass or step."""
_RELEVANT = re.compile(rf"zero_grad|update|clip|clamp_|div_|mul_|{_OPAQUE.pattern}", re.I)
_METHODS = ("backward", "step", "zero_grad", "unscale_", "update", "get_scale", "scale")
_STEPS = re.compile(r"step|batch|iter|update|__call__|optimi", re.I)
"""A pattern for functions that run once for each step."""


def findings(program: Program) -> Iterator[Finding]:
    for root in program.roots:
        if any(program.is_backward(site) or site.method == "step" for site in root.sites):
            walk = _IterationWalk(program, root)
            ends = walk.run(root.node, _before(program, root))
            # Check functions by themselves too: the state in their callers may be uncertain.
            functions = dict.fromkeys(s.scope.node for s in root.sites if s.method == "step")
            for function in functions:
                if function is not root.node:
                    walk.run(function, Iteration())
            methods = {site.method for site in root.sites if not site.around("loop")}
            is_whole = methods >= {"backward", "step", "update"}
            if is_whole and not isinstance(root.node, ast.Module):  # a loop elsewhere repeats it
                walk.run(root.node, *map(next_iteration, ends))
            yield from {(each.id, each.line): each for each in walk.found}.values()
        yield from _never_stepped(program, root)
    yield from _closures(program)


def _before(program: Program, root: Root) -> Iteration:
    """Return the state in which a root begins.

    Without a backward pass in the root, the gradients come from elsewhere. Their losses count as
    scaled if the root steps through a scaler, or if one scaler scales all losses of the class
    and the class never steps through a scaler.
    """
    if any(map(program.is_backward, root.sites)):
        return Iteration()
    steps = [dotted(site.owner) for site in root.sites if program.is_scaler_step(site)]
    name = root.sites[0].scope.class_name if root.sites else ""
    near = [site for site in program.sites if name and site.scope.class_name == name]
    scalers = {program.scaled_by(site) for site in near if program.is_backward(site)}
    is_stepped = any(map(program.is_scaler_step, near))
    if not steps and (is_stepped or len(scalers) != 1 or "" in scalers):
        return Iteration()
    return Iteration(losses=frozenset({1}), scaler=(steps or sorted(scalers))[0])


def _never_stepped(program: Program, root: Root) -> Iterator[Finding]:
    """Yield findings about optimizers that are stepped only where nothing is scaled."""
    plain = [site for site in root.sites if program.is_optimizer_step(site)]
    names = {dotted(site.owner) for site in plain}
    for step in filter(program.is_scaler_step, root.sites):
        beside = [site for site in root.sites if not site.excludes(step)]
        scaled = {_optimizer_of(site) for site in beside if program.is_scaler_step(site)}
        used = {dotted(e) for s in beside if s.method != "unscale_" for e in arguments(s.call)}
        used |= {dotted(site.owner) for site in beside if site.method == "step"}
        own = _optimizer_of(step)
        twins = [s.arms for s in plain if s not in beside and dotted(s.owner) == own]
        for site in plain if scaled <= names else ():  # else there may be a loop over all of them
            name = dotted(site.owner)
            if site.arms in twins and name not in used:
                where = f"where the loss is scaled, as in line {step.line}"
                scaler = dotted(step.owner)
                yield finding("step-missing", site.line, scaler=scaler, optimizer=name, where=where)


def _closures(program: Program) -> Iterator[Finding]:
    for site in program.sites:
        if program.is_optimizer_step(site) and site.call.args:
            function = site.scope.function(dotted(site.call.args[0]))
            inner = (each for each in program.sites if each.scope.node is function)
            scales = next(filter(None, map(program.scaled_by, inner)), "")
            if scales:
                known = {"scaler": scales, "optimizer": dotted(site.owner)}
                yield finding("scaler-bypassed", site.line, program.updates(scales), **known)


# --- the iterations along the paths ---------------------------------------------------------------


class _IterationWalk(Walk):
    """A walk that tracks the iterations of a root and collects findings."""

    def __init__(self, program: Program, root: Root) -> None:
        super().__init__(program.meaning, program.switches)
        self.found: list[Finding] = []
        self._program = program
        self._is_step = bool(_STEPS.search(getattr(root.node, "name", "")))
        self._kinds: dict[ast.Call, str] = {}
        self._mattering: dict[ast.AST, bool] = {}

    def run(self, root: ast.Module | Function, *states: Iteration) -> list[Iteration]:
        self._mattering.clear()
        return super().run(root, *states)

    # --- overridden hooks -------------------------------------------------------------------------

    def matters(self, node: ast.AST, scope: NameScope, ends: tuple[type, ...] = ()) -> bool:
        found = self._mattering.get(node)
        if found is None:
            self._mattering[node] = False  # in case functions call each other
            found = any(self._is_part(each, scope, ends) for each in ast.walk(node))
            self._mattering[node] = found
        return found

    def _is_part(self, node: ast.AST, scope: NameScope, ends: tuple[type, ...]) -> bool:
        if isinstance(node, ast.Name):
            is_known = is_object(node.id) or LOSSES.search(node.id)
            return isinstance(node.ctx, ast.Store) and bool(is_known)
        if isinstance(node, ast.Call):
            function = self._names.called(node, scope)
            if function is not None:
                return self.matters(function, self._names.scopes[function])
            name = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
            return bool(_RELEVANT.search(name)) or any(
                dotted(each).lower().endswith("scaler") for each in arguments(node)
            )
        return isinstance(node, ends)

    def after_call(self, site: Site, path: Path) -> Iteration:
        now: Iteration = path.state
        kind = self._kinds.get(site.call)
        if kind is None:
            kind = self._kinds[site.call] = self._kind(site)
        if not kind:
            return now
        if kind == "scaler":
            return self._made(now, site, path.names)
        if self._program.is_backward(site):
            return self._backward(now, site, path.names)
        key = self.key(site.owner, site.scope, path.names)
        if self.meaning.is_scaler(site.owner, site.scope, key):
            is_on = self.meaning.may_be_on(site.owner, site.scope)
            return self._of_scaler(now, site, key, path) if is_on else now
        if site.method == "step" and self.meaning.is_optimizer(site.owner, site.scope, key):
            if not now.line and path.facts.get(MIXED):  # an iteration without a scaler
                return now
            call = replace(self._call_of(site, optimizer=key), decided=frozenset(path.facts))
            return iteration.after_plain_step(now, call, self._report)
        if site.method == "zero_grad":
            return iteration.after_zero_grad(now)
        if kind == "clip":
            return iteration.after_clip(now, Call(site.line, decided=frozenset(path.facts)))
        is_known = self.followed(site) is not None or not self._may_change(site)
        return now if is_known else iteration.after_unknown(now)

    def after_assignment(self, key: str, state: Iteration) -> Iteration:
        """Return the state after an assignment: the variable refers to another object."""
        return state.without(key)

    def after_failure(self, state: Iteration) -> Iteration:
        """Return the state after an exception was caught: the gradients are uncertain."""
        return replace(state, is_uncertain=True)

    # --- calls ------------------------------------------------------------------------------------

    def _kind(self, site: Site) -> str:
        """Return the kind of a call that may change the state, empty for other calls."""
        if site.method in _METHODS:
            return "method"
        if self._program.is_clip(site):
            return "clip"
        if self.meaning.makes_scaler(site.call, site.scope):
            return "scaler"
        return "other" if self.followed(site) is None and self._may_change(site) else ""

    def _call_of(self, site: Site, scaler: str = "", optimizer: str = "") -> Call:
        own = {"scaler" if scaler else "optimizer": ast.unparse(site.owner)}
        if scaler and site.method != "update":
            own["optimizer"] = _optimizer_of(site)
        closure = argument(site.call, "closure", 1 if scaler else 0)
        return Call(site.line, scaler, optimizer, own, closure is not None)

    def _backward(self, now: Iteration, site: Site, names: Names) -> Iteration:
        loss: ast.expr | None = site.owner
        is_function = dotted(site.owner) == "torch.autograd"
        if site.call.args or is_function:
            loss = site.call.args[0] if is_function and site.call.args else None
        scaled = UNKNOWN if loss is None else self.value(loss, site.scope, names)
        scaler = self._program.scaled_by(site) or now.scaler or "scaler"
        called = {"scaler": scaler, "loss": ast.unparse(site.owner)}
        call = Call(site.line, self._scaler_of(loss, site.scope, names), names=called)
        return iteration.after_backward(now, call, scaled, self._report)

    def _scaler_of(self, loss: ast.expr | None, scope: NameScope, names: Names) -> str:
        """Return the key of the scaler in ``scaler.scale(loss)``; empty for other expressions."""
        match loss:
            case ast.Call(func=ast.Attribute(value=scaler, attr="scale")):
                return self.key(scaler, scope, names)
        return ""

    def _of_scaler(self, now: Iteration, site: Site, key: str, path: Path) -> Iteration:
        given = argument(site.call, "optimizer", 0)
        optimizer = "" if given is None else self.key(given, site.scope, path.names)
        call = replace(self._call_of(site, key, optimizer), decided=frozenset(path.facts))
        match site.method:
            case "unscale_" if given is not None:
                return iteration.after_unscale(now, call, self._report)
            case "step" if given is not None:
                self._check_made(now, site, call)
                return iteration.after_step(now, call, self._is_idle(site), self._report)
            case "update":
                return iteration.after_update(now, call, self._report)
            case "scale" if isinstance(site.statement, ast.Expr):
                self._check_use(site, site.statement)
                return now
            case "scale" | "is_enabled" | "state_dict" | "load_state_dict":
                return now
        return replace(now, is_uncertain=True)

    def _check_made(self, now: Iteration, site: Site, call: Call) -> None:
        around = tuple(site.around("loop"))
        for key, loops, line in now.made:
            # An attribute that is created next to its use is created in each call of the method.
            is_again = bool(around) or self._is_step or key.startswith("self.")
            is_same = loops[: len(around)] == around and is_again
            if key == call.scaler and is_same:
                self._report("scaler-in-loop", line, **call.names)

    def _check_use(self, site: Site, statement: ast.Expr) -> None:
        """Report a scaled loss that is discarded while the loss itself is differentiated."""
        loss, names = _text(argument(site.call, "outputs", 0)), {"scaler": ast.unparse(site.owner)}
        backward = filter(self._program.is_backward, self._program.sites)
        if statement.value is site.call and any(ast.unparse(s.owner) == loss for s in backward):
            self._report("loss-not-scaled", site.line, optimizer="optimizer", loss=loss, **names)

    def _is_idle(self, site: Site) -> bool:
        """Return whether a scaler that is created in this file scales nothing in it."""
        made = self.meaning.scaler(site.owner, site.scope)
        return (
            made is not None
            and bool(made.line)
            and site.scope.class_name not in self._names.inheriting
            and not any(
                each.method == "scale" and self.meaning.is_scaler(each.owner, each.scope)
                for each in self._program.sites
            )
        )

    def _made(self, now: Iteration, site: Site, names: Names) -> Iteration:
        if site.target is None:
            return now
        key = self.key(site.target, site.scope, names)
        others = frozenset(each for each in now.made if each[0] != key)
        return replace(
            now.without(key), made=others | {(key, tuple(site.around("loop")), site.line)}
        )

    def _may_change(self, site: Site) -> bool:
        """Return whether a function of another file may step or run a backward pass."""
        if any(self.meaning.is_scaler(each, site.scope) for each in arguments(site.call)):
            return True
        if site.method in ("div_", "mul_"):
            return "grad" in ast.unparse(site.owner)
        if site.method in ("train", "eval") or self._program.is_model(site.call.func):
            return False
        name = dotted(site.call.func).rpartition(".")[2]
        is_hook = name.lower().startswith(("before_", "after_", "on_"))
        if is_hook or not _OPAQUE.search(name):
            return False
        return not self.meaning.is_scheduler(site.owner, site.scope)

    def _report(self, id: str, line: int, **values: object) -> None:
        is_updated = self._program.updates(str(values.get("scaler", "")))
        self.found.append(finding(id, line, is_updated, **values))


def _optimizer_of(site: Site) -> str:
    """Return the argument of ``scaler.step`` or ``scaler.unscale_`` as text."""
    return _text(argument(site.call, "optimizer", 0)) or "optimizer"


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)
