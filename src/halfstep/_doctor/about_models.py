"""Checks of models and optimizers in source: parameters that were lowered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import NameScope, dotted
from halfstep._doctor.read_program import Program, Root
from halfstep._doctor.read_sites import Site

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
    model: str
    name: str


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with models and optimizers."""
    for root in program.roots:
        for built in _optimizers(program, root):
            yield from _lowered(program, root, built)


def _optimizers(program: Program, root: Root) -> Iterator[_Built]:
    for site in root.sites:
        if not program.meaning.makes_optimizer(site.call, site.scope):
            continue
        name = _target(site.statement)
        for node in (*site.call.args, *(keyword.value for keyword in site.call.keywords)):
            for model in _models(program, node, site.scope):
                yield _Built(site, model, name or "the optimizer")


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
