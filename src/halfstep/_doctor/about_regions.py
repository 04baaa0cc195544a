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
                f"`{what}` runs inside the autocast of line {around.line}: backward ops follow "
                "the dtypes of the forward pass by themselves, and autocast around them lowers "
                "what your own backward functions compute in float32",
                "end autocast before backward: indent that call one level less",
                names=(what,),
                line=site.line,
            )
        else:
            whose = "decorator" if around.is_decorator else "autocast"
            function = caller.function if caller is not None else None
            yield Finding(
                "autocast-around-backward",
                f"`{what}` runs under the {whose} of line {around.line}, which is around all of "
                f"{f'`{function.name}`' if function else 'the function'}, not only the forward "
                "pass",
                "put autocast around the forward pass and the loss only",
                "with autocast(...):\n    loss = ...  # the forward pass and the loss\n"
                "...  # backward out here",
                (what,),
                line=site.line,
            )


def _casts_in_loops(program: Program) -> Iterator[Finding]:
    seen: set[ast.AST] = set()
    backwards = [site for site in program.sites if program.is_backward(site)]
    trained_in = {loop for site in backwards for loop in site.around("loop")}
    for site in program.sites:
        if site.autocast is None or not site.autocast.is_torch or site.has_grad:
            continue
        # The innermost is the autocast: the loop around it enters it in every pass.
        nested = [each for each in site.inside if each.kind in ("loop", "autocast")]
        if len(nested) < 2 or [each.kind for each in nested].count("autocast") > 1:
            continue
        loop, around = nested[-2:]
        if around.kind != "autocast" or around.node in seen:
            continue
        if loop.node in trained_in:  # the weights change in each pass
            continue
        if _uses_no_weights(program, site) or _has_loop(site, around):
            continue
        seen.add(around.node)
        yield Finding(
            "weights-cast-in-loop",
            f"`torch.autocast` is entered in every pass of the loop in line "
            f"{loop.line}, without gradients: it drops the casts of the "
            "weights each time it ends, and makes them again",
            "enter it once, around the loop; or hold the casts: with halfstep.hold_casts(model):",
            "from halfstep import autocast",
            line=around.line,
        )


def _uses_no_weights(program: Program, site: Site) -> bool:
    """Return whether a call uses no weights, like ``model(x).argmax()``, a method of a result."""
    name = program.values.qualified(site.call.func, site.scope)
    return name.startswith("torch.") or bool(site.method and isinstance(site.owner, ast.Call))


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
    for root in program.roots if backwards else ():
        trains = any(site in backwards for site in root.sites)
        for site in root.sites:
            if site.autocast is None or site.autocast.dtype != "float16" or not site.has_grad:
                continue
            around = site.inside[site.autocast_at]
            if trains or around.is_decorator:
                yield Finding(
                    "fp16-without-scaler",
                    "autocast to float16 trains without a scaler: gradients below 6e-8 silently "
                    "become zero",
                    "scale the loss; or use bfloat16, which needs no scaler, where it is fast",
                    "from halfstep import GradScaler\nscaler = GradScaler()\n"
                    "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
                    line=around.line,
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
