"""Temporary replacements of functions: wrappers of optimizer steps and of top-level calls.

Top-level calls are those of models that are made outside of any module.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep._pytorch import compiler, optim

not_compiled = functools.partial(compiler.do_not_compile_alone, nor_below=False)
"""A decorator: torch.compile must not start a graph in the function, but may in its callees."""

Around = Callable[..., Any]  # a wrapper, called as `around(original, *args, **kwargs)`


class Patches(ExitStack):
    """Replaced attributes, restored, newest first, by :meth:`close` or at the end of a block."""

    def put(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a class or module until the end."""
        own = vars(owner)
        if name in own:
            self.callback(setattr, owner, name, own[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Around) -> Callable[..., Any]:
        """Wrap a function of a class or module until the end, and return the wrapper."""
        original = getattr(owner, name)

        # Copies the original's attributes, such as PyTorch's marks on optimizer.step.
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.put(owner, name, not_compiled(wrapper))
        return wrapper


class ThreadFlag(threading.local):
    """A flag of each thread, which is on in blocks."""

    is_on = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch the flag on in the block, in this thread."""
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before


def subclasses(cls: type) -> Iterator[type]:
    """Yield all direct and indirect subclasses of a class, each once."""
    found: dict[type, None] = dict.fromkeys(cls.__subclasses__())
    for derived in list(found):
        found.update(dict.fromkeys(subclasses(derived)))
    yield from found


def watch_steps(
    patches: Patches,
    around: Callable[..., Any],
    meet: Callable[[Optimizer], object],
    *,
    is_transparent: bool = False,
) -> None:
    """Wrap ``step`` of all optimizer classes with ``around``, including future ones.

    ``patches`` undoes it. ``meet`` is called with every new optimizer. See
    :data:`halfstep._pytorch.optim.TRANSPARENT` for ``is_transparent``.
    """
    # PyTorch changes `step` of a class when its first instance is created; wrap it after that.
    watched: weakref.WeakSet[type] = weakref.WeakSet()

    def watch(cls: type[Optimizer]) -> None:
        owner = next(base for base in cls.__mro__ if "step" in vars(base))
        if owner is not Optimizer and owner not in watched:
            watched.add(owner)
            wrapper = patches.wrap(owner, "step", around)
            if is_transparent:
                optim.TRANSPARENT.add(wrapper)

    def init(original: Callable[..., None], optimizer: Optimizer, /, *args: Any, **kw: Any) -> None:
        original(optimizer, *args, **kw)
        meet(optimizer)
        watch(type(optimizer))

    for cls in subclasses(Optimizer):
        if optim.is_hooked(cls):
            watch(cls)
    patches.wrap(Optimizer, "__init__", init)


# --- top-level calls ------------------------------------------------------------------------------


class TopLevelCalls:
    """A handler for modules that are not called :meth:`inside` of others."""

    def __init__(self) -> None:
        self._inside = ThreadFlag()

    @property
    def is_on(self) -> bool:
        """Whether calls are handled; otherwise they run unchanged."""
        raise NotImplementedError

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Handle the call of a module outside of others: ``original(module, *args, **kwargs)``."""
        raise NotImplementedError

    @property
    def is_inside(self) -> bool:
        return self._inside.is_on

    def inside(self) -> AbstractContextManager[None]:
        """Let calls in the block, in this thread, run unchanged."""
        return self._inside.on()

    def install(self, patches: Patches) -> None:
        """Handle the calls until ``patches`` are undone."""
        # __call__ is replaced because a hook would miss errors and Ctrl-C. What torch.compile
        # compiles is inside.
        original, inside = nn.Module.__call__, self._inside

        @not_compiled
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # Every module of a model gets here, so inner ones take the shortest path. In a graph
            # these conditions are constants, so compiled code has no overhead.
            if torch.compiler.is_compiling() or inside.is_on or not self.is_on:
                return original(module, *args, **kwargs)
            return self.call_module(original, module, args, kwargs)

        patches.put(nn.Module, "__call__", call)
