"""What is found in source, and what is not: each rule with programs that it is and is not about."""

import ast
import re
from pathlib import Path

import pytest

from halfstep._tools.doctor.doctor import check_file, check_source
from halfstep._tools.doctor.finding import CATALOG

ROOT = Path(__file__).parents[2]

IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn
from halfstep import GradScaler, autocast
"""


def found(source: str, imports: str = IMPORTS) -> list[str]:
    """Return ``id:line`` of all findings, lines counted from the first after the imports.

    Deprecated names are left out: tests/doctor/test_deprecated.py is about them.
    """
    offset = imports.count("\n")
    findings = [each for each in check_source(imports + source) if each.id != "deprecated-amp"]
    for finding in findings:
        ast.parse(finding.code)
        assert finding.file == "<source>"
    return [f"{finding.id}:{finding.line - offset}" for finding in findings]


def cases(*table: tuple[str, str, str]) -> pytest.MarkDecorator:
    """Parametrize with a title, the findings in one string, and a program."""
    params = [pytest.param(wanted.split(), source, id=title) for title, wanted, source in table]
    return pytest.mark.parametrize(("wanted", "source"), params)


def programs(text: str) -> pytest.MarkDecorator:
    """Parametrize with programs, each below a line ``## title -> the findings``."""
    return cases(*re.findall(r"^## (.+?)(?: -> (.+))?\n((?:(?!## ).*\n)+)", text, re.MULTILINE))


# --- clipping -------------------------------------------------------------------------------------


@programs("""
## in one function -> clip-before-unscale:2
scaler.scale(loss).backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
## unscaled before
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
## unscaled too late -> clip-before-unscale:2
scaler.scale(loss).backward()
nn.utils.clip_grad_value_(model.parameters(), 1.0)
scaler.unscale_(optimizer)
scaler.step(optimizer)
## clipped by the scaler, by the step, by accelerate
scaler.scale(loss).backward()
scaler.clip_grad_norm_(optimizer, 1.0)
accelerator.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer, max_norm=1.0)
## only where nothing is scaled
if use_amp:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
else:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
## two ifs with one condition
if scaler is None:
    loss.backward()
else:
    scaler.scale(loss).backward()
if scaler is not None:
    scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
if scaler:
    scaler.step(optimizer)
## two ifs, and nobody unscales -> clip-before-unscale:5
if use_amp:
    scaler.scale(loss).backward()
else:
    loss.backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
if use_amp:
    scaler.step(optimizer)
else:
    optimizer.step()
## after an early return
def step():
    if not use_amp:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.step(optimizer)
## in a function of the file -> clip-before-unscale:2
def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
def step():
    scaler.scale(loss).backward()
    clip(model)
    scaler.step(optimizer)
## unscaled in a method of the class
class Trainer:
    def unscale(self):
        self.scaler.unscale_(self.optimizer)
    def step(self):
        self.scaler.scale(loss).backward()
        self.unscale()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
## the second of two optimizers -> clip-before-unscale:6
scaler.scale(d_loss).backward()
scaler.unscale_(d_optimizer)
nn.utils.clip_grad_norm_(d.parameters(), 1.0)
scaler.step(d_optimizer)
scaler.scale(g_loss).backward()
nn.utils.clip_grad_norm_(g.parameters(), 1.0)
scaler.step(g_optimizer)
## in a window of accumulation, the scaled loss in a variable -> clip-before-unscale:5
for i, batch in enumerate(batches):
    loss = scaler.scale(model(batch))
    loss.backward()
    if (i + 1) % 4 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
## by a scaler that is off
scaler = GradScaler(enabled=False)
scaler.scale(loss).backward()
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
""")
def test_clipping(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


# --- the other calls of an iteration --------------------------------------------------------------


@programs("""
## stepped by itself -> scaler-bypassed:2
scaler.scale(loss).backward()
optimizer.step()
## one of several
scaler.scale(loss).backward()
scaler.step(optimizer)
## something else that scales
layer.scale(loss).backward()
optimizer.step()
## another loss, not scaled
scaler.scale(d_loss).backward()
scaler.step(d_optimizer)
g_loss.backward()
g_optimizer.step()
## in the other arm
if fp16:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
else:
    loss.backward()
    optimizer.step()
## behind an early return
def step():
    if use_amp:
        scaler.scale(loss).backward()
        return
    optimizer.step()
## in opposite conditions
if scaler is not None:
    scaler.scale(loss).backward()
if scaler is None:
    optimizer.step()
## unscaled by hand
scaler.scale(loss).backward()
for p in model.parameters():
    p.grad.div_(scaler.get_scale())
optimizer.step()
""")
def test_a_step_past_the_scaler(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


@cases(
    (
        "never",
        "update-missing:4",
        "scaler = GradScaler()\n"
        "for batch in batches:\n"
        "    scaler.scale(model(batch)).backward()\n"
        "    scaler.step(optimizer)\n",
    ),
    (
        "in a method",
        "",
        "class Trainer:\n"
        "    def __init__(self):\n"
        "        self.scaler = GradScaler()\n"
        "    def step(self):\n"
        "        self.scaler.scale(loss).backward()\n"
        "        self.scaler.step(optimizer)\n"
        "    def end(self):\n"
        "        self.scaler.update()\n",
    ),
    (
        "by somebody else",
        "",
        "scaler = GradScaler()\nscaler.step(optimizer)\nfinish_iteration(scaler)\n",
    ),
    ("under another name", "", "s = scaler = GradScaler()\nt = scaler\nscaler.step(optimizer)\n"),
    (
        "by a class that is written elsewhere",
        "",
        "class Trainer(Base):\n    def __init__(self):\n        self.scaler = GradScaler()\n"
        "    def step(self):\n        self.scaler.step(self.optimizer)\n",
    ),
    ("of a scaler made elsewhere", "", "def step(scaler):\n    scaler.step(optimizer)\n"),
)
def test_update(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


@cases(
    (
        "positional, PyTorch's",
        "closure-not-unscaled:2",
        "scaler = torch.cuda.amp.GradScaler()\nscaler.step(optimizer, closure)\nscaler.update()\n",
    ),
    ("ours", "", "scaler = GradScaler()\nscaler.step(optimizer, closure)\nscaler.update()\n"),
    ("not known whose", "", "scaler.step(optimizer, closure)\n"),
)
def test_closures(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


LOOP = (
    "for batch in batches:\n    scaler.scale(f(batch)).backward()\n    scaler.step(optimizer)\n"
    "    scaler.update()\n"
)


@cases(
    ("beside the step", "scheduler-ungated:5", f"{LOOP}    scheduler.step()\n"),
    ("once an epoch", "", f"for epoch in epochs:\n    {LOOP.replace(chr(10), chr(10) + '    ')}"
     "scheduler.step()\n"),
    ("waiting for the scale", "", f"{LOOP}    if scaler.get_scale() >= before:\n"
     "        scheduler.step()\n"),
    ("our call", "", f"{LOOP}    scaler.step_scheduler(scheduler)\n"),
    ("if there is one", "scheduler-ungated:6", f"{LOOP}    if scheduler is not None:\n"
     "        scheduler.step()\n"),
    ("told a loss", "", f"{LOOP}    scheduler.step(loss)\n"),
    ("without a scaler", "", "for batch in batches:\n    optimizer.step()\n    scheduler.step()\n"),
    ("by its class", "scheduler-ungated:6",
     f"decay = torch.optim.lr_scheduler.StepLR(optimizer, 3)\n{LOOP}    decay.step()\n"),
)  # fmt: skip
def test_schedules(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


# --- regions --------------------------------------------------------------------------------------


@programs("""
## inside -> backward-in-autocast:3
with autocast('cpu', torch.bfloat16):
    loss = f(x)
    loss.backward()
## behind
with autocast('cpu', torch.bfloat16):
    loss = f(x)
loss.backward()
## autocast off, or off inside
with autocast('cpu', enabled=False):
    loss.backward()
with autocast('cpu'):
    with autocast('cpu', enabled=False):
        loss.backward()
## in a variable, perhaps -> backward-in-autocast:3
context = torch.autocast('cpu') if lower else nullcontext()
with torch.enable_grad(), context:
    loss.backward()
## a decorator -> autocast-around-backward:4
@autocast('cpu', torch.bfloat16)
def step(x):
    loss = f(x)
    loss.backward()
## around a call -> autocast-around-backward:2
def step(x):
    f(x).backward()
def epoch():
    with autocast('cpu', torch.bfloat16):
        for x in batches:
            step(x)
## backward of a function of autograd
class Double(torch.autograd.Function):
    @staticmethod
    @torch.autocast('cpu')
    def backward(ctx, grad):
        return Inner.backward(ctx, grad)
""")
def test_backward_and_autocast(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


@programs("""
## in the loop -> weights-cast-in-loop:3
with torch.no_grad():
    for x in batches:
        with torch.autocast('cuda'):
            model(x)
## no_grad in the loop too -> weights-cast-in-loop:2
for x in batches:
    with torch.inference_mode(), torch.cuda.amp.autocast():
        model(x)
## a decorated function in the loop -> weights-cast-in-loop:1
@torch.autocast('cuda')
def predict(x):
    return model(x)
@torch.no_grad()
def evaluate():
    return [predict(x) for x in batches]
## ours
with torch.no_grad():
    for x in batches:
        with autocast('cpu'):
            model(x)
## around the loop
with torch.no_grad():
    with torch.autocast('cuda'):
        for x in batches:
            model(x)
## around loops of its own
with torch.no_grad():
    for epoch in epochs:
        with torch.autocast('cuda'):
            for x in batches:
                model(x)
## around loops of its own and more
with torch.no_grad():
    for epoch in epochs:
        with torch.autocast('cuda'):
            batches = draw()
            for x in batches:
                model(x)
## inside one that is open
with torch.no_grad(), torch.autocast('cuda'):
    for x in batches:
        with torch.autocast('cuda'):
            model(x)
## a target network, whose weights change
for x in batches:
    with torch.no_grad(), torch.autocast('cuda'):
        target = average(x)
    f(x, target).backward()
## with gradients
for x in batches:
    with torch.autocast('cuda'):
        loss = model(x)
""")
def test_casts_in_loops(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


TRAIN = "with {}:\n    loss = F.mse_loss(model(x), y)\nloss.backward()\noptimizer.step()\n"


@cases(
    ("float16", "fp16-without-scaler:1", TRAIN.format("autocast('cpu', torch.float16)")),
    ("half", "fp16-without-scaler:1", TRAIN.format("autocast('cpu', dtype=torch.half)")),
    ("the default of CUDA", "fp16-without-scaler:1", TRAIN.format("torch.autocast('cuda')")),
    ("its older name", "fp16-without-scaler:1", TRAIN.format("torch.cuda.amp.autocast()")),
    ("the default of the CPU", "", TRAIN.format("torch.autocast('cpu')")),
    ("bfloat16", "", TRAIN.format("torch.autocast('cuda', torch.bfloat16)")),
    ("off", "", TRAIN.format("torch.autocast('cuda', enabled=False)")),
    ("a device that is not known", "", TRAIN.format("torch.autocast(device)")),
    ("a dtype that is not known", "", "dtype = find()\n" + TRAIN.format("autocast('cpu', dtype)")),
    (
        "a dtype of two",
        "",
        "dtype = torch.float16 if old else torch.bfloat16\n"
        + TRAIN.format("autocast('cpu', dtype)"),
    ),
    (
        "a variable",
        "fp16-without-scaler:2",
        "dtype = torch.float16\n" + TRAIN.format("autocast('cpu', dtype)"),
    ),
    (
        "a parameter of a function that is called once",
        "fp16-without-scaler:2",
        "def train(dtype):\n    with autocast('cpu', dtype):\n        loss = f(x)\n"
        "    loss.backward()\n    optimizer.step()\n"
        "train(torch.float16)\n",
    ),
    (
        "one that is called twice",
        "",
        "def train(dtype):\n    with autocast('cpu', dtype):\n        loss = f(x)\n"
        "    loss.backward()\n    optimizer.step()\n"
        "train(torch.float16)\ntrain(torch.bfloat16)\n",
    ),
    (
        "a decorated forward",
        "fp16-without-scaler:2",
        "class Net(nn.Module):\n    @torch.autocast('cuda', dtype=torch.float16)\n"
        "    def forward(self, x):\n        return self.body(x)\n"
        "def train():\n    Net()(x).sum().backward()\n    optimizer.step()\n",
    ),
    (
        "a scaler from elsewhere",
        "",
        "loss_scaler = make()\n" + TRAIN.format("autocast('cpu', torch.float16)"),
    ),
    (
        "scaled by hand",
        "",
        "with autocast('cpu', torch.float16):\n    loss = f(x)\n(loss * 1024).backward()\n"
        "optimizer.step()\n",
    ),
    (
        "evaluation",
        "",
        "with torch.no_grad(), autocast('cpu', torch.float16):\n    f(x)\nloss.backward()\n"
        "optimizer.step()\n",
    ),
    (
        "gradients without an optimizer",
        "",
        "with autocast('cpu', torch.float16):\n    loss = f(x)\nloss.backward()\n",
    ),
)
def test_float16_without_a_scaler(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


def test_a_framework_may_scale_elsewhere() -> None:
    source = TRAIN.format("autocast('cpu', torch.float16)")
    assert found(source) == ["fp16-without-scaler:1"]
    assert found(source, IMPORTS + "from accelerate import Accelerator\n") == []


BF16 = "autocast('cpu', torch.bfloat16)"
STEP = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\n"


@cases(
    (
        "both",
        "scaler-with-bf16:1",
        f"scaler = GradScaler()\nwith autocast('cpu', torch.bfloat16):\n    loss = f(x)\n{STEP}",
    ),
    (
        "switched by a variable",
        "",
        f"scaler = GradScaler(enabled=fp16)\nwith {BF16}:\n    f(x)\n{STEP}",
    ),
    (
        "off",
        "",
        f"scaler = GradScaler(enabled=False)\nwith {BF16}:\n    f(x)\n{STEP}",
    ),
    (
        "another autocast in float16",
        "",
        f"scaler = GradScaler()\nwith autocast('cpu', torch.bfloat16):\n    f(x)\n"
        f"with autocast('cpu', torch.float16):\n    f(x)\n{STEP}",
    ),
)
def test_a_scaler_with_bfloat16(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


SCALED = f"scaler = GradScaler()\nloss = f(model(x))\n{STEP}"
ADAM = "optimizer = torch.optim.AdamW(model.parameters())\n"


@cases(
    (
        "all parameters",
        "scaler-with-bf16:3 bf16-parameters:1",
        f"model = Net().to(torch.bfloat16)\n{ADAM}{SCALED}",
    ),
    (
        "back again",
        "",
        f"model = Net().bfloat16().float()\n{ADAM}{SCALED}",
    ),
    (
        "those of one of two optimizers",
        "bf16-parameters:1",
        f"model = Net().to(torch.bfloat16)\n{ADAM}other = torch.optim.SGD(head.parameters())\n"
        "scaler = GradScaler()\nloss = f(model(x))\nscaler.scale(loss).backward()\n"
        "scaler.step(optimizer)\nscaler.step(other)\nscaler.update()\n",
    ),
)
def test_a_scaler_of_bfloat16_parameters(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


@cases(
    ("as it is", "fp16-without-scaler:2", "half = partial(autocast, 'cpu', torch.float16)\n"),
    ("the call decides", "", "half = partial(autocast, 'cpu', dtype=torch.float16)\n"),
)
def test_autocast_through_a_partial(wanted: list[str], source: str) -> None:
    call = "half()" if wanted else "half(dtype=torch.bfloat16)"
    program = source + TRAIN.format(call)
    assert found(program, IMPORTS + "from functools import partial\n") == wanted


# --- models ---------------------------------------------------------------------------------------


@cases(
    ("half before", "half-parameters:1", f"model.half()\n{ADAM}"),
    ("half after", "half-parameters:2", f"{ADAM}model.half()\n"),
    ("to", "half-parameters:1", f"model = Net().to(device, dtype=torch.float16)\n{ADAM}"),
    ("in a chain", "half-parameters:1", f"model = Net().cuda().half().train()\n{ADAM}"),
    ("bfloat16", "bf16-parameters:1", f"model.bfloat16()\n{ADAM}"),
    ("and back", "", f"model.half()\nmodel.float()\n{ADAM}"),
    ("master weights", "", f"model.bfloat16()\n{ADAM}halfstep.master_weights(optimizer)\n"),
    ("another model", "", f"teacher.half()\n{ADAM}"),
    ("an input", "", f"x = x.half()\n{ADAM}"),
    (
        "parameters in groups",
        "half-parameters:2",
        "groups = [{'params': model.parameters()}]\nmodel.half()\n"
        "optimizer = torch.optim.SGD(groups, lr=0.1)\n",
    ),
    (
        "copies in float32",
        "",
        "model.half()\nmasters = [p.clone().float() for p in model.parameters()]\n"
        "optimizer = torch.optim.SGD(masters, lr=0.1)\n",
    ),
    ("an optimizer with masters of its own", "", "model.half()\nFusedAdam(model.parameters())\n"),
)
def test_low_parameters(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("imports", "autocast"),
    [
        ("import torch", "torch.autocast('cuda', torch.float16)"),
        ("import torch as t", "t.amp.autocast('cuda', dtype=t.float16)"),
        ("import torch\nimport torch.amp as amp", "amp.autocast('cuda', torch.float16)"),
        ("from torch.cuda.amp import autocast as ac", "ac()"),
        ("from torch.cuda import amp", "amp.autocast()"),
        ("import torch.cuda.amp", "torch.cuda.amp.autocast(True)"),
        ("import halfstep, torch", "halfstep.autocast(dtype=torch.half)"),
        ("import halfstep as hs\nfrom torch import half", "hs.autocast('cpu', half)"),
        ("from torch import autocast, float16\nac = autocast", "ac('cpu', float16)"),
        ("def f():\n    from torch.cuda.amp import autocast", "autocast()"),
    ],
)
def test_names_are_known_however_they_are_imported(imports: str, autocast: str) -> None:
    source = f"with {autocast}:\n    loss = f(x)\nloss.backward()\noptimizer.step()\n"
    assert found(source, imports + "\n") == ["fp16-without-scaler:1"]


def test_other_things_of_these_names_are_left_alone() -> None:
    source = (
        "with autocast('cpu', float16):\n    loss = f(x)\n    loss.backward()\noptimizer.step()\n"
    )
    assert found(source, "from mxnet.amp import autocast, float16\n") == []


# --- the whole ------------------------------------------------------------------------------------


def test_a_comment_takes_a_finding_back() -> None:
    line = "scaler.scale(loss).backward()\noptimizer.step()"
    assert found(line) == ["scaler-bypassed:2"]
    assert found(f"{line}  # halfstep: allow") == []
    assert found(f"{line}  # halfstep: allow update-missing, scaler-bypassed") == []
    assert found(f"{line}  # halfstep: allow update-missing") == ["scaler-bypassed:2"]


def test_a_finding_that_is_reached_twice_is_told_once() -> None:
    source = (
        "def step():\n    scaler.scale(loss).backward()\n    optimizer.step()\nstep()\nstep()\n"
    )
    assert found(source) == ["scaler-bypassed:3"]


@pytest.mark.slow
def test_functions_that_call_each_other_end() -> None:
    source = "".join(
        f"def f{n}():\n" + "".join(f"    f{m}()\n" for m in range(9)) for n in range(9)
    )
    assert found(source + "loss.backward()\nf0()\n") == []


PATHS = [
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
    *(ROOT / "src").rglob("*.py"),
]


@pytest.mark.slow
def test_there_is_no_false_alarm_in_our_own_code() -> None:
    assert len(PATHS) > 150
    alarms = [
        str(finding)
        for path in PATHS
        for finding in check_file(path)
        if CATALOG[finding.id] != "notice"
    ]
    assert alarms == []


# --- contexts, devices, gradients, the scale that texts name --------------------------------------

LOOP_OF = """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    optimizer.zero_grad()
    with {}:
        loss = model(x).sum()
    {}
    optimizer.step()
"""


@cases(
    (
        "and: autocast is never entered, so float16 needs no scaler",
        "context-not-entered:4",
        LOOP_OF.format(
            "torch.autocast('cuda', torch.float16) and torch.enable_grad()", "loss.backward()"
        ).replace("model", "model.cuda()"),
    ),
    (
        "or: only autocast is entered",
        "fp16-without-scaler:4 context-not-entered:4",
        LOOP_OF.format(
            "torch.autocast('cuda', torch.float16) or torch.enable_grad()", "loss.backward()"
        ).replace("model", "model.cuda()"),
    ),
    (
        "an object that may be None",
        "",
        LOOP_OF.format("context or torch.enable_grad()", "loss.backward()"),
    ),
    (
        "nothing is moved to the device of autocast",
        "device-differs:4",
        LOOP_OF.format("torch.autocast('cuda', torch.bfloat16)", "loss.backward()"),
    ),
    (
        "a file that names a device",
        "",
        "torch.set_default_device('cuda')\n"
        + LOOP_OF.format("torch.autocast('cuda', torch.bfloat16)", "loss.backward()"),
    ),
    (
        "a framework moves the model",
        "",
        "from accelerate import Accelerator\nmodel = Accelerator().prepare(model)\n"
        + LOOP_OF.format("torch.autocast('cuda', torch.bfloat16)", "loss.backward()"),
    ),
)
def test_contexts_that_have_no_effect(wanted: list[str], source: str) -> None:
    assert sorted(found(source)) == sorted(wanted)


ENDLESS = LOOP_OF.format("torch.enable_grad()", "loss.backward()").replace(
    "    optimizer.zero_grad()\n", ""
)


@cases(
    ("never", "gradients-never-zeroed:6", ENDLESS),
    (
        "through a scaler",
        "gradients-never-zeroed:6",
        ENDLESS.replace("loss.backward()", "scaler.scale(loss).backward()").replace(
            "optimizer.step()", "scaler.step(optimizer); scaler.update()"
        ),
    ),
    ("by the model", "", ENDLESS + "    model.zero_grad()\n"),
    ("by hand", "", ENDLESS + "    for p in model.parameters():\n        p.grad = None\n"),
    ("perhaps by a function", "", ENDLESS + "    finish(optimizer)\n"),
    ("an optimizer of another file", "", ENDLESS.replace("torch.optim.SGD", "make_optimizer")),
    ("one step", "", ENDLESS.replace("for x in batches", "if batches")),
)
def test_gradients_that_nothing_clears(wanted: list[str], source: str) -> None:
    assert found(source) == wanted


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("GradScaler()", "65536 times too large"),
        ("GradScaler(init_scale=1024)", "1024 times too large"),
        ("GradScaler(init_scale=2.**10)", "1024 times too large"),
        ("torch.amp.GradScaler('cuda', 2**12)", "4096 times too large"),
        ("torch.cuda.amp.GradScaler(256.0)", "256 times too large"),
        ("GradScaler(init_scale=args.scale)", "too large by the scale"),
    ],
)
def test_a_text_names_the_scale_that_the_scaler_starts_with(made: str, text: str) -> None:
    source = f"scaler = {made}\nscaler.scale(loss).backward()\noptimizer.step()\n"
    (bypassed,) = [each for each in check_source(IMPORTS + source) if each.id == "scaler-bypassed"]
    assert text in bypassed.text
    assert bypassed.code == "scaler.step(optimizer)\nscaler.update()"
    (bypassed,) = [
        each
        for each in check_source(IMPORTS + source + "scaler.update()\n")
        if each.id == "scaler-bypassed"
    ]
    assert bypassed.code == "scaler.step(optimizer)"


def test_in_an_accumulation_unscale_belongs_to_the_pass_that_steps() -> None:
    source = (
        "for i, x in enumerate(batches):\n    scaler.scale(model(x)).backward()\n"
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    if i % 4 == 3:\n        scaler.step(optimizer)\n        scaler.update()\n"
        "        optimizer.zero_grad()\n"
    )
    (clipped,) = check_source(IMPORTS + source)
    assert clipped.id == "clip-before-unscale"
    assert "# before clipping, both only where the step is" in clipped.code
