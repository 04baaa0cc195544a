"""Checks of models and optimizers in source: lowered parameters, and moves in the wrong order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import NameScope, dotted
from halfstep._doctor.read_program import Program, Root, Site

_MOVES = ("to", "cuda", "cpu", "xpu", "npu", "to_empty")
_LOWERS = {"half": "float16", "bfloat16": "bfloat16"}
_RESTORES = ("float", "double")
_LOST = {
    "float16": (
        "half-parameters",
        "updates below 1/2048 of a weight are lost, Adam's eps of 1e-8 is 0, and no scaler "
        "unscales such gradients",
        ", store='float32'",
    ),
    "bfloat16": (
        "bf16-parameters",
        "updates below 1/256 of a weight are lost, which stops learning at small rates",
        "",
    ),
}
_CHAINED = (*_MOVES, *_LOWERS, *_RESTORES, "train", "eval", "requires_grad_")


@dataclass(frozen=True)
class _Built:
    """An optimizer made from the parameters of a model."""

    site: Site
    later: tuple[Site, ...]
    model: str
    name: str


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with models and optimizers."""
    for root in program.roots:
        for built in _optimizers(program, root):
            yield from _lowered(program, root, built)
            yield from _moved(program, root, built)


def _optimizers(program: Program, root: Root) -> Iterator[_Built]:
    for at, site in enumerate(root.sites):
        if not program.meaning.makes_optimizer(site.call, site.scope):
            continue
        name = _target(site.statement)
        for node in (*site.call.args, *(keyword.value for keyword in site.call.keywords)):
            for model in _models(program, node, site.scope):
                yield _Built(site, root.sites[at + 1 :], model, name or "the optimizer")


def _models(program: Program, node: ast.expr, scope: NameScope) -> Iterator[str]:
    """Yield the models whose own parameters, not copies, an expression takes."""
    for written in program.values.candidates(node, scope):
        methods = [
            inner.func
            for inner in (ast.walk(written[0]) if written else ())
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)
        ]
        if not any(method.attr in ("clone", "float", "detach") for method in methods):
            for method in methods:
                if method.attr in ("parameters", "named_parameters"):
                    yield dotted(method.value)


def _is_same_run(site: Site, built: _Built) -> bool:
    """Return whether a name means the same at both: in one call of one function and one arm."""
    is_same_call = site.around("call") == built.site.around("call")
    return bool(built.model) and is_same_call and not site.excludes(built.site)


def _lowered(program: Program, root: Root, built: _Built) -> Iterator[Finding]:
    if "master_weights" in program.words:
        return
    lowered: tuple[Site, str] | None = None
    for site in root.sites:
        if _is_same_run(site, built) and _model(site) == built.model:
            dtype = "" if site.method in _RESTORES else _lowers_to(program, site)
            if dtype is not None:
                lowered = (site, dtype)
    if lowered is None or not lowered[1]:
        return
    site, dtype = lowered
    id, lost, store = _LOST[dtype]
    optimizer = "optimizer" if " " in built.name else built.name
    yield Finding(
        id,
        f"`{ast.unparse(site.call)}` makes the parameters {dtype}, and `{built.name}` updates them "
        f"there: {lost}",
        "keep what rounding leaves out; or keep the parameters in float32, and let autocast lower "
        "what an op takes",
        f"halfstep.master_weights({optimizer}{store})\n# or\n"
        f"with halfstep.autocast(dtype=torch.{dtype}):\n    ...  # {built.model} stays in float32",
        (built.model, built.name),
        line=site.line,
    )


def _lowers_to(program: Program, site: Site) -> str | None:
    """Return the half dtype that a call gives a model; empty for another dtype, None for none."""
    if site.method in _LOWERS and not site.call.args:
        return _LOWERS[site.method]
    if site.method != "to":
        return None
    given = [*site.call.args, *(k.value for k in site.call.keywords if k.arg == "dtype")]
    dtypes = [dtype for node in given if (dtype := program.values.dtype(node, site.scope))]
    if not dtypes:
        return None
    return dtypes[0] if dtypes[0] in _LOWERS.values() else ""


def _moved(program: Program, root: Root, built: _Built) -> Iterator[Finding]:
    for at, site in enumerate(built.later, 1):
        is_move = site.method in _MOVES and _lowers_to(program, site) is None
        is_of_name = not isinstance(site.owner, ast.Call)  # else it is a new model
        is_once = len(site.around("loop")) <= len(built.site.around("loop"))
        if not (is_move and is_of_name and is_once and _model(site) == built.model):
            continue
        steps = (
            each
            for each in built.later[at:]
            if program.is_scaler_step(each) or program.is_optimizer_step(each)
        )
        # Another method trains the model made in __init__.
        is_made_for_later = getattr(root.node, "name", "") == "__init__"
        is_trained = is_made_for_later or any(not step.excludes(site) for step in steps)
        if is_trained and _is_same_run(site, built):
            yield Finding(
                "optimizer-before-move",
                f"`{ast.unparse(site.call)}` comes after `{built.name}` was made of "
                f"`{built.model}.parameters()` (line {built.site.line}): where the move replaces "
                "parameters (XLA, meta, wrappers) it trains the old ones, and state that it has "
                "already loaded stays on the old device",
                "move the model first, then make the optimizer",
                f"{ast.unparse(site.call)}\n{ast.unparse(built.site.statement)}",
                (built.name, built.model),
                line=site.line,
            )
            return


def _model(site: Site) -> str:
    """Return the model that a method is called on: ``net`` also for ``net.cuda().half()``.

    For a model that is made in the same line, return the name assigned to it.
    """
    owner = site.owner
    while (
        isinstance(owner, ast.Call)
        and isinstance(owner.func, ast.Attribute)
        and owner.func.attr in _CHAINED
    ):
        owner = owner.func.value
    return _target(site.statement) if isinstance(owner, ast.Call) else dotted(owner)


def _target(statement: ast.stmt) -> str:
    match statement:
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return dotted(target)
    return ""
