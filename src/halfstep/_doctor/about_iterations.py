"""Checks of the calls of an iteration: too early, too late, twice, or missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep._doctor.finding import Finding
from halfstep._doctor.follow_iterations import IterationFollower, optimizer_of
from halfstep._doctor.iteration import Iteration
from halfstep._doctor.iteration_texts import finding
from halfstep._doctor.read_names import dotted
from halfstep._doctor.read_paths import Walk
from halfstep._doctor.read_program import Program, Root, is_inherited


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with the calls of an iteration."""
    for root in program.roots:
        if any(program.is_backward(site) or site.method == "step" for site in root.sites):
            calls = IterationFollower(program, root)
            Walk(program.meaning, calls).sites(root.node, Iteration())
            yield from {(each.id, each.line): each for each in calls.found}.values()
        yield from _schedules(program, root)
    yield from _never_updated(program)
    yield from _closures(program)


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
        if not _is_handed_on(program.tree, name) and not is_inherited(program.tree, site):
            yield finding("update-missing", site.line, scaler=name, optimizer=optimizer_of(site))


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
