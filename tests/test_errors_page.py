"""docs/errors.md: its headings are what PyTorch and halfstep say, and every error has an entry."""

import ast
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import errors

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text(encoding="utf-8")
ENTRIES = [
    (part, re.sub(r"^`+|`+$", "", title) if title[-1] == "`" else title)
    for part, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    for title in re.findall(r"^### (.+)$", text, re.M)
]
THEIRS = [title for part, title in ENTRIES if part.startswith("PyTorch")]
OURS = [title for part, title in ENTRIES if part.startswith("halfstep")]
HALF = torch.ones(2, 4, dtype=torch.float16)
SINGLE = torch.ones(2, 4)


def pattern(title: str) -> str:
    return ".+".join(re.escape(part) for part in title.split("..."))


def loop(calls: str, *, half: bool = False, factor: float = 1.0) -> None:
    """Make the calls of an iteration under PyTorch's scaler, in this order."""
    model = nn.Linear(4, 1, dtype=torch.float16 if half else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu")
    loss = model(HALF if half else SINGLE).sum().float() * factor
    do = {
        "scale": lambda: scaler.scale(loss),
        "backward": lambda: scaler.scale(loss).backward(),
        "unscale": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
        "schedule": schedule.step,
    }
    for call in calls.split():
        do[call]()


def clip() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), torch.inf)
    nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)


def put() -> None:
    SINGLE.clone()[torch.tensor([0])] = HALF[:1]


def binary_cross_entropy() -> None:
    kernel = torch.library.get_kernel("aten::binary_cross_entropy", "AutocastCUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    kernel.call_boxed(keys, SINGLE[0], SINGLE[0], None, 1)


CALLS: dict[str, Callable[[], object]] = {
    "Attempting to unscale FP16": lambda: loop("backward unscale", half=True),
    "No inf checks were recorded for": lambda: loop("scale step"),
    "No inf checks were recorded prior": lambda: loop("scale update"),
    "unscale_() has already": lambda: loop("backward unscale unscale"),
    "unscale_() is being called": lambda: loop("backward step unscale"),
    "step() has already": lambda: loop("backward step step"),
    "Attempted step but": lambda: loop("step"),
    "torch.cuda.amp.GradScaler is enabled": lambda: torch.amp.GradScaler("cuda"),
    "torch.cuda.amp.GradScaler(args": lambda: torch.cuda.amp.GradScaler(),
    "torch.cuda.amp.autocast(args": lambda: torch.cuda.amp.autocast(),
    "Detected call of": lambda: loop("backward step update schedule", factor=torch.inf),
    "The total norm": clip,
    "Input type (float)": lambda: nn.Conv2d(1, 1, 1).half()(SINGLE[None, None]),
    "mat1 and mat2": lambda: nn.Linear(4, 1).half()(SINGLE),
    "expected scalar type": lambda: torch.bmm(HALF[None], SINGLE.T[None]),
    "expected m1": lambda: HALF @ SINGLE.T,
    "expected dtype float for": lambda: SINGLE.lerp(HALF, 0.5),
    "Expected attn_mask": lambda: F.scaled_dot_product_attention(
        *[SINGLE[None].bfloat16()] * 3, attn_mask=HALF[:, :2]
    ),
    "RNN input": lambda: nn.GRU(4, 1)(HALF),
    "Found dtype": lambda: F.binary_cross_entropy(HALF, SINGLE),
    "Unsupported dtype": lambda: torch.fft.fft(HALF),
    "quantile()": lambda: HALF.quantile(0.5),
    "Expected query": lambda: F.scaled_dot_product_attention(HALF[None], SINGLE[None], HALF[None]),
    "Index put": put,
    "index_add_()": lambda: SINGLE.clone().index_add_(0, torch.tensor([0]), HALF[:1]),
    "value cannot": lambda: HALF.masked_fill(HALF > 0, -1e9),
    "... not implemented": lambda: torch.cdist(HALF, HALF),
    "Low precision": lambda: torch.linalg.inv(torch.eye(2).half()),
    "torch.nn.functional.binary": binary_cross_entropy,
    "probability tensor": lambda: torch.multinomial(torch.full((4,), torch.nan), 1),
    "Got unsupported": lambda: SINGLE.bfloat16().numpy(),
    "attempting to assign": lambda: setattr(SINGLE.clone().requires_grad_(), "grad", HALF),
    "result type Float": lambda: F.binary_cross_entropy_with_logits(SINGLE, SINGLE.long()),
    "Expected tensor for argument": lambda: F.embedding_bag(
        torch.zeros(2, 3, dtype=torch.long), HALF, per_sample_weights=torch.ones(2, 3), mode="sum"
    ),
    "Expected both inputs": lambda: torch.polar(SINGLE.bfloat16(), SINGLE.bfloat16()),
    "In CPU autocast": lambda: torch.autocast("cpu", torch.float32),
}


def said_by(call: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return str(error)
    return "\n".join(str(each.message) for each in caught)


@pytest.mark.parametrize("title", THEIRS)
def test_pytorch_says_what_the_page_says(title: str) -> None:
    [call] = [call for begin, call in CALLS.items() if title.lstrip("`").startswith(begin)]
    said = said_by(call)
    if not re.search(pattern(title), said, re.DOTALL):
        if not torch.__version__.startswith("2.13."):
            pytest.skip(f"PyTorch {torch.__version__} says {said!r}: add it to docs/errors.md")
        pytest.fail(f"{title!r}: {said!r}")


def text_of(node: ast.expr) -> str:
    """Return a string of the source; what is filled in later as an ellipsis."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in parts)


@pytest.fixture(scope="module")
def texts() -> str:
    """All strings of the package, and its presets, which have messages too."""
    folder = Path(halfstep.__file__).parent
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [text_of(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    return "\n".join(texts + [path.read_text() for path in folder.rglob("*.policy")])


@pytest.mark.parametrize("title", OURS)
def test_halfstep_says_what_the_page_says(title: str, texts: str) -> None:
    assert re.search(pattern(title), texts)


def test_every_error_and_warning_has_an_entry() -> None:
    parts = " ".join({part for part, _ in ENTRIES}).split()
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert len(classes) == 8
    assert set(classes) <= set(parts)
