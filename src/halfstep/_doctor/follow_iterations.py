"""The calls of an iteration, recognized in source and followed on each path."""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from halfstep._doctor import iteration
from halfstep._doctor.finding import Finding
from halfstep._doctor.follow_losses import Losses
from halfstep._doctor.iteration import UNKNOWN, Call, Iteration, is_optimizer_name
from halfstep._doctor.iteration_texts import finding
from halfstep._doctor.read_bindings import Bindings
from halfstep._doctor.read_conditions import Names, Path, condition_of
from halfstep._doctor.read_names import NameScope, dotted
from halfstep._doctor.read_paths import Walk
from halfstep._doctor.read_program import Program, Root, is_inherited
from halfstep._doctor.read_sites import Site
from halfstep._doctor.read_values import argument

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


class IterationFollower:
    """Follows the iterations of a root, and keeps what is found."""

    def __init__(self, program: Program, root: Root) -> None:
        self.program = program
        self.is_step = bool(_STEPS.search(getattr(root.node, "name", "")))
        self._losses = Losses(program)
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
        now, kind, losses = path.state, self._kinds[site.call], self._losses
        assert isinstance(now, Iteration)
        key = walk.key(site.owner, site.scope, path.names)
        if kind == "scaler":
            return self._made(now, site, path.names, walk)
        if self.program.is_backward(site):
            return self._backward(now, site, path.names, walk)
        if losses.is_scaler(site.owner, site.scope, key):
            is_on = losses.is_on(site.owner, site.scope)
            return self._of_scaler(now, site, key, path.names, walk) if is_on else now
        is_optimizer = self.program.meaning.is_optimizer(site.owner, site.scope)
        if site.method == "step" and (is_optimizer or is_optimizer_name(key)):
            if not now.line and path.facts.get(_AMP):  # of an iteration without a scaler
                return now
            return iteration.after_plain_step(now, self._call(site, optimizer=key), self._report)
        if site.method == "zero_grad":
            is_named = is_optimizer_name(key)
            of = {key} if is_named else self.program.optimizers_of(site.owner)
            return iteration.after_zero_grad(now, of, site.line)
        if kind == "clip":
            return iteration.after_clip(now, site.line)
        is_known = walk.followed(site) is not None or not self._may_change(site)
        return now if is_known else iteration.after_unknown(now)

    def after_assignment(self, key: str, value: ast.expr | None, state: Hashable) -> Hashable:
        """Return the state after a variable got a new value: it is another object."""
        assert isinstance(state, Iteration)
        is_used = any(key in each for each in (*state.unscaled, *state.stepped, *state.zeroed))
        return state.without(key) if is_used else state

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

    def value(self, node: ast.expr, scope: NameScope, names: Names, keys: Bindings) -> int:
        """Return how often a value was multiplied by a scale; -1 if uncertain."""
        return self._losses.times_scaled(node, scope, names, keys)

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, site: Site, scaler: str = "", optimizer: str = "") -> Call:
        own = {"scaler" if scaler else "optimizer": ast.unparse(site.owner)}
        if scaler and site.method != "update":
            own["optimizer"] = optimizer_of(site)
        closure = argument(site.call, "closure", 1 if scaler else 0)
        return Call(site.line, scaler, optimizer, own, closure is not None)

    def _backward(self, now: Iteration, site: Site, names: Names, walk: Walk) -> Iteration:
        loss: ast.expr | None = site.owner
        is_function = dotted(site.owner) == "torch.autograd"
        if site.call.args or is_function:
            loss = site.call.args[0] if is_function and site.call.args else None
        scaled = UNKNOWN if loss is None else self.value(loss, site.scope, names, walk)
        scaler = self.program.scaled_by(site) or now.scaler or "scaler"
        called = {"scaler": scaler, "loss": ast.unparse(site.owner)}
        return iteration.after_backward(now, Call(site.line, names=called), scaled, self._report)

    def _of_scaler(
        self, now: Iteration, site: Site, key: str, names: Names, walk: Walk
    ) -> Iteration:
        given = argument(site.call, "optimizer", 0)
        optimizer = "" if given is None else walk.key(given, site.scope, names)
        call = self._call(site, key, optimizer)
        match site.method:
            case "unscale_" if given is not None:
                return iteration.after_unscale(now, call, self._report)
            case "step" if given is not None:
                self._check_made(now, site, key)
                return iteration.after_step(now, call, self._is_idle(site), self._report)
            case "update":
                return iteration.after_update(now, call, self._report)
            case "scale" if isinstance(site.statement, ast.Expr):
                self._check_use(site)
                return now
            case "scale" | "is_enabled" | "state_dict" | "load_state_dict" | "get_scale":
                is_read = site.method == "get_scale"
                return replace(now, is_uncertain=now.is_uncertain or is_read)
        return replace(now, is_uncertain=True)

    def _check_made(self, now: Iteration, site: Site, scaler: str) -> None:
        around = _loops(site)
        for key, loops, line in now.made:
            is_same = loops[: len(around)] == around and (bool(around) or self.is_step)
            if key == scaler and is_same:
                self._report("scaler-in-loop", line, **self._call(site, scaler).names)

    def _check_use(self, site: Site) -> None:
        """Report a scaled loss that is thrown away, where the loss itself is differentiated."""
        assert isinstance(site.statement, ast.Expr)
        loss, names = _text(argument(site.call, "outputs", 0)), {"scaler": ast.unparse(site.owner)}
        backward = (each for each in self.program.sites if self.program.is_backward(each))
        if site.statement.value is site.call and any(
            ast.unparse(each.owner) == loss for each in backward
        ):
            self._report("loss-not-scaled", site.line, optimizer="optimizer", loss=loss, **names)

    def _is_idle(self, site: Site) -> bool:
        """Return whether a scaler that is made in this file scales nothing in it."""
        made = self.program.meaning.scaler(site.owner, site.scope)
        scales = (each for each in self.program.sites if each.method == "scale")
        return (
            made is not None
            and bool(made.line)
            and not is_inherited(self.program.tree, site)
            and not any(self._losses.is_scaler(s.owner, s.scope, dotted(s.owner)) for s in scales)
        )

    def _made(self, now: Iteration, site: Site, names: Names, walk: Walk) -> Iteration:
        match site.statement:
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                key = walk.key(target, site.scope, names)
            case _:
                return now
        others = frozenset(each for each in now.made if each[0] != key)
        return replace(now.without(key), made=others | {(key, _loops(site), site.line)})

    def _may_change(self, site: Site) -> bool:
        """Return whether a function of another file may step, or run a backward pass."""
        arguments = [*site.call.args, *(keyword.value for keyword in site.call.keywords)]
        if any(self._losses.is_scaler(each, site.scope, dotted(each)) for each in arguments):
            return True
        if site.method in ("div_", "mul_"):
            return "grad" in ast.unparse(site.owner)
        if site.method in ("train", "eval") or self.program.is_model(site.call.func):
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
        self.found.append(finding(id, line, **values))


def optimizer_of(site: Site) -> str:
    """Return the argument of ``scaler.step`` or ``scaler.unscale_`` as text."""
    return _text(argument(site.call, "optimizer", 0)) or "optimizer"


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _loops(site: Site) -> tuple[int, ...]:
    """Return the lines of the loops around a call."""
    return tuple(around.line for around in site.inside if around.kind == "loop")


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
