"""Losses are scaled, and gradients are divided by the scale as soon as backward has made them.

Outside of a backward pass every ``grad`` is then what it would be without a scale, whoever looks at
it or changes it. What a gradient holds already is multiplied by the scale before a pass adds to it.
The scale is a power of two, so that this loses nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep import _torch
from halfstep._common.patches import Patches
from halfstep._run.amp.findings import Findings
from halfstep._run.amp.fresh import Fresh
from halfstep._scaler import GradScaler, passes
from halfstep._scaler.gradients import collect
from halfstep._scaler.loss_scale import LossScale


class ScaledPass:
    """One backward pass: which leaves it adds to, and what it multiplies by."""

    def __init__(self, scale: LossScale, fresh: Fresh) -> None:
        self._scale = scale
        self._by = scale.tensor.clone()  # an optimizer that steps on the way may move the scale
        self._fresh = fresh
        self._leaves: dict[int, Tensor] = {}

    def include(self, leaves: Iterable[Tensor]) -> None:
        """Expect additions to the gradients of these leaves. 2 G of those that they have."""
        new = [leaf for leaf in leaves if id(leaf) not in self._leaves]
        self._leaves.update((id(leaf), leaf) for leaf in new)
        held = collect(new)
        if held.grads:
            passes.multiply_(held, self._by)

    def unscale_(self, params: Iterable[Tensor] | None = None) -> None:
        """Divide the gradients of some leaves, of all that are left by default. 2 G."""
        ids = list(self._leaves) if params is None else [id(p) for p in params]
        done = [self._leaves.pop(key) for key in ids if key in self._leaves]
        if done:
            self._fresh.unscale_(done, self._scale, self._by)


class Backward:
    """Puts itself around ``torch.autograd.backward``, which ``Tensor.backward`` calls.

    Args:
        scaler: Its scale is used.
        fresh: Is told what was found in the gradients.
        findings: Is told that there was a backward pass.
    """

    def __init__(self, scaler: GradScaler, fresh: Fresh, findings: Findings) -> None:
        self._scaler = scaler
        self._fresh = fresh
        self._findings = findings
        self._retained: list[weakref.ref[Tensor]] = []
        self.running: ScaledPass | None = None

    def install(self, patches: Patches) -> None:
        """Put ourselves there, and around what makes a tensor that is no leaf keep its gradient."""
        patches.wrap(torch.autograd, "backward", self._backward)
        patches.wrap(torch.Tensor, "retain_grad", self._retain_grad)

    def _retain_grad(self, original: Callable[[Tensor], None], tensor: Tensor) -> None:
        original(tensor)
        if not tensor.is_leaf:
            self._retained.append(weakref.ref(tensor))

    @_torch.keep_out_of_graphs
    def _backward(
        self,
        original: Callable[..., None],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        def run(roots: Any) -> None:
            original(roots, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

        if not self._findings.is_training:
            run(tensors)
            return
        self._findings.has_backward = True
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if _torch.backward_number() >= 0:
            # A checkpoint recomputes a part; its gradients are scaled with those of the whole.
            if self.running is not None:
                self.running.include(_reached(roots, inputs))
            run(tensors)
        elif create_graph or not all(map(_can_be_scaled, roots)):
            # What is differentiated again, or has no value, is left alone: that may underflow, but
            # gradients have the same unit as all others.
            run(roots)
        else:
            self._scaled(run, roots, inputs)

    def _scaled(self, run: Callable[[Any], None], roots: list[Tensor], inputs: Any) -> None:
        engine = self._scaler._engine
        if engine.iteration.checks:  # an optimizer has stepped, and another had not yet
            self._scaler.update()
        scaled = self._scaler.scale(roots)
        running = ScaledPass(engine.scales[None], self._fresh)
        running.include(_reached(scaled, inputs))
        running.include(self._retaining())
        self.running = running
        try:
            run(scaled)
        finally:
            self.running = None
            running.unscale_()

    def _retaining(self) -> list[Tensor]:
        # Those of other graphs are multiplied and divided for nothing.
        self._retained = [ref for ref in self._retained if ref() is not None]
        return [tensor for ref in self._retained if (tensor := ref()) is not None]


def _reached(roots: Sequence[Tensor], inputs: Any) -> Iterable[Tensor]:
    if inputs is None:
        return _torch.leaves_of(roots)
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    return [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.is_leaf]


def _can_be_scaled(root: object) -> bool:
    return isinstance(root, Tensor) and root.is_floating_point() and root.requires_grad
