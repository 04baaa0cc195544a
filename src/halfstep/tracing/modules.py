"""Which module of a model is running, thread by thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from halfstep import _torch
from halfstep.casting.module_names import without_wrappers


@dataclass(frozen=True)
class Call:
    """A call of a module that has not returned yet.

    Attributes:
        module: The path of the module.
        index: How many calls of it there were before.
        in_backward: Whether it was called in a backward pass, to recompute something.
    """

    module: str
    index: int
    in_backward: bool


OUTSIDE = Call("", 0, False)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, Call]] = []


class RunningModules:
    """The calls of a model's modules that have not returned, in this thread."""

    def __init__(self, model: nn.Module) -> None:
        # The first name of a module that has several. `model` itself is called "".
        self._names = {m: without_wrappers(name) for name, m in model.named_modules()}
        self._counts: Counter[nn.Module] = Counter()
        self._stack = _Stack()

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
            in_backward = _torch.backward_number() >= 0
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
