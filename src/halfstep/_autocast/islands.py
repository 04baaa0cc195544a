"""Islands: modules that keep one dtype, whatever autocast does around them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import nn

from halfstep._autocast.module_names import matching
from halfstep._autocast.wrapping import Island, require_parameters, unwrap, wrap


def keep(
    model: nn.Module,
    *patterns: str,
    dtype: torch.dtype = torch.float32,
    cast_back: bool = False,
) -> Kept:
    """Run modules in one dtype, also under autocast: for good, or as long as a block.

    Their floating-point inputs are cast to ``dtype`` and autocast is off inside, for all of their
    submodules too. Parameters, ``state_dict`` and the kind of the modules stay as they are. Works
    inside ``torch.compile`` and activation checkpointing, in copies of the model and in threads.

    Args:
        model: The model; the patterns go by its names.
        *patterns: Globs over the names of ``model.named_modules()``: ``"head"``, ``"*.norm"``; a
            ``*`` stands for dots too.
        dtype: A floating dtype, that of the modules' parameters.
        cast_back: Cast outputs of ``dtype`` to that of the first floating-point input.

    Returns:
        What undoes it: ``keep(...).remove()``, or ``with keep(...):``.

    Raises:
        TypeError: ``model`` is no module, or ``dtype`` no floating dtype.
        ValueError: A pattern matches no module (the message names those like it), or the parameters
            of a module have another dtype.

    Sync: none.

    Example:
        >>> import halfstep
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> with halfstep.autocast("cpu", torch.bfloat16), keep(model, "1"):
        ...     model(torch.ones(1, 4)).dtype
        torch.float32
        >>> with halfstep.autocast("cpu", torch.bfloat16):
        ...     model(torch.ones(1, 4)).dtype
        torch.bfloat16
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"keep({type(model).__name__}): pass the model and patterns of its names")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"keep(dtype={dtype!r}): pass a floating dtype, such as torch.float32")
    if not patterns:
        raise ValueError("keep(model): say which modules to keep, such as keep(model, '*.norm')")
    modules: dict[str, nn.Module] = {}
    for pattern in patterns:
        modules |= matching(model, pattern, "keep()")
    for name, module in modules.items():
        require_parameters(name, module, dtype)
    return Kept(list(modules.values()), Island(dtype, cast_back))


class Kept:
    """Modules that are kept in one dtype until :meth:`remove`, or until the block is left."""

    def __init__(self, modules: list[nn.Module], island: Island) -> None:
        self._modules = modules
        self._island = island
        for module in modules:
            wrapped = wrap(module)
            wrapped._islands = (*wrapped._islands, island)

    def remove(self) -> None:
        """Let the modules run as autocast says again."""
        for module in map(wrap, self._modules):
            module._islands = tuple(each for each in module._islands if each is not self._island)
            unwrap(module)
        self._modules = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<{len(self._modules)} modules kept in {self._island.dtype}>"
