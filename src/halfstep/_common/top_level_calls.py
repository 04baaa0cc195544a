"""Being around what a program calls outside of any module: its models and its loss functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from halfstep._common.patches import Patches
from halfstep._pytorch import compiler

# Not binary_cross_entropy: autocast refuses it in float16, and in float32 it needs no help.
LOSSES = (
    *(n for n in dir(functional) if n.endswith("_loss") and not n.startswith("_")),
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "kl_div",
)
"""Names of the loss functions in ``torch.nn.functional``; the loss modules of PyTorch call them."""

not_compiled = partial(compiler.do_not_compile_alone, nor_below=False)
"""For what torch.compile must not begin a graph with, though it may in what that calls."""


class _Thread(threading.local):
    is_inside = False


class TopLevelCalls:
    """What is around modules and loss functions that are not called :meth:`inside` of others.

    Attributes:
        losses: The names of the loss functions that it is around.
    """

    losses: tuple[str, ...] = LOSSES

    def __init__(self) -> None:
        self._inside = _Thread()

    @property
    def is_on(self) -> bool:
        """False lets everything be called as it is."""
        raise NotImplementedError

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module that no other one has called: ``original(module, *args, **kwargs)``."""
        raise NotImplementedError

    def call_loss(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a loss function of PyTorch that no module has called."""
        raise NotImplementedError

    @property
    def is_inside(self) -> bool:
        """Whether this thread is :meth:`inside` a call."""
        return self._inside.is_inside

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let what is called in the block in this thread be called as it is."""
        before, self._inside.is_inside = self._inside.is_inside, True
        try:
            yield
        finally:
            self._inside.is_inside = before

    def install(self, patches: Patches) -> None:
        """Put it around the calls until ``patches`` are undone."""
        # Around __call__ and not as a hook: an error and Ctrl-C are seen too, and what
        # torch.compile compiles lies inside.
        original, thread = nn.Module.__call__, self._inside

        @not_compiled
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Every module of a model comes by here, so nothing else is asked of the inner ones.
            # In a graph all of this is a constant: it is compiled as if we were not there.
            if torch.compiler.is_compiling() or thread.is_inside or not self.is_on:
                return original(module, *args, **kwargs)
            return self.call_module(original, module, args, kwargs)

        patches.put(nn.Module, "__call__", call)
        for name in self.losses:
            function = getattr(functional, name)
            compiler.script_instead(
                patches.wrap(functional, name, self._around_loss(name)), function
            )

    def _around_loss(self, name: str) -> Callable[..., Any]:
        @not_compiled
        def loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._inside.is_inside or not self.is_on:
                return original(*args, **kwargs)
            return self.call_loss(name, original, args, kwargs)

        return loss
