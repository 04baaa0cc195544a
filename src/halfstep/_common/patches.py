"""Functions in the place of others, for a while."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

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
