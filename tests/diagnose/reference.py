"""Reference search for the first bad op: slow, obvious, and independent of halfstep's.

Every op that a dispatch mode sees is checked, harmless ones too: decoys have to be out. Lines of
the backward pass are those that PyTorch's anomaly mode keeps; modules are written on the nodes of
autograd by hooks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).parent
PLACES = HERE, HERE / "corpus" / "code"


@dataclass(frozen=True)
class Event:
    """Op that made values that are not finite from finite ones.

    ``node``: the name of autograd's node whose gradient it computes. ``line``: (file name, number).
    """

    op: str
    module: str
    phase: str
    node: str | None
    line: tuple[str, int] | None


class Watch(TorchDispatchMode):
    """Notes the ops that make NaN of what held none, or an infinity of what was finite."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._stack = stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        is_written_over = name == "copy_"  # what was there before may be anything
        inputs = list(_floats((args[1:] if is_written_over else args, kwargs)))
        had_nan, had_inf = _holds(torch.isnan, inputs), _holds(torch.isinf, inputs)
        result = func(*args, **kwargs)
        outputs = list(_floats(result))
        if had_nan or func.is_view or name.startswith(("empty", "new_empty")):
            return result
        makes_nan = _holds(torch.isnan, outputs)
        makes_inf = not had_inf and _holds(torch.isinf, outputs) and name != "masked_fill"
        if makes_nan or makes_inf:
            self.events.append(self._event(name))
        return result

    def _event(self, name: str) -> Event:
        node = torch._C._current_autograd_node()
        if node is None or type(node).__name__.endswith("CheckpointHook"):
            return Event(name, self._stack[-1], "forward", None, _line_of_caller())
        line = _line_in_backward() or _line_in(node.metadata.get("traceback_", []))
        return Event(name, node.metadata.get("module", ""), "backward", node.name(), line)


def _floats(values: Any) -> Iterator[Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value


def _holds(test: Any, tensors: Iterable[Tensor]) -> bool:
    return any(bool(test(tensor).any()) for tensor in tensors)


def _line_of_caller() -> tuple[str, int] | None:
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent in PLACES and path.name != "reference.py":
            return path.name, frame.f_lineno
        frame = frame.f_back
    return None


def _line_in_backward() -> tuple[str, int] | None:
    """Return the line of a ``backward`` written in Python, if it is one that runs."""
    found = _line_of_caller()
    return found if found and found[0] in ("gradients.py", "models.py") else None


def _line_in(traceback: list[str]) -> tuple[str, int] | None:
    for entry in reversed(traceback):
        match = re.match(r'\s*File "(.+?)", line (\d+)', entry)
        if match and Path(match[1]).parent in PLACES and Path(match[1]).name != "reference.py":
            return Path(match[1]).name, int(match[2])
    return None


@contextmanager
def _modules_noted(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep a stack of the modules that run, and write them on the nodes they leave behind."""
    handles = []
    for path, module in model.named_modules():

        def enter(module: nn.Module, args: Any, path: str = path) -> None:
            stack.append(path)
            for node in _nodes(args):  # of what the caller did before
                node.metadata.setdefault("module", stack[-2])

        def leave(module: nn.Module, args: Any, out: Any, path: str = path) -> None:
            for node in _nodes(out):
                node.metadata.setdefault("module", path)
            stack.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nodes(values: Any) -> Iterator[Any]:
    """Yield the nodes before some values, up to those that have their module."""
    todo = [value.grad_fn for value in _floats(values) if value.grad_fn is not None]
    while todo:
        node = todo.pop()
        if "module" not in node.metadata and node.name() != "torch::autograd::AccumulateGrad":
            todo += [before for before, _ in node.next_functions if before is not None]
            yield node


def bad_ops(training: Any) -> list[Event]:
    """Run the step of a training; return its bad ops, the first one first."""
    stack = [""]
    watch = Watch(stack)
    anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with _modules_noted(training.model, stack), anomaly, watch:
        training.step()
    return watch.events
