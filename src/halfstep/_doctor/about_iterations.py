"""Checks for calls of an iteration that are too early, too late, repeated or missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep._doctor.finding import Finding
from halfstep._doctor.follow_iterations import IterationWalk, optimizer_of
from halfstep._doctor.iteration import Iteration, finding, next_iteration
from halfstep._doctor.read_names import arguments, dotted
from halfstep._doctor.read_program import Program, Root
from halfstep._doctor.read_sites import Site

_LOOKS = r"load|resume|restart|restore|recover|print|isinstance"
_NO_UPDATE = re.compile(rf"save|checkpoint|{_LOOKS}", re.I)
"""A pattern for functions that take a scaler without updating it."""
_CLEARS = re.compile(r"zero_?grad|^zero_$|set_to_none|clear_?grad|^grad$", re.I)
"""A pattern for names in code that clears gradients."""
_NO_SAVE = re.compile(_LOOKS, re.I)
"""A pattern for functions that take a scaler without saving it."""


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with the calls of an iteration."""
    for root in program.roots:
        if any(program.is_backward(site) or site.method == "step" for site in root.sites):
            walk = IterationWalk(program, root)
            ends = walk.run(root.node, _before(program, root))
            # Check functions by themselves too: the state in their callers may be uncertain.
            functions = dict.fromkeys(s.scope.node for s in root.sites if s.method == "step")
            for function in functions:
                if function is not root.node:
                    walk.run(function, Iteration())
            if _is_whole(root):
                walk.run(root.node, *map(next_iteration, ends))
            yield from {(each.id, each.line): each for each in walk.found}.values()
        yield from _schedules(program, root)
        yield from _never_zeroed(program, root)
    yield from _never_updated(program)
    yield from _never_saved(program)
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
    own = root.sites[:1]
    near = [site for site in program.sites if any(_are_near(site, each) for each in own)]
    scalers = {program.scaled_by(site) for site in near if program.is_backward(site)}
    is_stepped = any(map(program.is_scaler_step, near))
    if not steps and (is_stepped or len(scalers) != 1 or "" in scalers):
        return Iteration()
    return Iteration(losses=frozenset({1}), scaler=(steps or sorted(scalers))[0])


def _are_near(one: Site, other: Site) -> bool:
    """Return whether two calls are in methods of one class."""
    return bool(one.scope.class_name) and one.scope.class_name == other.scope.class_name


def _is_whole(root: Root) -> bool:
    """Return whether a function is a whole iteration that a loop elsewhere repeats."""
    methods = {site.method for site in root.sites if not site.around("loop")}
    return not isinstance(root.node, ast.Module) and methods >= {"backward", "step", "update"}


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


def _never_zeroed(program: Program, root: Root) -> Iterator[Finding]:
    """Yield a finding about a loop whose gradients are never cleared."""
    makes = program.meaning.makes_optimizer
    looped = [site for site in root.sites if site.around("loop")]
    steps = [s for s in looped if program.is_optimizer_step(s) or program.is_scaler_step(s)]
    backward = next(filter(program.is_backward, looped), None)
    is_own = any(makes(site.call, site.scope) for site in program.sites)
    if not (steps and backward and is_own) or any(map(_CLEARS.search, program.words)):
        return
    step = steps[0]
    optimizer = optimizer_of(step) if program.is_scaler_step(step) else dotted(step.owner)
    passed = (dotted(each) for s in looped if s not in steps for each in arguments(s.call))
    if optimizer in passed:  # another function may clear them
        return
    yield Finding(
        "gradients-never-zeroed",
        f"the gradients of `{optimizer}` are never cleared: each `backward` adds to those of all "
        "steps before, so they grow without end, and overflow",
        "clear them in each iteration, before `backward` or after the step",
        f"{optimizer}.zero_grad()",
        (optimizer,),
        line=step.line,
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
    """Yield findings about scalers that the file steps, but never updates or passes on.

    The file creates them, or they are its variables, as in ``optimizer, scaler = create(model)``.
    """
    for site in program.sites:
        made = program.meaning.scaler(site.owner, site.scope)
        name = dotted(site.owner)
        is_made_elsewhere = not any(program.meaning.candidates(site.owner, site.scope))
        is_own = bool(made.line) if made else is_made_elsewhere and site.scope.is_variable(name)
        if not is_own or not program.is_scaler_step(site):
            continue
        scales = any(program.scaled_by(each) for each in program.sites if _are_near(each, site))
        is_elsewhere = site.scope.class_name in program.meaning.names.inheriting and not scales
        if not is_elsewhere and not _is_handed_on(program, name, "update", _NO_UPDATE):
            yield finding("update-missing", site.line, scaler=name, optimizer=optimizer_of(site))


def _never_saved(program: Program) -> Iterator[Finding]:
    """Yield findings about scalers that the file creates, but does not save with the optimizer."""
    states = (site for site in program.sites if site.method == "state_dict")
    saved = [s for s in states if program.meaning.is_optimizer(s.owner, s.scope)]
    for name, scaler in program.scalers.items() if saved else ():
        is_on = bool(scaler.line) and scaler.enabled is not False
        if is_on and not _is_handed_on(program, name, "state_dict", _NO_SAVE):
            yield Finding(
                "scaler-not-saved",
                f"the state of `{dotted(saved[0].owner)}` is saved, that of `{name}` is not: a "
                "resumed run starts with the first scale again, and skips steps until it fits",
                "save and load the scaler's state with the optimizer's",
                f'checkpoint["scaler"] = {name}.state_dict()\n'
                f'{name}.load_state_dict(checkpoint["scaler"])',
                (name, dotted(saved[0].owner)),
                line=saved[0].line,
            )


def _is_handed_on(program: Program, name: str, method: str, other: re.Pattern[str]) -> bool:
    """Return whether a method of a scaler is used, or the scaler is passed on to other code.

    Functions whose names match ``other`` do not count.
    """
    last, calls = name.rpartition(".")[2], program.meaning.names.calls
    for node in ast.walk(program.tree):
        parts: list[ast.expr | None] = []
        match node:
            case ast.Attribute(value=owner, attr=attribute) if attribute == method:
                if dotted(owner).rpartition(".")[2] == last:
                    return True
            case ast.Call(func=called, args=args, keywords=keywords) if (
                node not in calls and not other.search(ast.unparse(called))
            ):
                parts = [*args, *(keyword.value for keyword in keywords)]
            case ast.Return(value=value) | ast.Assign(value=value):
                parts = [value]
            case ast.Dict(values=values):
                parts = [*values]
            case ast.Tuple(elts=elts, ctx=ast.Load()) | ast.List(elts=elts, ctx=ast.Load()):
                parts = [*elts]
        if any(part is not None and dotted(part).rpartition(".")[2] == last for part in parts):
            return True
    return False


def _closures(program: Program) -> Iterator[Finding]:
    for site in program.sites:
        if program.is_optimizer_step(site) and site.call.args:
            function = site.scope.function(dotted(site.call.args[0]))
            inner = (each for each in program.sites if each.scope.node is function)
            scales = next(filter(None, map(program.scaled_by, inner)), "")
            if scales:
                stepped = dotted(site.owner)
                known = program.known_of(scales)
                yield finding("scaler-bypassed", site.line, known, scaler=scales, optimizer=stepped)
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
