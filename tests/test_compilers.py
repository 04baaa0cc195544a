"""PyTorch's compilers inside the blocks of halfstep: they work, and what they trace is not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests import forked
from torch import Tensor, nn

import halfstep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.body(x))
        return head


pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
X = torch.ones(2, 4)
COMPILERS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "export": lambda m: torch.export.export(m, (X,), strict=True).module(),
    "export, not strict": lambda m: torch.export.export(m, (X,), strict=False).module(),
    "compile": lambda m: torch.compile(m, fullgraph=True, backend="eager"),
    "jit.trace": lambda m: torch.jit.trace(m, (X,)),
    "jit.script": torch.jit.script,
}


@contextmanager
def traced(model: nn.Module, _: Path) -> Iterator[None]:
    with halfstep.trace(model):
        yield


@contextmanager
def recorded(model: nn.Module, folder: Path) -> Iterator[None]:
    with halfstep.record(folder, model, every=1):
        yield


@contextmanager
def diagnosed(model: nn.Module, _: Path) -> Iterator[None]:
    with halfstep.diagnose(halfstep.GradScaler("cpu"), model=model):
        yield


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("block", [traced, recorded, diagnosed])
def test_they_work_inside_of_blocks(block, compiler, tmp_path):
    torch.compiler.reset()
    model = Net()
    expected = model(X)
    with block(model, tmp_path):  # type: ignore[attr-defined]
        model(X).sum().backward()
        compiled = COMPILERS[compiler](model)
        compiled(X)
        model(X).sum().backward()
    assert torch.allclose(compiled(X), expected)


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_exported_is_not_in_a_trace(strict: bool) -> None:
    model = Net()
    with halfstep.trace(model) as alone:
        model(X)
    with halfstep.trace(model) as beside:
        torch.export.export(model, (X,), strict=strict)
        model(X)
    assert [(row.module, row.op) for row in beside.ops] == [
        (row.module, row.op) for row in alone.ops
    ]


def test_diagnose_replays_a_step_that_exports() -> None:
    model = Net()

    def step() -> None:
        torch.export.export(model, (X,), strict=True)
        (model(X).sum() * float("inf")).backward()

    assert "inf" in str(halfstep.diagnose(step, model=model))


def test_the_first_export_of_a_process(tmp_path: Path) -> None:
    program = """
import sys, torch, halfstep
from torch.export import export
model = torch.nn.Sequential(torch.nn.Linear(4, 2))
with halfstep.trace(model):
    assert "torch.export._trace" not in sys.modules
    export(model, (torch.ones(1, 4),), strict=True)
    function = sys.modules["torch.export._trace"]._export
assert sys.modules["torch.export._trace"]._export is not function
assert not any("halfstep" in type(each).__module__ for each in sys.meta_path)
"""
    assert forked.python("-c", program, cwd=tmp_path).code == 0
