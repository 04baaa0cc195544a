"""Versions of a model: a run of one, with the values of its modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.modules import replicated, without_wrappers
from halfstep._common.nested import tensors_in
from halfstep._common.patches import Patches
from halfstep._common.random_states import RandomStates, accelerators
from halfstep._common.top_level_calls import TopLevelCalls, not_compiled
from halfstep._pytorch import autograd, modes
from halfstep._pytorch.compiler import eager
from halfstep._tune.passes import module_hooks
from halfstep._tune.task import called_with, restored
from halfstep._tune.tolerances import Depths

Names = dict[int, str]
"""The names of modules, by their ids."""


@dataclass
class SeenModule:
    """Values of a module in a run: for each call, its floating-point tensors.

    Attributes:
        module: The module.
        inputs: Those among its arguments.
        outputs: Those that it returned.
        depth: The number of ops in a row up to its outputs.
        dtype: The coarsest dtype of a floating-point tensor or parameter up to there.
    """

    module: nn.Module
    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    depth: int = 0
    dtype: torch.dtype = torch.float64


@dataclass
class Version:
    """Run of a version.

    Attributes:
        output: What it returned.
        modules: The modules that ran, by name, in the order in which they first returned.
    """

    output: Any
    modules: dict[str, SeenModule]


def run(version: Callable[..., Any], batch: Any, names: Names) -> Version:
    """Call a version with a batch, and restore its models and the random numbers.

    Args:
        version: The function or module.
        batch: What it is called with.
        names: The names of modules that are known; those of others are added.

    Sync: none by itself.
    """
    listener, patches = _Listener(names, list(tensors_in([batch]))), Patches()
    states = RandomStates(accelerators())
    try:
        with eager(has_global_hooks=False), listener.restoring:
            listener.install(patches)
            output = called_with(version, batch)
    finally:
        patches.undo()
        states.restore()
    return Version(output, listener.returned)


class _Listener(TopLevelCalls):
    """Keeps what the modules of the models that are called take and return."""

    def __init__(self, names: Names, batch: list[Tensor]) -> None:
        super().__init__()
        self.restoring = ExitStack()
        self.returned: dict[str, SeenModule] = {}
        self._names, self._batch = names, batch
        self._seen: dict[str, SeenModule] = {}
        self._restored: set[int] = set()
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._depths, self._num_returned, self._dtype = Depths(), 0, torch.float64

    @property
    def is_on(self) -> bool:
        """Always."""
        return True

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a model, with hooks on its modules."""
        named = self._named(module)
        if id(module) not in self._restored:
            tensors = [*module.parameters(), *module.buffers(), *self._batch]
            device = tensors[0].device.type if tensors else "cpu"
            self.restoring.enter_context(restored(module, self._batch, device))
            self._restored |= {id(each) for each in module.modules()}

        def before(name: str, _: int, given: Any) -> None:
            seen = self._seen.setdefault(name, SeenModule(named[name]))
            seen.inputs.append(self._kept(given))
            for parameter in named[name].parameters(recurse=False):
                self._count_precision(parameter)

        def after(name: str, _: int, output: Any) -> None:
            seen = self.returned.setdefault(name, self._seen[name])
            seen.outputs.append(self._kept(output))
            self._num_returned += 1
            # As autograd counts ops; where nothing has a gradient, at least the modules.
            depths = [self._depths.of(each) for each in tensors_in([output])]
            seen.depth = max(seen.depth, self._num_returned, *depths)
            seen.dtype = self._dtype

        with self.inside(), module_hooks(named.items(), before, after):
            return original(module, *args, **kwargs)

    def call_loss(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a loss function, which is of no interest here."""
        return original(*args, **kwargs)

    def _named(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the modules of a model by name; those that have a name keep it."""
        prefix = self._names.get(id(model), type(model).__name__ if self._restored else "")
        for path, module in replicated(model).named_modules():
            parts = (prefix, without_wrappers(path))
            self._names.setdefault(id(module), ".".join(each for each in parts if each))
        return {self._names[id(each)]: each for each in replicated(model).modules()}

    def _kept(self, values: Any) -> list[Tensor]:
        """Return copies of the floating-point tensors in containers."""
        return [
            self._copy(each)
            for each in tensors_in([values])
            if each.is_floating_point() and not modes.is_inside_functorch(each)
        ]

    def _copy(self, tensor: Tensor) -> Tensor:
        self._count_precision(tensor)
        if tensor.is_inference():  # it may be written to unseen
            return tensor.clone()
        key = id(tensor), autograd.version_of(tensor)
        if key not in self._copies:
            self._copies[key] = tensor, tensor.detach().clone()
        return self._copies[key][1]

    def _count_precision(self, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            self._dtype = coarser(self._dtype, tensor.dtype)


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the one of two floating dtypes that has fewer digits."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)
