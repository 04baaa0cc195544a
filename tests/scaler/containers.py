"""Optimizers around others, of the kinds that training code has: wrappers and containers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer


class Wrapper(Optimizer):
    """Passes everything on, as the wrappers of accelerate and of others do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Bare:
    """Has neither groups nor state."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers: Any = optimizers

    def each(self) -> Iterator[Any]:
        return iter(self.optimizers)

    def step(self) -> None:
        for optimizer in self.each():
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each():
            optimizer.zero_grad()


class Named(Bare):
    def __init__(self, optimizers: list[Any]) -> None:
        super().__init__({str(number): each for number, each in enumerate(optimizers)})  # type: ignore[arg-type]

    def each(self) -> Iterator[Any]:
        return iter(self.optimizers.values())


class PerPart(Bare):
    """A list for each part of a model."""

    def __init__(self, optimizers: list[Any]) -> None:
        super().__init__([[each] for each in optimizers])

    def each(self) -> Iterator[Any]:
        return itertools.chain(*self.optimizers)


class Chained:
    """Groups are a new list each time; ``step`` returns three things and takes no closure."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.chained_optimizers = optimizers

    def each(self) -> Iterator[Any]:
        return iter(self.chained_optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.each() for group in each.param_groups]

    @property
    def state(self) -> Any:
        return [(n, key) for n, each in enumerate(self.each()) for key in each.state]

    def step(self) -> tuple[bool, None, None]:
        for optimizer in self.each():
            optimizer.step()
        return True, None, None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.each():
            optimizer.zero_grad(set_to_none)


class Parts(Optimizer):
    """One group of its own with all parameters, a state that stays empty; iterable."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers
        all_params = [
            p for each in optimizers for group in each.param_groups for p in group["params"]
        ]
        super().__init__(list(dict.fromkeys(all_params)), {"lr": 1.0})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.optimizers)

    each = __iter__

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)


class Facade(Optimizer):
    """Does not call ``Optimizer.__init__``; evaluates a closure once."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers, self.defaults = optimizers, {}

    def each(self) -> Iterator[Any]:
        return iter(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for each in self.optimizers for key, value in each.state.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class OfFirst(Facade):
    """Shows the groups of the first one only, for schedules."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        groups: list[dict[str, Any]] = self.optimizers[0].param_groups
        return groups


class Twice(Bare):
    """Holds containers, and itself."""

    def __init__(self, optimizers: list[Any]) -> None:
        super().__init__([Bare(optimizers[:1]), Chained(optimizers[1:]), self])

    def each(self) -> Iterator[Any]:
        return itertools.chain(*(held.each() for held in self.optimizers[:2]))

    def step(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.each():
            optimizer.step(*args, **kwargs)


KINDS = [Bare, Named, PerPart, Chained, Parts, Facade, OfFirst, Twice]
