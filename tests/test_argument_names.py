"""Arguments of any name pass through every wrapper: of a model, an optimizer, a custom op."""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep._tools.run.amp import mixed_precision
from halfstep._tools.run.masters import Additions, added
from halfstep._tools.watch.watch import Watch

SOURCES = (Path(__file__).parent.parent / "src").rglob("*.py")


def own_names() -> Iterator[str]:
    """Yield the names of parameters of all functions that take any others too."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.args.vararg and node.args.kwarg:
                yield from (each.arg for each in (*node.args.posonlyargs, *node.args.args))


NAMES = sorted(set(own_names()) - {"self", "max_norm"})  # GradScaler.step has the second
ALL = dict.fromkeys(NAMES, 1.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Tensor, /, **given: float) -> Tensor:
        assert given in (ALL, {})
        return self.linear(batch)


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None, **given: float) -> Any:
        assert given.keys() == ALL.keys() - {"closure", "optimizer"}
        return super().step(closure)


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    with halfstep.keep(model, "*"), halfstep.autocast("cpu", torch.bfloat16):
        yield


@contextmanager
def with_module_rules(model: nn.Module) -> Iterator[None]:
    policy = halfstep.Policy.parse("standard; linear@linear:fp32; @linear[fp16]:fp32")
    with halfstep.autocast("cpu", torch.bfloat16, policy=policy, module=model):
        yield


@contextmanager
def parametrized(model: nn.Module) -> Iterator[None]:
    nn.utils.parametrizations.weight_norm(model.linear)
    with kept(model):
        yield


TOOLS: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
    "nothing": lambda model: nullcontext(),
    "--amp fp16": lambda model: mixed_precision(torch.float16, print),
    "--amp bf16": lambda model: mixed_precision(torch.bfloat16, print),
    "--diagnose": lambda model: Watch(tell=print),
    "--masters --guard": lambda model: added(Additions(True, True), print),
    "keep": kept,
    "keep, parametrized": parametrized,
    "rules of modules": with_module_rules,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_model_and_an_optimizer_take_arguments_of_any_name(tool):
    assert {"module", "function", "original"} <= set(NAMES)
    model = Model()
    with TOOLS[tool](model):
        optimizer = Optimizer(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 4), **ALL).square().mean().backward()
            optimizer.step(**{k: v for k, v in ALL.items() if k not in ("closure", "optimizer")})
            optimizer.load_state_dict(state_dict=optimizer.state_dict())


def test_the_steps_of_guards_and_scalers_take_arguments_of_any_name():
    given = {k: v for k, v in ALL.items() if k not in ("closure", "optimizer")}
    model = Model().bfloat16()
    optimizer, scaler = Optimizer(model.parameters(), lr=0.1), halfstep.GradScaler()
    halfstep.master_weights(optimizer)
    scaler.scale(outputs=model(torch.ones(2, 4).bfloat16()).mean()).backward()
    scaler.step(optimizer=optimizer, **given)
    scaler.update()
    guarded = Optimizer(model.parameters(), lr=0.1)
    halfstep.guard(guarded)
    model(torch.ones(2, 4).bfloat16()).mean().backward()
    guarded.step(**given)


LIBRARY = torch.library.Library("names", "DEF")  # for ever: policies stay prepared for its op


@pytest.fixture(scope="module")
def op() -> Callable[..., Tensor]:
    options = ", ".join(f"float {name}" for name in NAMES)
    LIBRARY.define(f"scaled(Tensor batch, *, {options}) -> Tensor")
    LIBRARY.impl("scaled", lambda x, /, **given: x * given["keys"], "CompositeImplicitAutograd")
    return torch.ops.names.scaled


@pytest.mark.parametrize("action", ["lower", "fp32", "promote", "leave"])
def test_a_custom_op_takes_keywords_of_any_name(action, op):
    with halfstep.autocast("cpu", torch.bfloat16, policy=f"standard; names::scaled:{action}"):
        assert op(torch.ones(2), **ALL).sum() == 2
