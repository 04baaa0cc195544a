"""Which module of a model is running, thread by thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from halfstep._autocast.module_names import without_wrappers
from halfstep._pytorch import autograd
from halfstep._trace.rows import grouped


class Call(NamedTuple):
    """A call of a module that has not returned yet.

    Attributes:
        module: The path of the module.
        number: How many calls of it there were before.
        in_backward: Whether it was called in a backward pass, to recompute something.
    """

    module: str
    number: int
    in_backward: bool


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Call]] = []


class RunningModules:
    """The calls of a model's modules that have not returned, in this thread."""

    def __init__(self, model: nn.Module | None) -> None:
        self._names: dict[nn.Module, str] = {}
        if model is not None:
            self.add(model)
        self._counts: Counter[nn.Module] = Counter()
        self._stack = _Stack()

    def add(self, model: nn.Module, name: str = "") -> None:
        """Know the modules of a model too.

        Args:
            model: The model.
            name: What it is called itself, and what stands before the names of its modules.
        """
        # The first name of a module that has several.
        for path, module in model.named_modules():
            names = (each for each in (name, without_wrappers(path)) if each)
            self._names.setdefault(module, ".".join(names))

    def knows(self, module: nn.Module) -> bool:
        """Say whether a module is one of them."""
        return module in self._names

    @property
    def have_run(self) -> bool:
        """Whether any of them was called."""
        return bool(self._counts)

    def innermost(self) -> Call | None:
        """Return the last call, None outside the model."""
        return self._stack.calls[-1][1] if self._stack.calls else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the calls that are made meanwhile."""
        # Hooks for all modules, not hooks on each: nn.TransformerEncoderLayer looks whether it has
        # hooks and then computes in another way, so that tracing would change results.
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            in_backward = autograd.backward_number() >= 0
            call = Call(name, self._counts[module], in_backward)
            self._counts[module] += 1
            self._stack.calls.append((module, call))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        # Calls that a KeyboardInterrupt ended, for which no hook ran, lie above it. It is not there
        # itself where a hook that runs before ours raised an error.
        calls = self._stack.calls
        if any(running is module for running, _ in calls):
            while calls.pop()[0] is not module:
                pass


def pattern(module: str) -> str:
    """Return the glob that a path shares with those that differ from it in an index only."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def folded(modules: Iterable[str]) -> list[str]:
    """Return paths, with one glob for those that differ in an index only."""
    alike = grouped(dict.fromkeys(modules), pattern)
    return [glob if len(paths) > 1 else paths[0] for glob, paths in alike.items()]
