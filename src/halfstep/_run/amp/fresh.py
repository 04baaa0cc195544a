"""What was found in gradients when a backward pass made them, until their optimizer steps."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from halfstep._scaler import passes
from halfstep._scaler.gradients import Gradients, collect, parameters
from halfstep._scaler.iteration import GradientCheck
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.scalars import as_tensor, combine


class Finding:
    """Whether gradients were finite when they were divided by the scale.

    They and their parameters are held weakly: what the script drops is gone.
    """

    def __init__(
        self, scale: LossScale, gradients: Gradients, found_inf: dict[torch.device, Tensor]
    ) -> None:
        self.scale = scale
        self.found_inf = found_inf
        pairs = zip(gradients.params, gradients.grads, strict=True)
        self._pairs = [(weakref.ref(param), weakref.ref(grad)) for param, grad in pairs]

    def _present(self) -> Iterator[tuple[Tensor, Tensor]]:
        for param_ref, grad_ref in self._pairs:
            param, grad = param_ref(), grad_ref()
            if param is not None and grad is not None and param.grad is grad:
                yield param, grad

    def part(self, is_in: Callable[[Tensor], bool]) -> Finding:
        """Return what it says of some of the parameters; it is the same of each."""
        part = copy.copy(self)
        part._pairs = [
            (weakref.ref(param), weakref.ref(grad))
            for param, grad in self._present()
            if is_in(param)
        ]
        return part

    @property
    def is_alive(self) -> bool:
        """Whether any of the gradients is still where it was."""
        return any(True for _ in self._present())

    def present(self) -> set[int]:
        """Return the ids of the gradients that are still where they were."""
        return {id(grad) for _, grad in self._present()}


class Fresh:
    """The findings since each optimizer's last step, and which optimizers there are."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._findings: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Finding]] = (
            weakref.WeakKeyDictionary()
        )
        # Of parameters that no optimizer has, or one that was made before us and is not yet known.
        self._of_strangers: list[Finding] = []

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Know an optimizer from now on."""
        self._optimizers.add(optimizer)

    def unscale_(self, params: Iterable[Tensor], scale: LossScale, by: Tensor) -> None:
        """Divide the gradients of parameters, each set of optimizers that share some by itself.

        One optimizer's step does not depend on gradients that are another's. 2 G. Sync: none.

        Args:
            params: All that a backward pass has added to.
            scale: The scale that moves by what is found.
            by: What the gradients are multiplied by.
        """
        owners: dict[int, list[torch.optim.Optimizer]] = defaultdict(list)
        for optimizer in self._optimizers:
            for param in parameters(optimizer):
                owners[id(param)].append(optimizer)
        shared: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for param in params:
            shared[tuple(map(id, owners.get(id(param), ())))].append(param)
        for group in shared.values():
            gradients = collect(group)
            if gradients.grads:
                found = passes.unscale_(gradients, by, can_amplify=scale.can_amplify)
                finding = Finding(scale, gradients, found)
                for optimizer in owners.get(id(group[0]), ()):
                    earlier = self._findings.get(optimizer, [])
                    self._findings[optimizer] = [*_alive(earlier), finding]
                if id(group[0]) not in owners:
                    self._of_strangers = [*_alive(self._of_strangers), finding]

    def take(self, optimizer: torch.optim.Optimizer) -> GradientCheck | None:
        """Return what was found for an optimizer since its last step, and forget it.

        Returns:
            A check of every gradient that it has now: one that the script has put in the place of
            another is checked here. None without gradients, or if they come from no scaled pass.
        """
        self._optimizers.add(optimizer)
        findings = self._findings.pop(optimizer, []) + self._taken_from_strangers(optimizer)
        gradients = collect(parameters(optimizer))
        if not findings or not gradients.grads:
            return None
        scale = findings[0].scale
        found = [finding.found_inf for finding in findings if finding.is_alive]
        others = gradients.without(set[int]().union(*(finding.present() for finding in findings)))
        if others.grads:
            found.append(passes.check(others))
        device = scale.tensor.device
        flags = [flag for by_device in found for flag in by_device.values()]
        found_inf = as_tensor(combine(flags, device), device)
        return GradientCheck(scale, gradients, {device: found_inf})

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget what was found for an optimizer, whose gradients are dropped or zeroed."""
        self._findings.pop(optimizer, None)
        self._taken_from_strangers(optimizer)

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether an optimizer has gradients from a scaled backward pass, and no step since."""
        return bool(_alive(self._findings.get(optimizer, [])))

    def is_waiting(self) -> bool:
        """Say whether any optimizer has such gradients."""
        return any(any(f.is_alive for f in findings) for findings in self._findings.values())

    def _taken_from_strangers(self, optimizer: torch.optim.Optimizer) -> list[Finding]:
        if not self._of_strangers:
            return []
        own = set(map(id, parameters(optimizer)))
        found = self._of_strangers
        self._of_strangers = _alive([f.part(lambda p: id(p) not in own) for f in found])
        return _alive([f.part(lambda p: id(p) in own) for f in found])


def _alive(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.is_alive]
