"""The order of the calls of an iteration: each mistake in several writings, and normal code."""

import pytest

from halfstep._tools.doctor.doctor import check_source

IMPORTS = (
    "import torch\nimport torch.nn.functional as F\nfrom halfstep import GradScaler, autocast\n"
)

HALF = "torch.autocast('cuda', dtype=torch.float16)"
LOOP = """\
for i, (x, y) in enumerate(batches):
    with autocast('cuda'):
        loss = F.mse_loss(model(x), y)
"""
METHOD = """\
class Trainer:
    def __init__(self):
        self.scaler = GradScaler()
    def train_step(self, x):
        self.optimizer.zero_grad()
        with autocast('cuda'):
            loss = self.model(x)
"""
HELPER = """\
def step(s, o, loss):
    s.scale(loss).backward()
    {}
for x in batches:
    step(scaler, optimizer, model(x))
"""


def found(source: str) -> list[str]:
    """Return ``id:line`` of what is bad or a warning, lines counted after the imports."""
    offset = IMPORTS.count("\n")
    findings = check_source(IMPORTS + source)
    return [f"{each.id}:{each.line - offset}" for each in findings if each.severity != "notice"]


def body(text: str, head: str = LOOP) -> str:
    indent = "        " if head == METHOD else "    "
    return head + "".join(f"{indent}{line}\n" for line in text.splitlines())


SCALED = "scaler.scale(loss).backward()\n"
STEP = "scaler.step(optimizer)\nscaler.update()\n"
OWN = {"scaler": "self.scaler", "optimizer": "self.optimizer"}


def own(text: str) -> str:
    for name, attribute in OWN.items():
        text = text.replace(name, attribute)
    return body(text, METHOD)


CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    "
CHECKED = (
    "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
)
"""A step that the loop checks by hand follows."""
STEP_IF = "scaler.step(optimizer)\n    scaler.update()\n"
ELSEWHERE = "def take_step(model, scaler, optimizer):\n    {}\n"
"""A step whose backward pass is in another file."""
SPLIT = """\
class Engine:
    def run(self, x):
        self.scaler.scale(self.model(x)).backward()

    def finish(self):
        self.{}
        self.scaler.update()
"""
INHERITED = """\
class Base:
    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
class Trainer(Base):
    def train_step(self, x):
        self.scaler.scale(self.model(x)).backward()
        {}self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
"""
FORWARD_OUTSIDE = """\
criterion.to(device)
for x, y in batches:
    output = network(x)
    {}
    with autocast('cuda'):
        loss = criterion({}, weights)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
ON_CPU = """\
{}
def forward(model, batch):
    with torch.autocast('cpu', dtype=torch.float16):
        loss = model(batch)
    scaler.scale(loss).backward()
model.to({})
"""
BF16 = """\
def step(model, batch, scaler):
    with torch.autocast('cuda', torch.bfloat16{}):
        loss = model(batch)
    scaler.scale(loss).backward()
"""

WRONG = [
    (
        "unscale-twice:6",
        body(SCALED + "scaler.unscale_(optimizer)\nscaler.unscale_(optimizer)\n" + STEP),
    ),
    (
        "unscale-twice:6",
        body(SCALED + "scaler.step(optimizer)\nscaler.unscale_(optimizer)\nscaler.update()\n"),
    ),
    (
        "unscale-twice:5",
        body(
            SCALED
            + "scaler.unscale_(optimizer)\nif (i + 1) % 4 == 0:\n    scaler.step(optimizer)\n"
            "    scaler.update()\n"
        ),
    ),
    (
        "unscale-twice:10",
        own(SCALED + "scaler.unscale_(optimizer)\nscaler.unscale_(optimizer)\n" + STEP),
    ),
    (
        "unscale-twice:4",
        HELPER.format("clip(s, o)\n    s.unscale_(o)\n    s.step(o)\n    s.update()")
        + "def clip(s, o):\n    s.unscale_(o)\n",
    ),
    ("step-twice:6", body(SCALED + "scaler.step(optimizer)\n" + STEP)),
    ("step-twice:6", body(SCALED + "scaler.step(optimizer)\noptimizer.step()\nscaler.update()\n")),
    ("step-twice:4", HELPER.format("s.step(o)\n    s.step(optimizer)\n    s.update()")),
    ("update-before-step:5", body(SCALED + "scaler.update()\nscaler.step(optimizer)\n")),
    (
        "update-before-step:5",
        body(SCALED + "scaler.update()\nif (i + 1) % 4 == 0:\n    scaler.step(optimizer)\n"),
    ),
    (
        "update-before-step:8",
        body(
            "scaler.scale(a).backward()\nscaler.scale(b).backward()\nscaler.step(opt_a)\n"
            "scaler.unscale_(opt_b)\nscaler.update()\nscaler.step(opt_b)\nscaler.update()\n"
        ),
    ),
    ("update-missing:5", body(SCALED + "scaler.step(optimizer)\n")),
    (
        "update-missing:5",
        body(SCALED + "scaler.step(optimizer)\nif i % 9 == 0:\n    scaler.update()\n"),
    ),
    ("update-twice:7", body(SCALED + STEP + "scaler.update()\n")),
    ("update-twice:8", body(SCALED + STEP + "if i % 9 == 0:\n    scaler.update()\n")),
    (
        "update-missing:10",
        own("keeper.add_recoverable('scaler', scaler)\n" + SCALED + "scaler.step(optimizer)\n"),
    ),
    (
        "scaler-bypassed:4",
        "def closure():\n    scaler.scale(model(x)).backward()\nfor x in batches:\n"
        "    optimizer.step(closure)\n",
    ),
    ("scaler-in-loop:4", body("scaler = GradScaler()\n" + SCALED + STEP)),
    ("scaler-in-loop:8", own("scaler = GradScaler()\n" + SCALED + STEP)),
    (
        "scaler-in-loop:2",
        "def one(x):\n    s = GradScaler()\n    s.scale(model(x)).backward()\n"
        "    s.step(optimizer)\n"
        "    s.update()\nfor x in batches:\n    one(x)\n",
    ),
    ("loss-not-scaled:4", body("loss.backward()\n" + STEP)),
    ("loss-not-scaled:4", body("scaler.scale(loss)\nloss.backward()\n")),
    (
        "loss-not-scaled:7",
        body(
            "scaler.scale(d_loss).backward()\nscaler.step(d_opt)\ng_loss, _ = f(x)\n"
            "g_loss.backward()\n"
            "scaler.step(g_opt)\nscaler.update()\n"
        ),
    ),
    ("loss-not-scaled:8", own("loss.backward()\n" + STEP)),
    (
        "loss-not-scaled:5",
        body("loss = contrast(images, texts, logit_scale)\nloss.backward()\n" + STEP),
    ),
    ("scaled-twice:5", body("loss = scaler.scale(loss)\n" + SCALED + STEP)),
    ("scaled-twice:4", body("scaler.scale(scaler.scale(loss)).backward()\n" + STEP)),
    (
        "scaled-twice:2",
        HELPER.replace("model(x))", "scaler.scale(model(x)))").format("s.step(o)\n    s.update()"),
    ),
    ("gradients-dropped:5", body(SCALED + "optimizer.zero_grad()\n" + STEP)),
    (
        "gradients-dropped:5",
        body("loss.backward()\noptimizer.zero_grad()\noptimizer.step()\n").replace(
            "with autocast('cuda')", "if True"
        ),
    ),
    ("gradients-dropped:5", body(SCALED + "model.zero_grad()\n" + STEP)),
    (
        "step-unchecked:6",
        body(SCALED + "scaler.unscale_(optimizer)\noptimizer.step()\nscaler.update()\n"),
    ),
    ("step-unchecked:7", body(CHECKED + "optimizer.step()\nscaler.update()\n")),
    ("scaler-bypassed:5", body(SCALED + "opt.step()\n")),
    ("scaler-bypassed:9", own(SCALED + "optimizer.step()\nscaler.update()\n")),
    (
        "unscale-of-another:7",
        body(
            SCALED + "scaler.unscale_(d_opt)\ntorch.nn.utils.clip_grad_norm_(g.parameters(), 1.0)\n"
            "scaler.step(g_opt)\nscaler.update()\n"
        ),
    ),
    (
        "autocast-without-forward:3",
        "for x, y in batches:\n    output = model(x)\n    with autocast('cuda'):\n"
        "        loss = F.mse_loss(output, y)\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
    ),
    (
        "device-differs:2",
        "model = model.to('cpu')\n" + f"with {HALF}:\n    loss = model(x)\n" + SCALED + STEP,
    ),
    (
        "device-differs:2",
        "model.cuda()\nwith torch.autocast('cpu', torch.float16):\n    loss = model(x)\n"
        + SCALED
        + STEP,
    ),
    (
        "scaler-with-bf16:1",
        "scaler = GradScaler(enabled=args.amp)\n"
        "with torch.autocast('cuda', torch.bfloat16, enabled=args.amp):\n    loss = model(x)\n"
        + SCALED
        + STEP,
    ),
    ("step-twice:3", ELSEWHERE.format("scaler.step(optimizer)\n    optimizer.step()")),
    ("update-before-step:2", ELSEWHERE.format("scaler.update()\n    scaler.step(optimizer)")),
    ("clip-before-unscale:2", ELSEWHERE.format(CLIP + "scaler.step(optimizer)")),
    ("scaler-bypassed:6", SPLIT.format("optimizer.step()")),
    ("unscale-twice:9", own(SCALED + "scaler.unscale_(optimizer)\nif x:\n    " + STEP_IF)),
    ("clip-before-unscale:3", INHERITED.format("")),
    (
        "clip-before-unscale:4",
        "from timm.utils import dispatch_clip_grad\n"
        + body(
            SCALED + "dispatch_clip_grad(parameters, value=1.0)\n" + STEP, "for x in batches:\n"
        ),
    ),
    ("update-missing:5", body("y = model_ema(x)\n" + SCALED[:-1] + ";scaler.step(optimizer)\n")),
    (
        "backward-in-autocast:3",
        "from elsewhere import *\nwith torch.cuda.amp.autocast():\n    " + SCALED + STEP,
    ),
    ("autocast-without-forward:5", FORWARD_OUTSIDE.format("parts = [output, y]", "parts")),
    ("device-differs:3", ON_CPU.format("scaler = torch.GradScaler('cuda')", "device")),
    ("device-differs:3", ON_CPU.format("batch = batch.cuda()", "device")),
    ("scaler-with-bf16:2", BF16.format("")),
    ("scaler-with-bf16:2", BF16.format(", enabled=scaler is not None")),
    (
        "update-before-step:5",
        body(SCALED + "scaler.update()\nscaler.unscale_(optimizer)\n" + STEP),
    ),
    (
        "update-before-step:8",  # raises in no step, and divides by another scale
        body(
            "scaler.scale(a).backward()\nscaler.unscale_(opt_a)\nscaler.step(opt_a)\n"
            "scaler.scale(b).backward()\nscaler.update()\nscaler.unscale_(opt_b)\n"
            "scaler.step(opt_b)\nscaler.update()\n"
        ),
    ),
    (
        "loss-not-scaled:4",
        body("g_scaler.scale(loss).backward()\nd_scaler.step(g_opt)\nd_scaler.update()\n"),
    ),
    (
        "loss-not-scaled:8",
        body(
            "self.g_scaler.scale(loss).backward()\nself.d_scaler.unscale_(self.g_opt)\n"
            "clip(self.model)\nself.g_scaler.step(self.g_opt)\nself.g_scaler.update()\n"
            "self.d_scaler.update()\n",
            METHOD,
        ),
    ),
    (
        "backward-in-autocast:4",
        "lowered = torch.cuda.amp.autocast if amp else nullcontext\nwith lowered():\n"
        "    loss = model(x)\n    loss.backward()\n",
    ),
    (
        "backward-in-autocast:4",
        "from utils import smart_autocast\nwith smart_autocast(amp):\n"
        "    loss = model(x)\n    loss.backward()\n",
    ),
    ("scaler-in-loop:8", own("scaler = GradScaler()\n" + SCALED + STEP).replace("_step", "_it")),
    (
        "step-twice:6",
        "from elsewhere import LossScaler\nscaler = GradScaler() if new else LossScaler()\n"
        "for x in batches:\n    scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n"
        "    optimizer.step()\n    scaler.update()\n",
    ),
    (
        "update-missing:5",
        "def main():\n    optimizer, scaler = create()\n    def step():\n"
        "        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n"
        "    save(scaler)\n    timed(step)\n",
    ),
]


@pytest.mark.parametrize(("wanted", "source"), WRONG)
def test_a_mistake_is_found(wanted: str, source: str) -> None:
    assert found(source) == [wanted]


RIGHT = {
    "a step that is checked by hand": body(
        CHECKED + "if torch.isfinite(norm):\n    optimizer.step()\nscaler.update()\n"
    ),
    "a bad step that is left out by hand": body(
        CHECKED + "if not norm.isfinite():\n    scaler.update()\n    continue\n"
        "optimizer.step()\nscaler.update()\n"
    ),
    "accumulation": body(
        SCALED + "if (i + 1) % 4 == 0:\n    scaler.unscale_(optimizer)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n"
    ),
    "two tests of one switch": body(
        "if scaler is not None:\n    scaler.scale(loss).backward()\n"
        "    if args.clip:\n        scaler.unscale_(optimizer)\nelse:\n    loss.backward()\n"
        "if args.clip:\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "if use_amp:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n"
        "    optimizer.step()\n"
    ),
    "lists of optimizers": body(
        SCALED + "for o in optimizers:\n    scaler.unscale_(o)\n"
        "for o in optimizers:\n    scaler.step(o)\nscaler.update()\n"
    ),
    "an index": body(
        SCALED + "for k in range(2):\n    scaler.step(self.optimizers[k])\nscaler.update()\n"
    ),
    "one update for two steps": body(
        "scaler.scale(a).backward()\nscaler.step(opt_a)\nopt_b.zero_grad()\n"
        "scaler.scale(b).backward()\nscaler.step(opt_b)\nscaler.update()\n"
    ),
    "an update for each step": body(
        "scaler.scale(a).backward()\nscaler.step(opt_a)\nscaler.update()\nopt_b.zero_grad()\n"
        "scaler.scale(b).backward()\nscaler.step(opt_b)\nscaler.update()\n"
    ),
    "a backward pass elsewhere": body(
        SCALED + "scaler.step(opt_a)\nscaler.update()\nrun_backward(x)\nscaler.step(opt_b)\n"
    ),
    "a scaled loss under its name": body("loss = scaler.scale(loss)\nloss.backward()\n" + STEP),
    "a gradient penalty": body(
        "scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)\n"
        "grads = [p * inv_scale for p in scaled]\nloss = loss + sum(g.norm() for g in grads)\n"
        + SCALED
        + STEP
    ),
    "a scaler for each epoch": "for epoch in epochs:\n    scaler = GradScaler()\n"
    "    for x in batches:\n"
    "        scaler.scale(model(x)).backward()\n        scaler.step(optimizer)\n"
    "        scaler.update()\n",
    "skipped batches": body(
        "if not torch.isfinite(loss):\n    optimizer.zero_grad()\n    continue\n" + SCALED + STEP
    ),
    "memory errors": "for x in batches:\n    try:\n        scaler.scale(model(x)).backward()\n"
    "        scaler.step(optimizer)\n        scaler.update()\n    except RuntimeError:\n"
    "        optimizer.zero_grad()\n",
    "a backward pass to reserve memory": "model(x).sum().backward()\nmodel.zero_grad()\n"
    + body(SCALED + STEP),
    "a step left out": body(
        "if train:\n    scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
        "if good:\n    scaler.step(optimizer)\nscaler.update()\n"
    ),
    "gradients dropped after an error": "for x in batches:\n    try:\n"
    "        scaler.scale(model(x)).backward()\n"
    "    except RuntimeError:\n        optimizer.zero_grad()\n    scaler.step(optimizer)\n"
    "    scaler.update()\n",
    "a scale to start with": body(
        "scaler.scale(torch.ones(()))\nscaler.scale(loss).backward()\n" + STEP
    ),
    "a context in a variable": "context = nullcontext() if cpu else torch.autocast('cuda')\n"
    "for x in batches:\n    with context:\n        loss = model(x)\n"
    "    scaler.scale(loss).backward()\n"
    "    scaler.step(optimizer)\n    scaler.update()\n",
    "autocast for the device": "device = torch.device('cuda' if has_cuda else 'cpu')\n"
    f"model.to(device)\nwith {HALF}:\n    loss = model(x)\n" + SCALED + STEP,
    "a loss method of the model": body(
        "with autocast('cuda'):\n    loss = model.loss(x)\n" + SCALED + STEP, "for x in batches:\n"
    ),
    "bfloat16 or float16": "scaler = GradScaler(enabled=dtype == 'float16')\n"
    "with torch.autocast('cuda', torch.bfloat16, enabled=dtype != 'float32'):\n"
    "    loss = model(x)\n" + SCALED + STEP,
    "a step of gradients from elsewhere": ELSEWHERE.format("scaler.step(optimizer)"),
    "the same, with a plain arm": ELSEWHERE.format(
        "if scaler:\n        scaler.step(optimizer)\n    else:\n        optimizer.step()"
    ),
    "methods of one class": SPLIT.format("scaler.step(self.optimizer)"),
    "clipping by a base": INHERITED.format("self.scaler.unscale_(self.optimizer)\n        "),
    "a model in autocast beside one outside": FORWARD_OUTSIDE.format("", "network(output)"),
    "a CPU": ON_CPU.format("scaler = torch.GradScaler('cpu')", "'cpu'"),
    "bfloat16 by its switch": BF16.format(", enabled=args.bf16"),
    "a backward pass that may scale": f"with {HALF}:\n    loss = model(x)\n"
    "optimizer.backward(loss)\noptimizer.step()\n",
    "a function that is called like a model": "from checkpoints import save_model\n"
    + body("save_model(loss)\n" + SCALED + STEP),
    "a backward pass that is left out": "for x in batches:\n    loss = model(x)\n"
    "    if loss.requires_grad:\n        scaler.scale(loss).backward()\n"
    "    scaler.step(optimizer)\n    scaler.update()\n",
    "a new scale": body(SCALED + STEP + "if i % 100 == 0:\n    scaler.update(2.0)\n"),
    "a scaler under two names": body(
        "scaler = find_scaler(self)\nscaler.scale(loss).backward()\n"
        "self.scaler.step(self.optimizer)\nself.scaler.update()\n",
        METHOD,
    ),
    "an autocast of the project that is off": "from utils import smart_autocast\n"
    "with smart_autocast(enabled=False):\n    model(x).backward()\n",
    "a scaler that is given": "def step(optimizer, scaler):\n"
    "    scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n",
    "a GradScaler of another library": "import paddle\nscaler = paddle.amp.GradScaler()\n"
    "for x in batches:\n    scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n"
    "    classifier.step(optimizer)\n",
    "a scaler of another library": "from fairscale.optim import LayerwiseGradientScaler\n"
    "layer_scaler = LayerwiseGradientScaler(model)\nfor x in batches:\n"
    "    model(x).backward()\n    layer_scaler.step(optimizer)\n",
    "a scaler that is off": "scaler = GradScaler(enabled=False)\nloss = model(x)\nloss.backward()\n"
    + STEP,
}


@pytest.mark.parametrize("title", RIGHT)
def test_normal_code_has_no_finding(title: str) -> None:
    assert found(RIGHT[title]) == []


def test_an_optimizer_that_a_function_makes_is_the_one_that_is_stepped() -> None:
    source = """\
def adamw(model):
    return torch.optim.AdamW(model.parameters())
optimizer = adamw(net)
for x in batches:
    net(x).mean().backward()
    net.zero_grad()
    optimizer.step()
"""
    assert found(source) == ["gradients-dropped:6"]


@pytest.mark.parametrize("names", [("nets['g']", "nets['d']"), ("make(0)", "make(1)")])
def test_models_without_a_name_are_not_one(names: tuple[str, str]) -> None:
    other, own = names
    source = f"""\
g_opt = torch.optim.AdamW({other}.parameters())
d_opt = torch.optim.AdamW({own}.parameters())
for x in batches:
    loss = {own}(x).mean()
    scaler.scale(loss).backward()
    {other}.zero_grad()
    scaler.step(d_opt)
    scaler.update()
    {own}.zero_grad()
"""
    assert found(source) == []


def test_a_model_that_is_moved_under_two_names() -> None:
    source = f"model = raw = Net().to('cpu')\nwith {HALF}:\n    loss = model(x)\n" + SCALED + STEP
    assert found(source) == ["device-differs:2"]


def test_options_are_no_optimizer() -> None:
    stepped = "for x in batches:\n    with autocast('cuda'):\n        loss = model(x).mean()\n"
    stepped += "    loss.backward()\n    option.step()\n"
    saved = body(SCALED + STEP + "optimizer.zero_grad()\n") + "torch.save(opts.state_dict(), 'x')\n"
    ids = {each.id for source in (stepped, saved) for each in check_source(IMPORTS + source)}
    assert ids.isdisjoint({"fp16-without-scaler", "scaler-not-saved"})
