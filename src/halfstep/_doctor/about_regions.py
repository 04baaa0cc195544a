"""Checks of autocast regions and the calls inside them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import dotted
from halfstep._doctor.read_program import Program, Root
from halfstep._doctor.read_sites import Around, Site

SCALES = re.compile(r"scaler|loss_?scale|grad_?scale|scale_loss|get_scale", re.I)
"""Matches names that are typical for code that scales a loss."""
_FRAMEWORKS = re.compile(r"deepspeed|accelerat|lightning|fabric|colossalai|apex|megatron", re.I)

_MODEL = re.compile(r"(^|_)(model|net|unet|network|generator|discriminator)$|^net[A-Z_]")
"""Matches names that are typical for a model."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)


def findings(program: Program) -> Iterator[Finding]:
    """Yield problems with regions of autocast."""
    yield from _backward_inside(program)
    yield from _casts_in_loops(program)
    yield from _without_scaler(program)
    yield from _scaler_with_bf16(program)
    yield from _other_device(program)
    for root in program.roots:
        yield from _without_forward(program, root)


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
    switches = {autocast.switch for autocast in found if not re.search("16|half", autocast.switch)}
    for name, scaler in program.scalers.items():
        is_on = scaler.enabled or (scaler.enabled is None and scaler.switch in switches)
        if is_on and not scaler.is_guard:
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


def _other_device(program: Program) -> Iterator[Finding]:
    """Yield autocasts for another device than the one that the models are moved to."""
    autocasts = {
        around.line: around.autocast
        for site in program.sites
        if site.autocast and site.has_grad
        for around in [site.inside[site.autocast_at]]
        if around.autocast is not None
    }
    types = {autocast.device for autocast in autocasts.values()}
    if len(types) != 1:
        return
    lowered = types.pop()
    moves = [devices for site in program.sites if (devices := _moved_to(program, site)) is not None]
    if lowered == "cpu" and any(site.method == "cuda" for site in program.sites):
        moves = [{"cuda"}]
    devices = set().union(*moves)
    if not devices or not all(moves):
        return
    # `autocast("cuda")` switches itself off where there is no GPU.
    if not lowered or (lowered in devices and (lowered == "cuda" or len(devices) == 1)):
        return
    model_at = " or ".join(sorted(devices - {lowered}))
    for line in autocasts:
        yield Finding(
            "device-differs",
            f"autocast lowers what runs on {lowered}, and the model is moved to {model_at}: the "
            "forward pass runs in float32",
            "give autocast the device type of the model",
            f'with autocast("{model_at.partition(" ")[0]}"):\n    ...',
            line=line,
        )


def _moved_to(program: Program, site: Site) -> set[str] | None:
    """Return the devices that a model may be moved to, empty if unknown; None for other calls."""
    target = site.statement.targets[0] if isinstance(site.statement, ast.Assign) else site.owner
    if site.method not in ("to", "cuda") or not _is_model(target):
        return None
    if site.method == "cuda":
        return {"cuda"}
    if not site.call.args or program.values.dtype(site.call.args[0], site.scope):
        return None
    return program.values.devices(site.call.args[0], site.scope)


def _is_model(node: ast.expr) -> bool:
    return bool(_MODEL.search(dotted(node).removesuffix(".module").rpartition(".")[2]))


def _without_forward(program: Program, root: Root) -> Iterator[Finding]:
    """Yield autocasts beside a forward pass, where the loss is scaled."""
    own = [site for site in root.sites if site.has_grad]
    forwards = [site for site in own if _is_model(site.call.func)]
    regions = {
        site.inside[site.autocast_at].line: site.inside[site.autocast_at].node
        for site in own
        if site.autocast is not None
    }
    is_scaled = any(program.scaled_by(site) for site in own)
    if not (is_scaled and forwards and regions) or any(site.autocast for site in forwards):
        return
    inside = [site for site in own if site.autocast is not None]
    if any(site.autocast_at >= 0 and _may_run_model(site) for site in inside):
        return
    loops = {tuple(site.around("loop")) for site in inside}
    model = next((each for each in forwards if tuple(each.around("loop")) in loops), None)
    if model is None:
        return
    name = dotted(model.call.func)
    line = min(regions)
    yield Finding(
        "autocast-without-forward",
        f"autocast is around other calls, and `{name}(...)` in line {model.line} is outside: the "
        "model runs in float32, as slow as before, and only its results are lowered",
        "put the forward pass and the loss into autocast",
        f"with autocast(...):\n    output = {name}(...)\n    loss = ...",
        (name,),
        line=line,
    )


def _may_run_model(site: Site) -> bool:
    """Return whether a call may run a model: it is given one, or is a method of an object."""
    parts = [*site.call.args, *(keyword.value for keyword in site.call.keywords)]
    named = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.expr)]
    is_method = dotted(site.owner) == "self" and not site.method.endswith(("loss", "criterion"))
    return any(map(_is_model, [*named, site.owner])) or is_method
