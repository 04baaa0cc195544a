"""Checks of precision in source: autocast regions, and lowered parameters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep._tools.doctor.finding import Finding, finding
from halfstep._tools.doctor.read_names import NameScope, arguments, dotted
from halfstep._tools.doctor.read_program import Built, Program
from halfstep._tools.doctor.read_sites import Site
from halfstep._tools.doctor.read_values import SourceScaler, argument

_SCALES = re.compile(r"scaler|loss_?scale|grad_?scale|scale_loss|get_scale", re.I)
"""A pattern for names in code that scales a loss."""
_FRAMEWORKS = re.compile(r"deepspeed|accelerat|lightning|fabric|colossalai|apex|megatron", re.I)

_BF16 = re.compile(r"bf_?16|bfloat", re.I)
"""A pattern for names in code that moves a model to a device, or that has others do so."""
_LOWERS_IN = re.compile(rf"cast|half(?!step)|16|precision|policy|{_FRAMEWORKS.pattern}", re.I)
"""A pattern for names in code that lowers a model in another way than autocast."""
_LIBRARIES = ("torch.nn.", "torchvision.models.", "timm.", "transformers.")
"""The beginnings of the names of functions that make models in float32."""


def findings(program: Program) -> Iterator[Finding]:
    yield from _backward_inside(program)
    yield from _without_scaler(program)
    yield from _never_lowered(program)
    yield from _refused_on_cuda(program)
    yield from _scaler_with_bf16(program)
    yield from _ignored(program)
    for built in (*program.built, *program.trainers):
        yield from _lowered(program, built)


def _backward_inside(program: Program) -> Iterator[Finding]:
    for site in program.sites:
        if not program.is_backward(site) or site.autocast is None:
            continue
        around = site.inside[site.autocast_at]
        caller = next((a for a in site.inside[site.autocast_at :] if a.kind == "call"), None)
        what = ast.unparse(site.call.func)
        if not around.is_decorator and caller is None:
            yield finding("backward-in-autocast", site.line, what=what, line_of=around.line)
        else:
            whose = "decorator" if around.is_decorator else "autocast"
            function = caller.function if caller is not None else None
            yield finding(
                "autocast-around-backward",
                site.line,
                what=what,
                whose=whose,
                line_of=around.line,
                function=f"`{function.name}`" if function else "the function",
            )


def _without_scaler(program: Program) -> Iterator[Finding]:
    words = program.words
    if any(map(_SCALES.search, words)) or any(map(_FRAMEWORKS.search, words | program.imported)):
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
                yield finding("fp16-without-scaler", around.line)


def _never_lowered(program: Program) -> Iterator[Finding]:
    """Yield a finding about a scaler in a file whose models certainly run in float32."""
    if any(map(_LOWERS_IN.search, program.words)) or any(map(_FRAMEWORKS.search, program.imported)):
        return
    for root in program.roots:
        scaler = next(filter(None, map(program.scaled_by, root.sites)), "")
        made = program.scalers.get(scaler)
        models = [s for s in root.sites if program.is_model(s.call.func) and s.has_grad]
        if made is None or not made.line or not models:
            continue
        if all(_is_float32(program, site.call.func, site.scope) for site in models):
            model = dotted(models[0].call.func)
            yield finding("scaler-without-autocast", made.line, scaler=scaler, model=model)


def _is_float32(program: Program, node: ast.expr, scope: NameScope) -> bool:
    """Return whether a model is made by a class of this file, or of a known library."""

    def is_float32(node: ast.expr, scope: NameScope) -> bool:
        if not isinstance(node, ast.Call):
            return False
        name, owner = program.meaning.qualified(node.func, scope), node.func
        if isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Call):
            return _is_float32(program, owner.value, scope)  # Net().to(device)
        if name.endswith(("DataParallel", "torch.compile")) and node.args:
            return _is_float32(program, node.args[0], scope)
        return name.startswith(_LIBRARIES) or dotted(owner) in program.meaning.names.bases

    found = program.meaning.candidates(node, scope)
    return bool(found) and all(written and is_float32(*written) for written in found)


def _refused_on_cuda(program: Program) -> Iterator[Finding]:
    """Yield findings about losses of probabilities under autocast, which PyTorch refuses."""
    for site in program.sites:
        lower = site.autocast
        if lower is None or lower.device != "cuda" or program.arm_of(site, {lower.switch}) == 1:
            continue
        made = program.meaning.candidates(site.call.func, site.scope)
        called = {_function_of(program, *each) if each else "" for each in made}
        if called and called <= {"torch.nn.BCELoss", "torch.nn.functional.binary_cross_entropy"}:
            loss = ast.unparse(site.call.func)
            yield finding("bce-in-autocast", site.line, loss=loss)


def _function_of(program: Program, node: ast.expr, scope: NameScope) -> str:
    """Return the full name of a function, or of the one that a call calls."""
    return program.meaning.qualified(node.func if isinstance(node, ast.Call) else node, scope)


def _is_plain_backward(program: Program, site: Site) -> bool:
    """Return whether a call is the backward pass of a loss without any factor."""
    if not program.is_backward(site) or program.scaled_by(site) or not site.has_grad:
        return False
    if site.call.args and dotted(site.owner) != "torch.autograd":  # an object that may scale
        return False
    of = program.meaning.candidates(site.owner, site.scope)
    return not any(
        each and isinstance(each[0], ast.BinOp) and isinstance(each[0].op, ast.Mult) for each in of
    )


def _scaler_with_bf16(program: Program) -> Iterator[Finding]:
    sites = [site for site in program.sites if site.has_grad and site.autocast]
    found = [site.autocast for site in sites if site.autocast]
    line = min((site.inside[site.autocast_at].line for site in sites), default=0)
    if not found:
        lowered = [_lowering(program, built) for built in program.built]
        line = max((site.line for site, _ in filter(None, lowered)), default=0)
        if {each and each[1] for each in lowered} != {"bfloat16"}:
            return
    if any(autocast.dtype != "bfloat16" for autocast in found):
        return
    switches = {autocast.switch for autocast in found}
    scaled: dict[str, SourceScaler] = {}  # made elsewhere; on if autocast's switch decides
    for site in program.sites:
        if name := program.scaled_by(site):
            scaled[name] = SourceScaler(program.arm_of(site, switches) == 0 or None)
    for name, scaler in (scaled | program.scalers).items():
        if not scaler.is_guard and _may_be_on(name, scaler, switches):
            yield finding("scaler-with-bf16", scaler.line or line, scaler=name)


def _may_be_on(name: str, scaler: SourceScaler, switches: set[str]) -> bool:
    """Return whether a scaler is on, shares the switch of an autocast, or is made elsewhere."""
    if scaler.enabled is not None:
        return scaler.enabled
    is_theirs = any(name.rpartition(".")[2] in switch for switch in switches)
    is_elsewhere = not scaler.line and not any(_BF16.search(switch) for switch in switches)
    return is_theirs or is_elsewhere or bool(scaler.switch and scaler.switch in switches)


_ON_CPU = {
    "TrainingArguments": ("fp16", True, "use_cpu", "bf16=True"),
    "Accelerator": ("mixed_precision", "fp16", "cpu", 'mixed_precision="bf16"'),
}
"""Option and value for float16, the option for a CPU, and the cure, by the end of a class name."""


def _ignored(program: Program) -> Iterator[Finding]:
    """Yield findings about float16 that accelerate ignores, since the same call asks for a CPU."""
    for site in program.sites if "use_scaler" not in program.words else ():  # halfstep's lowers
        name = dotted(site.call.func).rpartition(".")[2]
        for end, (option, value, cpu, code) in _ON_CPU.items():
            given = [argument(site.call, each) for each in (option, cpu)]
            known = [each and program.meaning.constant(each, site.scope) for each in given]
            if name.endswith(end) and known == [value, True]:
                what = f"`{name}({option}={value!r}, {cpu}=True)`: accelerate ignores it on a CPU"
                yield finding("fp16-on-cpu", site.line, what=what, code=code)


# --- lowered parameters ---------------------------------------------------------------------------


_LOWERS = {"half": "float16", "bfloat16": "bfloat16"}
_RESTORES = ("float", "double")
_IDS = {"float16": "half-parameters", "bfloat16": "bf16-parameters"}
_MOVES = ("to", "cuda", "cpu", "xpu", "npu", "to_empty")
_CHAINED = (*_MOVES, *_LOWERS, *_RESTORES, "train", "eval", "requires_grad_")


def _is_same_run(site: Site, built: Built) -> bool:
    """Return whether a name means the same at both: in one call, not in different arms."""
    is_same_call = site.around("call") == built.site.around("call")
    return bool(built.model) and is_same_call and not site.excludes(built.site)


def _lowered(program: Program, built: Built) -> Iterator[Finding]:
    lowered = _lowering(program, built)
    if "master_weights" in program.words or lowered is None or not lowered[1]:
        return
    site, dtype = lowered
    yield finding(
        _IDS[dtype],
        site.line,
        what=f"`{ast.unparse(site.call)}` makes the parameters {dtype}, and "
        f"`{built.name.removesuffix('.create_optimizer()')}` updates them there",
        optimizer="optimizer" if " " in built.name else built.name,
        model=built.model,
    )


def _lowering(program: Program, built: Built) -> tuple[Site, str] | None:
    """Return the last cast of the parameters that an optimizer has, and its half dtype or empty."""
    lowered: tuple[Site, str] | None = None
    for site in built.root.sites:
        if _is_same_run(site, built) and _model(site) == built.model:
            dtype = "" if site.method in _RESTORES else _lowers_to(program, site)
            if dtype is not None:
                lowered = (site, dtype)
    return lowered


def _lowers_to(program: Program, site: Site) -> str | None:
    """Return the half dtype that a call casts to, empty for another dtype, None for no cast."""
    if site.method in _LOWERS and not site.call.args:
        return _LOWERS[site.method]
    nodes = arguments(site.call) if site.method == "to" else ()
    if site.method == "from_pretrained":
        nodes = [each.value for each in site.call.keywords if each.arg in ("torch_dtype", "dtype")]
    given = [program.meaning.dtype(node, site.scope) for node in nodes]
    dtype = next(filter(None, given), None)
    return "" if dtype and dtype not in _LOWERS.values() else dtype


def _model(site: Site) -> str:
    """Return the model that a method is called on: ``net`` also for ``net.cuda().half()``.

    For a model that is created in the same statement, return the name that it is assigned to.
    """
    owner = site.owner
    while (
        isinstance(owner, ast.Call)
        and isinstance(owner.func, ast.Attribute)
        and owner.func.attr in _CHAINED
    ):
        owner = owner.func.value
    is_made = isinstance(owner, ast.Call) or site.method == "from_pretrained"
    return site.target_name if is_made else dotted(owner)
