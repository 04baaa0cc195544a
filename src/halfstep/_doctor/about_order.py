"""The order of calls in an iteration: calls that are too early, too late, or missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import dotted
from halfstep._doctor.read_program import Program, Site


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with the order of calls."""
    for root in program.roots:
        yield from _clips(program, root.sites)
        yield from _bypassed(program, root.sites)
        yield from _schedules(program, root.sites)
    yield from _updates(program)
    yield from _closures(program)


# --- clipping and stepping ------------------------------------------------------------------------


def _clips(program: Program, sites: tuple[Site, ...]) -> Iterator[Finding]:
    for at, clip in enumerate(sites):
        if not program.is_clip(clip):
            continue
        backward = _last_backward(program, sites[:at], clip)
        if backward is None or not program.scaled_by(sites[backward]):
            continue
        steps = [s for s in sites[at:] if program.is_scaler_step(s) and not s.excludes(clip)]
        between = sites[backward:at]
        if steps and not any(_unscales(site) and not site.excludes(clip) for site in between):
            scaler = dotted(steps[0].owner)
            optimizer = _text(steps[0].call, "optimizer")
            yield Finding(
                "clip-before-unscale",
                f"`{ast.unparse(clip.call.func)}` clips gradients that are still multiplied by the "
                f"scale (65536 at first) of `{scaler}`: after unscaling they are almost zero, "
                "and training looks stuck",
                f"unscale before you clip, or let halfstep's `{scaler}` clip, in one pass less",
                f"{scaler}.unscale_({optimizer})  # before clipping\n"
                f"# or: {scaler}.step({optimizer}, max_norm=1.0)",
                (scaler, optimizer),
                line=clip.line,
            )


def _bypassed(program: Program, sites: tuple[Site, ...]) -> Iterator[Finding]:
    stepped = {_text(site.call, "") for site in sites if program.is_scaler_step(site)}
    for at, step in enumerate(sites):
        if not program.is_optimizer_step(step) or dotted(step.owner) in stepped:
            continue
        backward = _last_backward(program, sites[:at], step)
        scaler = program.scaled_by(sites[backward]) if backward is not None else ""
        if not scaler or backward is None:
            continue
        between = [site for site in sites[backward:at] if not site.excludes(step)]
        if any(_unscales(s) or s.method in ("get_scale", "step", "div_") for s in between):
            continue
        optimizer = dotted(step.owner)
        yield Finding(
            "scaler-bypassed",
            f"`{optimizer}.step()` takes gradients that `{scaler}` has multiplied by the scale: "
            "they are 65536 times too large, and inf and NaN get through",
            f"step through the scaler, then call `{scaler}.update()`",
            f"{scaler}.step({optimizer})\n{scaler}.update()",
            (optimizer, scaler),
            line=step.line,
        )


def _last_backward(program: Program, before: tuple[Site, ...], site: Site) -> int | None:
    """Return the backward pass whose gradients ``site`` sees; a scaled one if several may be."""
    found: int | None = None
    for at, each in enumerate(before):
        if program.is_backward(each) and not each.excludes(site):
            # In another arm than the one before: either may have run.
            if (
                found is not None
                and each.excludes(before[found])
                and program.scaled_by(before[found])
            ):
                continue
            found = at
    return found


def _unscales(site: Site) -> bool:
    return "unscale" in ast.unparse(site.call.func)


def _text(call: ast.Call, otherwise: str) -> str:
    if call.args:
        return ast.unparse(call.args[0])
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    return ast.unparse(named["optimizer"]) if "optimizer" in named else otherwise


# --- after the step -------------------------------------------------------------------------------


def _schedules(program: Program, sites: tuple[Site, ...]) -> Iterator[Finding]:
    steps = [site for site in sites if program.is_scaler_step(site)]
    for site in sites:
        call = site.call
        if site.method != "step" or call.args or call.keywords:
            continue
        if not program.meaning.is_scheduler(site.owner, site.scope):
            continue
        scheduler = dotted(site.owner)
        beside = [s for s in steps if s.loops == site.loops and not s.excludes(site)]
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


def _updates(program: Program) -> Iterator[Finding]:
    """Yield scalers that are made and used only in this file and never updated."""
    for site in program.sites:
        name = dotted(site.owner)
        made = program.meaning.scaler(site.owner, site.scope)
        if made is None or not made.line or not program.is_scaler_step(site):
            continue
        if not _is_handed_on(program.tree, name) and not _is_inherited(program.tree, site):
            yield Finding(
                "update-missing",
                f"`{name}.step` without `{name}.update()`: the scale never moves, and the second "
                "step is refused",
                "call it once at the end of each iteration, after the last step",
                f"{name}.update()",
                (name,),
                line=site.line,
            )


def _is_handed_on(tree: ast.Module, name: str) -> bool:
    """Return whether a scaler is updated, or is used in another way than by its methods."""
    last = name.rpartition(".")[2]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = {id(node.value) for node in attributes}
    for node in attributes:
        if node.attr == "update" and dotted(node.value).rpartition(".")[2] == last:
            return True
    return any(
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
