"""The models of a run: which modules they have, what those are called, in which order they ran."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from halfstep import _torch
from halfstep.casting.module_names import without_wrappers
from halfstep.recording.lines import Event


class Models:
    """All models that are trained, held weakly.

    Names in the first are without a prefix; those in a later one begin with its class and number,
    as in ``Critic[1].fc.weight``.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._prefixes: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._order: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[nn.Module]:
        return (model for _, model in self._present())

    def add(self, model: nn.Module) -> None:
        """Take in a model, unless it is one already, or a part of one."""
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        if model in self._names:
            return
        prefix = f"{type(model).__name__}[{len(self)}]" if self._models else ""
        self._models.append(weakref.ref(model))
        self._prefixes.append(prefix)
        for name, module in model.named_modules():
            self._names.setdefault(module, _joined(prefix, without_wrappers(name)))

    def name(self, module: nn.Module) -> str | None:
        """Return the name of a module, None if it is in no model."""
        return self._names.get(module)

    @property
    def has_compiled(self) -> bool:
        """Whether torch.compile has made something of any of their modules."""
        return any(map(_torch.is_compiled, self._names))

    def eager_modules(self, first: int) -> Iterator[nn.Module]:
        """Yield the modules, from the model of a number on, that are not inside compiled ones."""
        for _, model in self._present(first):
            yield from _eager(model)

    def parameters(self, first: int = 0) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters, from the model of a number on."""
        for prefix, model in self._present(first):
            for name, parameter in model.named_parameters():
                yield _joined(prefix, without_wrappers(name)), parameter

    def ran(self, name: str) -> None:
        """Take note of when a module first ran to its end."""
        self._order.setdefault(name, len(self._order))

    def culprits(self, found: list[Tensor]) -> tuple[list[str], str | None]:
        """Return the names of parameters with bad gradients, and where it began.

        That is the module, of theirs, that ran last in the forward pass: the backward pass meets it
        first, and everything before it gets inf or NaN from it.
        """
        bad = set(map(id, found))
        names = list(dict.fromkeys(name for name, p in self.parameters() if id(p) in bad))
        owners = [name.rpartition(".")[0] for name in names]
        began = max(owners, key=lambda owner: self._order.get(owner, -1), default=None)
        return names, began

    def events(self, step: int) -> list[Event]:
        """Return a ``model`` line for each."""
        ran = sorted(self._order, key=self._order.__getitem__)
        by_model = [[name for name in ran if _starts(name, p)] for p in self._prefixes]
        later = {name for names in by_model[1:] for name in names}
        return [
            {
                "event": "model",
                "step": step,
                "name": type(model).__name__,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "modules": [name for name in names if prefix or name not in later],
            }
            for (prefix, model), names in zip(self._present(), by_model, strict=False)
        ]

    def _present(self, first: int = 0) -> Iterator[tuple[str, nn.Module]]:
        for ref, prefix in zip(self._models[first:], self._prefixes[first:], strict=True):
            model = ref()
            if model is not None:
                yield prefix, model


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _starts(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


def _eager(module: nn.Module) -> Iterator[nn.Module]:
    if _torch.is_compiled(module):
        return
    yield module
    for child in module.children():
        yield from _eager(child)
