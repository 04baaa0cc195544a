"""Hostile programs that fail with an error about dtypes; many follow public threads."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from halfstep._tools.dtype_errors.dtype_error import explain

BEGIN = """
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep

x = torch.randn(2, 4)
half = x.half()
"""


class Hostile(NamedTuple):
    """A program that fails at the line that ends with ``#!``.

    Attributes:
        source: Its source after ``BEGIN``.
        said: What the explanation says, in parts; ``line N`` in a part is the line that ends
            with ``#N``.
        is_curable: Whether a change of the line, or of a line around it, cures it.
    """

    source: str
    said: tuple[str, ...]
    is_curable: bool = True

    def read(self) -> tuple[str, dict[str, int], list[str]]:
        """Return the program without its marks, their lines, and what is said of it."""
        lines, marks = (BEGIN + self.source).split("\n"), {}
        for number, line in enumerate(lines):
            if mark := re.search(r"  #([!\d])$", line):
                marks[mark[1]] = number + 1
                lines[number] = line[: mark.start()]
        said = [re.sub(r"#(\d)", lambda mark: str(marks[mark[1]]), part) for part in self.said]
        return "\n".join(lines), marks, said


PROGRAMS = {
    # After public threads.
    "LoRA on a half model": Hostile(
        """
class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.ModuleDict({"default": nn.Linear(4, 1, bias=False)})
        self.lora_b = nn.ModuleDict({"default": nn.Linear(1, 2, bias=False)})

    def forward(self, x):
        result = self.base(x)
        for name in self.lora_a:
            result = result + self.lora_b[name](self.lora_a[name](x))  #!
        return result

nn.Sequential(Lora(nn.Linear(4, 2).half()))(half)
""",
        ("x: float16 [2, 4], of line 13", "0.lora_a.default.weight of Sequential: float32 [1, 4]"),
    ),
    "a time embedding in float32": Hostile(
        """
def sinusoid(steps):
    return torch.cat([steps[:, None].float().sin(), steps[:, None].float().cos()], dim=-1)

class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_1, self.act = nn.Linear(2, 4), nn.SiLU()

    def embed(self, sample, condition=None):
        if condition is not None:
            sample = sample + condition
        sample = self.linear_1(sample)  #!
        return self.act(sample)

    def forward(self, x, steps):
        emb = sinusoid(steps)  #1
        return x + self.embed(emb)

Unet().half()(half, torch.arange(2))
""",
        ("sample: float32 [2, 2], of line #1: emb = sinusoid(steps)", "linear_1.weight of Unet: f"),
    ),
    "a VAE in float32": Hostile(
        """
class Pipeline:
    def __init__(self):
        self.vae = nn.Sequential(nn.Conv2d(4, 3, 1))
        self.scaling = 0.18215

    def __call__(self, latents):
        latents = 1 / self.scaling * latents  #1
        return self.decode(latents)

    def decode(self, z):
        return self.vae(z)  #!

Pipeline()(torch.randn(1, 4, 2, 2, dtype=torch.float16))
""",
        ("z: float16 [1, 4, 2, 2], of line #1: latents = 1", "0.weight of Sequential: float32"),
    ),
    "features of an image": Hostile(
        """
embeds = nn.Embedding(8, 4).half()(torch.tensor([[1, 2, 3]]))  #1
mask = torch.tensor([[False, True, True]])
features = nn.Linear(4, 4)(x)  #2
embeds = embeds.detach()
embeds[mask] = features  #!
""",
        ("embeds: float16 [1, 3, 4]", "features: float32 [2, 4], of line #2: features = nn.Lin"),
    ),
    "experts under autocast": Hostile(
        """
class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        out = torch.zeros_like(x)  #1
        for i, expert in enumerate(self.experts):
            rows = torch.tensor([i])
            out[rows] = expert(x[rows])  #!
        return out

with torch.autocast("cpu", torch.bfloat16):
    Moe()(x)
""",
        ("out: float32 [2, 4], of line #1: out = torch.zeros_like(x)",),
    ),
    "keys of another encoder": Hostile(
        """
class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(4, 4).half()
        self.to_k, self.to_v = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, context):
        q = self.to_q(x)[None]  #1
        k, v = self.to_k(context)[None], self.to_v(context)[None]  #2
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)  #!

Adapter()(half, x)
""",
        ("q: float16 [1, 2, 4], of line #1", "k: float32 [1, 2, 4], of line #2: k, v = (self.to_k"),
    ),
    "a rotary table in float32": Hostile(
        """
def rotary(q, k, cos):
    return q * cos, k * cos

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.ones(2, 4), persistent=False)

    def forward(self, q, k, v):
        q, k = rotary(q, k, self.cos)  #1
        return torch.nn.functional.scaled_dot_product_attention(  #!
            query=q,
            key=k,
            value=v,
            is_causal=True,
        )

Attention()(half[None], half[None], half[None])
""",
        ("q: float32 [1, 2, 4], of line #1: q, k = rotary(", "v: float16 [1, 2, 4]"),
    ),
    "a custom function in backward": Hostile(
        """
class Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors  #1
        return grad @ w, grad.t() @ x  #!

w = nn.Parameter(torch.randn(3, 4))
with torch.autocast("cpu", torch.float16):
    y = Dense.apply(x, w)
y.float().sum().backward()
""",
        (
            "grad: float16 [2, 3]",
            "w: float32 [3, 4]",
            "Dense",
            "Dense.backward has no custom_bwd",
            "custom_bwd",
        ),
    ),
    "a custom function with a kernel of one dtype": Hostile(
        """
class Deform(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offset):
        return torch.lerp(x, offset, 0.5)  #!

with torch.autocast("cpu", torch.float16):
    h = nn.Linear(4, 4)(x)  #1
    Deform.apply(h, x)
""",
        ("x: float16 [2, 4], of line #1: h = nn.Linear", "offset: float32 [2, 4]", "custom_fwd"),
    ),
    "a loss of two dtypes": Hostile(
        """
model = nn.Linear(4, 4).half()
noise = torch.randn(2, 4)  #2
noise_pred = model(half)  #1
loss = F.huber_loss(noise_pred, noise, reduction="mean")
loss.backward()  #!
""",
        ("noise_pred: float16 [2, 4], of line #1", "noise: float32 [2, 4], of line #2"),
    ),
    "the loss of a trainer": Hostile(
        """
class Accelerator:
    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)  #!

class Trainer:
    def __init__(self):
        self.model, self.accelerator = nn.Linear(4, 4).half(), Accelerator()

    def compute_loss(self, inputs):
        output = self.model(inputs["x"])
        return F.huber_loss(output, inputs["target"])

    def training_step(self, inputs):
        loss = self.compute_loss(inputs)  #1
        self.accelerator.backward(loss)

Trainer().training_step({"x": half, "target": x})
""",
        (
            "self of HuberLoss: float16 [2, 4]",
            "target of HuberLoss: float32 [2, 4]",
            "of line #1: loss = s",
        ),
        is_curable=False,
    ),
    "a recurrent layer": Hostile(
        """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.l0, self.l1 = nn.Linear(4, 4), nn.LSTM(4, 3, bidirectional=True)

    def forward(self, x):
        x1 = self.l0.half()(x)  #1
        return torch.relu(self.l1(x1.view(x1.size(0), 1, -1))[0])  #!

Tagger()(half)
""",
        ("x1.view(x1.size(0), 1, -1): float16 [2, 1, 4]", "of line #1: x1 =", "l1.weight_ih_l0"),
    ),
    "the state of a recurrent layer": Hostile(
        """
lstm = nn.LSTM(4, 3).half()
h0, c0 = torch.zeros(1, 3), torch.zeros(1, 3)  #1
out, state = lstm(half, (h0, c0))  #!
""",
        ("h0: float32 [1, 3], of line #1: h0, c0 =", "weight_ih_l0 of LSTM: float16"),
    ),
    "the features of Whisper": Hostile(
        """
class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(4, 2, 1)

    def generate(self, input_features=None, **kwargs):
        return self.encode(input_features, **kwargs)

    def encode(self, features, **kwargs):
        return F.gelu(self.conv1(features))  #!

def transcribe(model, audio):
    batch = {"input_features": audio[None].transpose(1, 2)}  #1
    return model.generate(**batch)

transcribe(Whisper().half(), x)
""",
        ("features: float32 [1, 4, 2], of line #1: batch = {", "conv1.weight of Whisper: float16"),
    ),
    "a thread of a pool": Hostile(
        """
model = nn.Linear(4, 4).half()

def forward(batch):
    return model(batch)  #!

with torch.autocast("cpu", torch.float16):
    with ThreadPoolExecutor(1) as pool:
        print(list(pool.map(forward, [x])))
""",
        ("batch: float32 [2, 4], of line 12: x = ", "weight of Linear: float16", "thread"),
    ),
    "no inverse in float16": Hostile(
        """
h = nn.Linear(4, 4).half()(half)  #1
cov = h.t() @ h + torch.eye(4).half()  #2
whitening = torch.linalg.inv(cov)  #!
""",
        ("cov: float16 [4, 4], of line #2: cov = h.t()",),
    ),
    "no kernel on a CPU": Hostile(
        """
class Head(nn.Module):
    def forward(self, scores):
        return torch.cdist(scores, scores)  #!

scores = nn.Linear(4, 4).half()(half)  #1
nn.Sequential(Head())(scores)
""",
        ("scores: float16 [2, 4], of line #1: scores = nn.Linear",),
    ),
    "a mask in another dtype": Hostile(
        """
mask = torch.zeros(2, 2).half()  #2
mask.masked_fill_(torch.ones(2, 2).triu(1).bool(), float("-inf"))
q = x[None].bfloat16()  #1
F.scaled_dot_product_attention(q, q, q, attn_mask=mask)  #!
""",
        ("q: bfloat16 [1, 2, 4], of line #1", "mask: float16 [2, 2], of line #2: mask ="),
    ),
    # Of the hand.
    "a blur with a frozen buffer": Hostile(
        """
class Blur(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kernel", torch.ones(1, 1, 3, 3) / 9)

    def forward(self, image):
        return F.conv2d(image, self.kernel, padding=1)  #!

image = torch.rand(1, 1, 4, 4).to(torch.bfloat16)  #1
nn.Sequential(nn.Identity(), Blur())(image)
""",
        ("image: bfloat16", "of line #1", "self.kernel: float32", "a buffer, 1.kernel of Seq"),
    ),
    "an embedding outside autocast": Hostile(
        """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4).half()])

    def forward(self, ids):
        h = self.embed(ids)  #1
        for layer in self.layers:
            h = layer(h)  #!
        return h

Decoder()(torch.tensor([1, 2]))
""",
        ("h: float32 [2, 4], of line #1: h = self.embed(ids)", "layers.0.weight of Decoder: floa"),
    ),
    "an average in place": Hostile(
        """
model, ema = nn.Linear(4, 2).half(), nn.Linear(4, 2)

@torch.no_grad()
def update(decay=0.9):
    for p, average in zip(model.parameters(), ema.parameters()):
        average.lerp_(p, 1 - decay)  #!

update()
""",
        ("average: float32 [2, 4]", "p: float16 [2, 4]", "a parameter, weight of Linear"),
    ),
    "a checkpoint": Hostile(
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8).half()

    def forward(self, hidden):
        return checkpoint(self.mlp, hidden, use_reentrant=False)

    def mlp(self, hidden):
        return self.up(hidden)  #!

norm = nn.LayerNorm(4)
normed = norm(x)  #1
Block()(normed)
""",
        ("hidden: float32 [2, 4], of line #1: normed = norm(x)", "up.weight of Block: float16"),
    ),
    "a generator": Hostile(
        """
layers = [nn.Linear(4, 4), nn.Linear(4, 4).half()]

def activations(h):
    for layer in layers:
        h = layer(h)  #!
        yield h

for h in activations(x):
    print(h.shape)
""",
        ("h: float32 [2, 4]", "weight of Linear: float16 [4, 4], a parameter"),
    ),
    "an output with fields": Hostile(
        """
from dataclasses import dataclass

@dataclass
class Output:
    last_hidden_state: torch.Tensor
    logits: torch.Tensor | None = None

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.score = nn.Linear(4, 4).half(), nn.Linear(4, 2)

    def encode(self, ids):
        return Output(last_hidden_state=self.backbone(ids))

    def forward(self, ids):
        outputs = self.encode(ids)  #1
        return Output(outputs.last_hidden_state, self.score(outputs.last_hidden_state))  #!

Classifier()(half)
""",
        ("outputs.last_hidden_state: float16", "of line #1: outputs =", "score.weight of Classif"),
    ),
    "a nested container": Hostile(
        """
patch = nn.Linear(4, 4).half()

def collate(items):
    return {"vision": [{"pixels": torch.stack(items)}]}

batch = collate([x[0], x[1]])  #1
patch(batch["vision"][0]["pixels"])  #!
""",
        ("batch['vision'][0]['pixels']: float32 [2, 4], of line #1: batch = ", "weight of Linear"),
    ),
    "a comprehension": Hostile(
        """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2).half()])

    def forward(self, h):
        return torch.cat([head(h) for head in self.heads])  #!

Heads()(x)
""",
        ("h: float32 [2, 4], of line 12: x = torch.randn", "heads.1.weight of Heads: float16"),
    ),
    "an annotated assignment": Hostile(
        """
weight: torch.Tensor = torch.randn(4, 4, dtype=torch.float16)  #1
torch.addmm(torch.zeros(4), x, weight)  #!
""",
        ("x: float32 [2, 4], of line 12", "weight: float16 [4, 4], of line #1: weight: torch.Te"),
    ),
    "a context that makes a tensor": Hostile(
        """
@contextmanager
def loaded():
    yield torch.ones(4, 3, dtype=torch.bfloat16)

with loaded() as table:  #1
    if (scores := x * 2) is not None:  #2
        torch.mm(scores, table)  #!
""",
        ("scores: float32 [2, 4], of line #2: (scores :=", "table: bfloat16 [4, 3], of line #1"),
    ),
    "operators of attributes": Hostile(
        """
class Factor:
    def __init__(self, a):
        self.a = a  #1
        self.b = torch.randn(4, 2).bfloat16()  #2

    def product(self):
        return (self.a @ self.b).sum()  #!

Factor(x).product()
""",
        ("self.a: float32 [2, 4], of line 12: x =", "self.b: bfloat16 [4, 2], of line #2: self.b"),
    ),
    "an operator of a call": Hostile(
        """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.proj = nn.Embedding(8, 4), nn.Linear(4, 4).half()

    def forward(self, x):
        return self.proj(x) @ self.embed.weight.T  #!

Tied()(half)
""",
        (
            "self.proj(x): float16 [2, 4]",
            "self.embed.weight.T: float32 [4, 8], a parameter, embed.weight of Tied",
        ),
    ),
    "autocast that is switched off": Hostile(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.body(x)  #1
        with torch.autocast(device_type="cpu", enabled=False):  #2
            return self.head(h)  #!

with torch.autocast("cpu", torch.bfloat16):
    Net()(x)
""",
        (
            "h: bfloat16 [2, 4], of line #1",
            "head.weight of Net: float32",
            "enabled=False)",
            "line #2",
        ),
    ),
    "autocast of a decorator that is switched off": Hostile(
        """
@torch.autocast("cpu", enabled=False)
def distance(a, b):
    return a @ b.t()  #!

with halfstep.autocast("cpu", torch.float16):
    h = nn.Linear(4, 4)(x)  #1
    distance(h, x)
""",
        ("a: float16 [2, 4], of line #1", "b.t(): float32 [4, 2]", "off"),
    ),
    "autocast of another device": Hostile(
        """
import warnings
warnings.simplefilter("ignore")
model = nn.Linear(4, 2)
with torch.autocast("cuda", torch.float16):  #1
    y = model(half)  #!
""",
        ("half: float16 [2, 4], of line 13", "weight of Linear: float32", "cuda", "line #1"),
    ),
    "a rule for an op": Hostile(
        """
scores = nn.Linear(4, 4)
with halfstep.autocast("cpu", torch.float16, policy="torch"):
    h = scores(x)  #1
    near = torch.special.bessel_j0(h)  #!
""",
        ("h: float16 [2, 4], of line #1", "torch; special_bessel_j0:fp32"),
    ),
    "an evaluation outside autocast": Hostile(
        """
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).bfloat16()

@torch.no_grad()
def evaluate(model, batches):
    return [model(batch).argmax(-1) for batch, _ in batches]  #!

evaluate(model, [(x, 1)])  #1
""",
        ("batch: float32 [2, 4], of line 12: x = torch", "0.weight of Sequential: bfloat16"),
    ),
    "arguments that a call unpacks": Hostile(
        """
projection = nn.Bilinear(4, 4, 2)

def fuse(*parts, **options):
    return projection(*parts)  #!

fuse(half, x)
""",
        ("parts[0]: float16 [2, 4], of line 13", "weight of Bilinear"),
    ),
    "an item that is set later": Hostile(
        """
batch = {"image": x}  #1
batch["mask"] = torch.ones(2, 4)
batch["image"] = batch["image"].bfloat16()
nn.Linear(4, 2)(batch["image"])  #!
""",
        ("batch['image']: bfloat16 [2, 4]\n", "weight of Linear: float32"),
    ),
}


# --- what is said of them -------------------------------------------------------------------------


class Judged(NamedTuple):
    """What was right in the explanation of a program.

    Attributes:
        has_line: Whether the line was named.
        missing: What was not said of the tensors and their origins.
        is_cured: Whether a program with one of the cures ran; None if none can.
        explanation: The explanation.
    """

    has_line: bool
    missing: list[str]
    is_cured: bool | None
    explanation: str

    @property
    def is_right(self) -> bool:
        return self.has_line and not self.missing and self.is_cured is not False


def judge(program: Hostile, folder: Path) -> Judged:
    """Run a program in a folder of its own, and once more with each of its cures."""
    text, marks, said = program.read()
    (file := folder / "train.py").write_text(text)
    found = explain(raised_by(file))
    if found is None:
        return Judged(False, said, False, "")
    has_line = found.where == f"train.py, line {marks['!']}"
    missing = [part for part in said if part not in str(found)]
    is_cured = False
    for number, cure in enumerate(found.cures):
        (file := folder / f"{number}.py").write_text(pasted(text, marks["!"], cure))
        is_cured |= raised_by(file) is None  # else the next call may have the same problem
    return Judged(has_line, missing, is_cured if program.is_curable else None, str(found))


def raised_by(file: Path) -> Exception | None:
    try:
        runs(file)
    except Exception as error:
        return error
    return None


def runs(file: Path) -> None:
    """Run a program in this process."""
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})


def pasted(text: str, line: int, cure: str, *, only_last: bool = False) -> str:
    """Return a program with a cure at a line: wherever a tensor stands, or only once."""
    lines = text.split("\n")
    if at := re.search(r" at line (\d+)$", cure):
        line, cure = int(at[1]), cure[: at.start()]
    for decorator, kind, method in re.findall(r"(@halfstep\.\w+\(.*?\)) on (\w+)\.(\w+)", cure):
        first = lines.index(f"class {kind}(torch.autograd.Function):")
        where = next(n for n in range(first, len(lines)) if f"def {method}(" in lines[n])
        lines.insert(where, "    " + decorator)
    nodes = [node for node in ast.walk(ast.parse(text)) if hasattr(node, "lineno")]
    statement = max(
        (n for n in nodes if isinstance(n, SIMPLE) and n.lineno <= line <= n.end_lineno),
        key=lambda n: n.lineno,
    )
    first, last = statement.lineno - 1, statement.end_lineno
    if cure.endswith(" before the call"):
        top = [node.lineno for node in ast.parse(text).body if node.lineno <= line]
        lines.insert(top[-1] - 1, cure.removesuffix(" before the call"))
    if cure.startswith("the call inside "):
        indent = " " * statement.col_offset
        lines[first:last] = ["    " + each for each in lines[first:last]]
        lines.insert(first, f"{indent}with halfstep.{cure.removeprefix('the call inside ')}:")
    for new, old in re.findall(
        r"(?:^|, )(\S.*?) in place of (.*?)(?=, [^ ]+ in place of |$)", cure
    ):
        inside = [n for n in ast.walk(statement) if isinstance(n, ast.expr)]
        same = [n for n in inside if ast.unparse(n) == old and not is_target(n)]
        same.sort(key=lambda n: (-n.lineno, -n.col_offset))
        for n in same[:1] if only_last else same:
            row = lines[n.lineno - 1]
            lines[n.lineno - 1] = row[: n.col_offset] + new + row[n.end_col_offset :]
    return "\n".join(lines)


def is_target(node: ast.expr) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return)
