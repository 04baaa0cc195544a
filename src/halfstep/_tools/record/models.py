"""The models of a run, with names of modules and parameters and the order of execution."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from halfstep._common.module_names import replicated, without_wrappers
from halfstep._gradients.buffers import NAN, levels_of
from halfstep._pytorch import compiler, modes
from halfstep._tools.record.files import Event

_Kind = TypeVar("_Kind")

_STATISTICS = ("running_mean", "running_var")


@dataclass
class _KnownModel:
    """A recorded model, as a weak reference."""

    ref: weakref.ref[nn.Module]
    prefix: str
    is_written: bool = False
    bad_buffers: list[str] = field(default_factory=list)
    levels: dict[str, int] | None = None  # of the buffers that may be inf or NaN

    def named(self, found: Iterable[tuple[str, _Kind]]) -> Iterator[tuple[str, _Kind]]:
        """Yield modules, parameters or buffers of the model with their names in the record."""
        for name, each in found:
            yield ".".join(filter(None, (self.prefix, without_wrappers(name)))), each


class Models:
    """The models of a run, with the names of their modules and parameters.

    Names in the first model have no prefix; names in a later one begin with its class and number,
    as in ``Critic[1].fc.weight``.
    """

    def __init__(self) -> None:
        self._models: list[_KnownModel] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._order: dict[str, int] = {}
        self._first_levels: dict[str, int] = {}  # of the buffers, when their model was found

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[nn.Module]:
        return (model for _, model in self._present())

    def add(self, model: nn.Module) -> bool:
        """Add a model unless it is known; return whether it replaces known parts of it."""
        model = replicated(model)
        if model in self._names:
            return False
        modules = set(model.modules())
        has_parts = any(known.ref() in modules for known in self._models)
        self._models = [
            known
            for known in self._models
            if (known.is_written or known.ref() is not None) and known.ref() not in modules
        ]
        prefix = f"{type(model).__name__}[{len(self)}]" if self._models else ""
        known = _KnownModel(weakref.ref(model), prefix)
        self._models.append(known)
        for name, module in known.named(model.named_modules()):
            if has_parts or module not in self._names:
                self._names[module] = name
        with modes.unseen_by_modes():
            levels = levels_of(known.named(model.named_buffers())).items()
        # Statistics never begin as NaN: this model has run before, or its checkpoint has NaN.
        self._first_levels |= {n: at for n, at in levels if at < NAN or not n.endswith(_STATISTICS)}
        return has_parts

    def name(self, module: nn.Module) -> str | None:
        """Return the name of a module; None if no model contains it."""
        return self._names.get(module)

    @property
    def has_compiled(self) -> bool:
        return any(map(compiler.is_compiled, self._names))

    def eager_modules(self) -> Iterator[nn.Module]:
        """Yield the modules outside compiled modules."""
        for model in self:
            yield from _eager(model)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for known, model in self._present():
            yield from known.named(model.named_parameters())

    def bad_buffers(self) -> list[str]:
        """Return the names of buffers that became inf or NaN since they were finite.

        An inf that is there at the first call of this belongs there: in a mask, which may be filled
        in the first forward pass, or the limits of a range. So does NaN from before that pass,
        except in running statistics. What was known of a model that no longer exists stays. Sync:
        some.
        """
        for known, model in self._present():
            levels = levels_of(known.named(model.named_buffers()))
            if known.levels is None:
                known.levels = {n: max(1, self._first_levels.get(n, 0)) for n in levels}
            known.levels = {n: min(at, known.levels.get(n, 0)) for n, at in levels.items()}
            known.bad_buffers = [n for n, at in levels.items() if at > known.levels[n]]
        return [name for known in self._models for name in known.bad_buffers]

    def ran(self, name: str) -> None:
        """Record that a module has run to its end, for the order of first runs."""
        self._order.setdefault(name, len(self._order))

    def culprits(self, found: list[Tensor]) -> tuple[list[str], str | None]:
        """Return the names of parameters with bad gradients, and the module where it began.

        It is the module with such parameters that ran last in the forward pass: the backward pass
        reaches it first and propagates inf or NaN to all earlier ones. Modules that contain other
        such modules do not count, nor do modules that were not seen to run.
        """
        bad = set(map(id, found))
        names = [name for name, p in self.parameters() if id(p) in bad]
        # A parameter in several modules belongs to the last of them.
        owners = {
            name.rpartition(".")[0]
            for known, model in self._present()
            for name, p in known.named(model.named_parameters(remove_duplicate=False))
            if id(p) in bad
        }
        around = {owner for owner in owners if any(_starts(o, owner) for o in owners - {owner})}
        seen = [owner for owner in owners - around if owner in self._order]
        return names, max(seen, key=self._order.__getitem__, default=None)

    def events(self, step: int) -> list[Event]:
        """Return a ``model`` event for each model that has none yet."""
        prefixes = [known.prefix for known in self._models if known.prefix]
        events = []
        for known, model in self._present():
            if known.is_written:
                continue
            known.is_written = True
            others = [prefix for prefix in prefixes if prefix != known.prefix]
            modules = [
                name
                for name in self._order
                if _starts(name, known.prefix) and not any(_starts(name, o) for o in others)
            ]
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            event = {"event": "model", "step": step, "name": type(model).__name__}
            events.append(event | {"parameters": num_parameters, "modules": modules})
        return events

    def _present(self) -> Iterator[tuple[_KnownModel, nn.Module]]:
        for known in self._models:
            model = known.ref()
            if model is not None:
                yield known, model


def _starts(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


def _eager(module: nn.Module) -> Iterator[nn.Module]:
    if compiler.is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _eager(child)
