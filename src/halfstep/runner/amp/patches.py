"""Functions in the place of others, for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from halfstep import _torch

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

        self.put(owner, name, _torch.do_not_compile_alone(wrapper, nor_below=False))
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
