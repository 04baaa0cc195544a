"""Modules of PyTorch that are imported late, because importing them takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Execute = Callable[[ModuleType], None]


class AroundImports(MetaPathFinder):
    """Import finder that loads some modules by ``load(module, execute)``."""

    def __init__(self, names: Collection[str], load: Callable[[ModuleType, Execute], None]) -> None:
        self._names, self._load = names, load

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._load(module, execute)  # type: ignore[method-assign]
        return spec
