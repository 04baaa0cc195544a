"""Many small training scripts: right ones have no finding, one mistake is found in all forms."""

import ast
import textwrap
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep._tools.doctor.doctor import check_source

pytestmark = pytest.mark.slow

IMPORTS = {
    "halfstep": (
        "from halfstep import GradScaler, autocast",
        "autocast('cuda', {})",
        "GradScaler()",
    ),
    "amp": ("import torch.amp as amp", "amp.autocast('cuda', {})", "amp.GradScaler()"),
    "cuda": (
        "from torch.cuda.amp import GradScaler as Scaler, autocast as lower",
        "lower(dtype={})",
        "Scaler()",
    ),
    "torch": ("", "torch.autocast(device_type='cuda', dtype={})", "torch.GradScaler()"),
}
MISTAKES = {
    "none": None,
    "no unscale": "clip-before-unscale",
    "no update": "update-missing",
    "past the scaler": "scaler-bypassed",
    "backward inside": "backward-in-autocast",
    "bfloat16": "scaler-with-bf16",
    "no scaler": "fp16-without-scaler",
    "half": "half-parameters",
}


@dataclass(frozen=True)
class Form:
    """How a script is written; none of it is a mistake."""

    imports: str
    in_class: bool
    in_helper: bool
    has_switch: bool
    window: bool
    clips: bool
    evaluates: bool
    schedules: bool


FORMS = st.builds(Form, st.sampled_from(sorted(IMPORTS)), *[st.booleans() for _ in range(7)])


def write(form: Form, mistake: str) -> str:
    """Write a script of this form, with this mistake."""
    own = "self." if form.in_class else ""
    scaler, optimizer, model = f"{own}scaler", f"{own}optimizer", f"{own}model"
    header, autocast, make_scaler = IMPORTS[form.imports]
    dtype = "torch.bfloat16" if mistake == "bfloat16" else "torch.float16"
    scales = mistake != "no scaler"
    with_autocast = f"with {autocast.format(dtype)}:"

    move = f"{model}.to(device)"
    make_optimizer = f"{optimizer} = torch.optim.SGD({model}.parameters(), lr=0.1)"
    build = [f"{model} = Net()", move, make_optimizer]
    if mistake == "half":
        build.insert(2, f"{model}.half()")
    build += [f"{scaler} = {make_scaler}"] if scales else []

    forward = [with_autocast, f"    loss = F.mse_loss({model}(x), y)"]
    backward = f"{scaler}.scale(loss).backward()" if scales else "loss.backward()"
    forward.append(f"    {backward}" if mistake == "backward inside" else backward)

    past = mistake == "past the scaler" or not scales
    clip = [f"torch.nn.utils.clip_grad_norm_({model}.parameters(), 1.0)"]
    if scales and mistake != "no unscale" and not past:
        clip.insert(0, f"{scaler}.unscale_({optimizer})")
    step = clip if mistake == "no unscale" or (form.clips and not past) else []
    step = [*step, f"{optimizer}.step()" if past else f"{scaler}.step({optimizer})"]
    if not past and mistake != "no update":
        step.append(f"{scaler}.update()")
    step.append(f"{optimizer}.zero_grad()")
    return script(form, header, build, forward, step)


def script(form: Form, header: str, build: list[str], forward: list[str], step: list[str]) -> str:
    own = "self." if form.in_class else ""
    receiver = "self" if form.in_class else ""
    if form.window:
        step = ["if i % 4 == 3:", *indented(step)]
    body = [*forward, *step]
    if form.has_switch:
        plain = [f"loss = F.mse_loss({own}model(x), y)", "loss.backward()"]
        body = [
            "if mixed:",
            *indented(body),
            "else:",
            *indented([*plain, f"{own}optimizer.step()"]),
        ]
    functions = []
    if form.in_helper:
        arguments = ", ".join(each for each in (receiver, "i, x, y, mixed") if each)
        functions = [f"def one_step({arguments}):", *indented(body)]
        body = [f"{own}one_step(i, x, y, mixed)"]
    epoch = ["for i, (x, y) in enumerate(batches):", *indented(body)]
    epoch += [f"{own}scheduler.step()"] if form.schedules else []
    if form.evaluates:
        epoch += ["with torch.no_grad():", "    for x, y in held_out:", f"        {own}model(x)"]
    train = ["for epoch in range(3):", *indented(epoch)]
    top = ["import torch", "import torch.nn.functional as F", header]
    if form.in_class:
        methods = ["def __init__(self):", *indented(build), *functions]
        methods += ["def train(self, mixed):", *indented(train)]
        return "\n".join([*top, "class Trainer:", *indented(methods)])
    return "\n".join([*top, *functions, *build, *train])


def indented(lines: list[str]) -> list[str]:
    return textwrap.indent("\n".join(lines), "    ").splitlines()


def wrong(source: str) -> list[str]:
    found = check_source(source)
    assert all(ast.parse(finding.code) is not None for finding in found)
    return [finding.id for finding in found if finding.severity != "notice"]


@pytest.mark.parametrize("mistake", MISTAKES)
@settings(max_examples=40)
@given(form=FORMS)
def test_a_mistake_is_found_in_every_form_and_nothing_else(mistake: str, form: Form) -> None:
    source = write(form, mistake)
    wanted = MISTAKES[mistake]
    assert sorted(set(wrong(source))) == ([wanted] if wanted else []), source


LINES = (
    "a.b()",
    "a.step()",
    "a.scale(b).backward()",
    "a.unscale_(b)",
    "a = b",
    "f()",
    "return",
    "if a:",
    "for a in b:",
    "def f():",
    "with autocast():",
)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(LINES), max_size=25))
def test_nothing_that_is_python_makes_it_fail(lines: list[str]) -> None:
    depth, source = 1, ["from halfstep import autocast", "def g():"]
    for line in lines:
        source.append("    " * depth + line)
        depth += line.endswith(":")
        depth = max(depth - (line == "return"), 1)
    source.append("    " * depth + "pass")
    check_source("\n".join(source))
