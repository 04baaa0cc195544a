"""The calls of an iteration: too early, too late, or missing; and losses that are sums."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import NameScope, dotted
from halfstep._doctor.read_program import Program, Root, Site
from halfstep._doctor.read_values import argument


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with the calls of an iteration."""
    for root in program.roots:
        yield from _clips(program, root.sites)
        yield from _bypassed(program, root.sites)
        yield from _schedules(program, root.sites)
    yield from _updates(program)
    yield from _closures(program)
    for root in program.roots:
        if any(site.autocast and site.autocast.dtype == "float16" for site in root.sites):
            yield from _sums(program, root)


# --- clipping and stepping ------------------------------------------------------------------------


def _clips(program: Program, sites: Sequence[Site]) -> Iterator[Finding]:
    for at, clip in enumerate(sites):
        since = _since_backward(program, sites[:at], clip) if program.is_clip(clip) else ()
        if not since or not program.scaled_by(since[0]):
            continue
        steps = [s for s in sites[at:] if program.is_scaler_step(s) and not s.excludes(clip)]
        if steps and not any(_unscales(site) and not site.excludes(clip) for site in since):
            scaler = dotted(steps[0].owner)
            optimizer = _optimizer(steps[0].call) or "optimizer"
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


def _bypassed(program: Program, sites: Sequence[Site]) -> Iterator[Finding]:
    stepped = {_optimizer(site.call) for site in sites if program.is_scaler_step(site)}
    for at, step in enumerate(sites):
        optimizer = dotted(step.owner)
        if not program.is_optimizer_step(step) or optimizer in stepped:
            continue
        since = _since_backward(program, sites[:at], step)
        scaler = program.scaled_by(since[0]) if since else ""
        between = [site for site in since if not site.excludes(step)]
        if not scaler or any(
            _unscales(s) or s.method in ("get_scale", "step", "div_") for s in between
        ):
            continue
        yield Finding(
            "scaler-bypassed",
            f"`{optimizer}.step()` takes gradients that `{scaler}` has multiplied by the scale: "
            "they are 65536 times too large, and inf and NaN get through",
            f"step through the scaler, then call `{scaler}.update()`",
            f"{scaler}.step({optimizer})\n{scaler}.update()",
            (optimizer, scaler),
            line=step.line,
        )


def _since_backward(program: Program, before: Sequence[Site], site: Site) -> Sequence[Site]:
    """Return the calls from the backward pass on whose gradients ``site`` sees; none without one.

    If one of several may have run, it is a scaled one.
    """
    found: int | None = None
    for at, each in enumerate(before):
        if not program.is_backward(each) or each.excludes(site):
            continue
        is_other_arm = found is not None and each.excludes(before[found])
        if found is None or not is_other_arm or not program.scaled_by(before[found]):
            found = at
    return () if found is None else before[found:]


def _unscales(site: Site) -> bool:
    return "unscale" in ast.unparse(site.call.func)


def _optimizer(call: ast.Call) -> str:
    """Return the argument of ``scaler.step``; empty if there is none."""
    if call.args:
        return ast.unparse(call.args[0])
    named = argument(call, "optimizer")
    return "" if named is None else ast.unparse(named)


# --- after the step -------------------------------------------------------------------------------


def _schedules(program: Program, sites: Sequence[Site]) -> Iterator[Finding]:
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


# --- losses that are sums -------------------------------------------------------------------------


def _sums(program: Program, root: Root) -> Iterator[Finding]:
    """Yield losses that are sums without a division, where a mean would stay in range."""
    reaching = _reaching(program, root)
    for site in root.sites:
        if site.has_grad and _is_sum(program, site) and _is_loss(site, reaching):
            text = ast.unparse(site.call)
            short = text if len(text) <= 60 else f"{text[:57]}..."
            yield Finding(
                "sum-loss",
                f"`{short}` sums over all entries of the batch and is not divided: gradients grow "
                "with the batch, and float16 ends at 65504",
                "take the mean, or divide by the number of entries, and raise the learning rate by "
                "as much",
                names=(short,),
                line=site.line,
            )


def _is_sum(program: Program, site: Site) -> bool:
    if site.method == "sum" and not site.call.args and not site.call.keywords:
        return True
    makers = program.values.candidates(site.call.func, site.scope)  # nn.MSELoss(reduction="sum")
    return any(
        isinstance(call, ast.Call) and _reduces_by_sum(program, call, scope)
        for call, scope in [(site.call, site.scope), *filter(None, makers)]
    )


def _reduces_by_sum(program: Program, call: ast.Call, scope: NameScope) -> bool:
    reduction = argument(call, "reduction")
    is_sum = reduction is not None and program.values.constant(reduction, scope) == "sum"
    return is_sum and program.values.qualified(call.func, scope).startswith("torch.nn.")


def _is_loss(site: Site, reaching: set[str]) -> bool:
    """Return whether a backward pass starts from this value, or from a sum with it."""
    around = [n for n in ast.walk(site.statement) if any(c is site.call for c in ast.walk(n))]
    if any(_may_shrink(node) for node in around):
        return False
    calls = [node for node in around if isinstance(node, ast.Call) and node is not site.call]
    if isinstance(site.statement, ast.Expr):  # .sum().backward(), scale(... .sum()).backward()
        methods = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
        return "backward" in methods and methods <= {"backward", "scale"}
    return not calls and not reaching.isdisjoint(_assigned(site.statement))


def _reaching(program: Program, root: Root) -> set[str]:
    """Return the variables that backward passes start from, without those that may be divided."""
    shrunk, reaching = set[str](), set[str]()
    for site in root.sites:
        if program.is_backward(site) and site.has_grad:
            reaching |= _added(site.owner)
    scopes = {site.scope for site in root.sites}
    nodes = [node for scope in scopes for node in ast.walk(scope.node)]
    for node in nodes:
        if _may_shrink(node):
            shrunk |= _names(node.target if isinstance(node, ast.AugAssign) else node)
    assignments = [n for n in nodes if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    for _ in assignments:  # until no new name is found
        found = {
            name
            for node in assignments
            if reaching & _assigned(node) and node.value is not None
            for name in _added(node.value)
        }
        if found <= reaching:
            break
        reaching |= found
    return reaching - shrunk


def _may_shrink(node: ast.AST) -> bool:
    """Return whether a node divides, or multiplies by an unknown value."""
    match node:
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
            return True
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return not isinstance(left, ast.Constant) and not isinstance(right, ast.Constant)
        case ast.AugAssign(op=ast.Mult(), value=value):
            return not isinstance(value, ast.Constant)
    return False


def _added(node: ast.expr) -> set[str]:
    """Return the names whose sum a value is; the result of a function is a new value."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.BinOp(left=left, right=right):
            return _added(left) | _added(right)
        case ast.Call(func=ast.Attribute(attr="scale"), args=[scaled, *_]):
            return _added(scaled)
    return set()


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _assigned(statement: ast.AST) -> set[str]:
    match statement:
        case ast.Assign(targets=targets):
            return {name for target in targets for name in _names(target)}
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return _names(target)
    return set()
