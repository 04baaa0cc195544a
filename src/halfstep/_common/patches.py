"""Functions in the place of others for a while: around steps, and around top-level calls.

Top-level calls are those that a program makes outside of any module: of models, and of losses.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from halfstep._pytorch import compiler, optim

_MISSING = object()

Around = Callable[..., Any]
"""Called as ``around(original, *args, **kwargs)`` instead of ``original(*args, **kwargs)``."""


class Patches:
    """Attributes that were replaced, and what to put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

    def put(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a class or module until :meth:`undo`."""
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Around) -> Callable[..., Any]:
        """Let ``around`` run in place of a function of a class or module, until :meth:`undo`.

        Returns:
            What is there now.
        """
        original = getattr(owner, name)

        # What the original says of itself, as PyTorch's marks on optimizer.step, is copied.
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.put(owner, name, compiler.do_not_compile_alone(wrapper, nor_below=False))
        return wrapper

    def undo(self) -> None:
        """Put everything back, the newest first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def subclasses(cls: type) -> Iterator[type]:
    """Yield all classes that are derived from a class, at whatever distance, each once."""
    found: dict[type, None] = dict.fromkeys(cls.__subclasses__())
    for derived in list(found):
        found.update(dict.fromkeys(subclasses(derived)))
    yield from found


def watch_steps(
    patches: Patches, around: Callable[..., Any], meet: Callable[[Optimizer], object]
) -> None:
    """Put ``around`` in place of ``step`` of all classes of optimizers, those to come included.

    ``patches`` takes it back, and ``meet`` is called with every optimizer that is made.
    """
    # PyTorch changes `step` of a class when the first optimizer of it is made; only then do we.
    watched: weakref.WeakSet[type] = weakref.WeakSet()

    def watch(cls: type[Optimizer]) -> None:
        owner = next(base for base in cls.__mro__ if "step" in vars(base))
        if owner is not Optimizer and owner not in watched:
            watched.add(owner)
            patches.wrap(owner, "step", around)

    def init(original: Callable[..., None], optimizer: Optimizer, *args: Any, **kw: Any) -> None:
        original(optimizer, *args, **kw)
        meet(optimizer)
        watch(type(optimizer))

    for cls in subclasses(Optimizer):
        if optim.is_hooked(cls):
            watch(cls)
    patches.wrap(Optimizer, "__init__", init)


# --- top-level calls ------------------------------------------------------------------------------

not_compiled = functools.partial(compiler.do_not_compile_alone, nor_below=False)
"""For what torch.compile must not begin a graph with, though it may in what that calls."""


class _Thread(threading.local):
    is_inside = False


class TopLevelCalls:
    """What is around modules and loss functions that are not called :meth:`inside` of others.

    Attributes:
        losses: The names of the loss functions in ``torch.nn.functional`` that it is around; the
            loss modules of PyTorch call them.
    """

    # Not binary_cross_entropy: autocast refuses it in float16, and in float32 it needs no help.
    losses: tuple[str, ...] = (
        *(n for n in dir(functional) if n.endswith("_loss") and not n.startswith("_")),
        *("binary_cross_entropy_with_logits", "cross_entropy", "kl_div"),
    )

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
