"""Checks of autocast regions and the calls inside them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_program import Around, Program, Site

SCALES = re.compile(r"scaler|loss_?scale|grad_?scale|scale_loss|get_scale", re.I)
"""Matches names that are typical for code that scales a loss."""
_FRAMEWORKS = re.compile(r"deepspeed|accelerat|lightning|fabric|colossalai|apex|megatron", re.I)

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with regions of autocast."""
    yield from _backward_inside(program)
    yield from _casts_in_loops(program)
    yield from _without_scaler(program)
    yield from _scaler_with_bf16(program)


def _backward_inside(program: Program) -> Iterator[Finding]:
    for site in program.sites:
        if not program.is_backward(site) or site.autocast is None:
            continue
        around = site.inside[site.autocast_at]
        caller = next((a for a in site.inside[site.autocast_at :] if a.kind == "call"), None)
        what = ast.unparse(site.call.func)
        if not around.is_decorator and caller is None:
            yield Finding(
                "backward-in-autocast",
                f"`{what}` runs inside the autocast of line {_line(around)}: backward ops follow "
                "the dtypes of the forward pass by themselves, and autocast around them lowers "
                "what your own backward functions compute in float32",
                "end autocast before backward: indent that call one level less",
                names=(what,),
                line=site.line,
            )
        else:
            whose = "decorator" if around.is_decorator else "autocast"
            yield Finding(
                "autocast-around-backward",
                f"`{what}` runs under the {whose} of line {_line(around)}, which is around all of "
                f"{_function(caller)}, not only the forward pass",
                "put autocast around the forward pass and the loss only",
                "with autocast(...):\n    loss = ...  # the forward pass and the loss\n"
                "...  # backward out here",
                (what,),
                line=site.line,
            )


def _function(caller: Around | None) -> str:
    if caller is not None and caller.function is not None:
        return f"`{caller.function.name}`"
    return "the function"


def _casts_in_loops(program: Program) -> Iterator[Finding]:
    seen: set[ast.AST] = set()
    trained_in = {
        loop for site in program.sites if program.is_backward(site) for loop in site.loops
    }
    for site in program.sites:
        at = [n for n, around in enumerate(site.inside) if around.kind == "autocast"]
        if len(at) != 1 or site.has_grad or site.autocast is None:
            continue
        around = site.inside[at[0]]
        loops = [n for n, each in enumerate(site.inside) if each.kind == "loop"]
        is_entered_in_loop = bool(loops) and loops[-1] < at[0]
        if not site.autocast.is_torch or not is_entered_in_loop or around.node in seen:
            continue
        if site.inside[loops[-1]].node in trained_in:  # the weights change in each pass
            continue
        if _is_of_torch(program, site) or _has_loop(site, around):
            continue
        seen.add(around.node)
        yield Finding(
            "weights-cast-in-loop",
            f"`torch.autocast` is entered in every pass of the loop in line "
            f"{_line(site.inside[loops[-1]])}, without gradients: it drops the casts of the "
            "weights each time it ends, and makes them again",
            "enter it once, around the loop; or hold the casts: with halfstep.hold_casts(model):",
            "from halfstep import autocast",
            line=_line(around),
        )


def _is_of_torch(program: Program, site: Site) -> bool:
    name = program.values.qualified(site.call.func, site.scope)
    return name.startswith("torch.") or bool(site.method and _is_chain(site.owner))


def _is_chain(owner: ast.expr) -> bool:
    """Return whether a method is called on a result: ``model(x).argmax()`` uses no weights."""
    return isinstance(owner, ast.Call)


def _has_loop(site: Site, around: Around) -> bool:
    """Return whether a loop inside the context shares its casts."""
    statements = [
        node
        for node in ast.walk(site.scope.node)
        if isinstance(node, ast.With | ast.AsyncWith)
        and any(item.context_expr is around.node for item in node.items)
    ]
    return any(isinstance(node, _LOOPS) for each in statements for node in ast.walk(each))


def _without_scaler(program: Program) -> Iterator[Finding]:
    words = {*program.words, *program.known}
    if any(map(SCALES.search, words)) or any(map(_FRAMEWORKS.search, words | program.imported)):
        return
    if not any(program.is_optimizer_step(site) for site in program.sites):
        return
    backwards = [site for site in program.sites if _is_plain_backward(program, site)]
    if not backwards:
        return
    for root in program.roots:
        trains = any(site in backwards for site in root.sites)
        for site in root.sites:
            around = site.inside[site.autocast_at] if site.autocast_at >= 0 else None
            if around is None or site.autocast is None or not site.has_grad:
                continue
            if site.autocast.dtype == "float16" and (trains or around.is_decorator):
                yield Finding(
                    "fp16-without-scaler",
                    "autocast to float16 trains without a scaler: gradients below 6e-8 silently "
                    "become zero",
                    "scale the loss; or use bfloat16, which needs no scaler, where it is fast",
                    "from halfstep import GradScaler\nscaler = GradScaler()\n"
                    "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
                    line=_line(around),
                )


def _is_plain_backward(program: Program, site: Site) -> bool:
    """Return whether a call is a backward pass of a loss without any factor."""
    if not program.is_backward(site) or program.scaled_by(site) or not site.has_grad:
        return False
    of = program.values.candidates(site.owner, site.scope)
    return not any(
        each and isinstance(each[0], ast.BinOp) and isinstance(each[0].op, ast.Mult) for each in of
    )


def _scaler_with_bf16(program: Program) -> Iterator[Finding]:
    found = [site.autocast for site in program.sites if site.has_grad and site.autocast]
    if not found or any(autocast.dtype != "bfloat16" for autocast in found):
        return
    for name, scaler in program.scalers.items():
        if scaler.enabled and not scaler.is_guard:
            yield Finding(
                "scaler-with-bf16",
                f"`{name}` scales losses of a training in bfloat16, which has the range of "
                "float32: nothing underflows, and each overflow of the scale costs a step",
                "leave the scaler out; or keep one that scales nothing and only skips bad steps",
                "from halfstep import GradScaler, Static\n"
                f"{name} = GradScaler(init_scale=1.0, rule=Static())",
                (name,),
                line=scaler.line or min(site.line for site in program.sites if site.autocast),
            )


def _line(around: Around) -> int:
    return int(getattr(around.node, "lineno", 0))
