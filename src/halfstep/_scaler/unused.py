"""Gradients that no step has used when a scale changes: they follow it when they are used.

Whoever divides them later divides by the scale of that time. An optimizer that accumulates over the
updates of another one holds such gradients, and so does one that steps after ``update(new_scale)``.

They are left alone until the scaler itself uses them, or a backward pass of a scaled loss adds to
them: until then they may be somebody's who has divided them by hand, or never scaled them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from halfstep._pytorch.autograd import after_backward, leaves_of
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler import passes
from halfstep._scaler.gradients import collect_local, parameters
from halfstep._scaler.iteration import Iteration, Journal, Stage, Step
from halfstep._scaler.loss_scale import LossScale, Scales
from halfstep._scaler.losses import tensors_in
from halfstep._scaler.scalars import ratio

NUM_LOSSES = 16
"""The graphs of this many losses are searched for parameters, a few milliseconds each. Optimizers
that come later are known from their first step on."""

NUM_UPDATES = 100
"""A parameter that no optimizer has stepped with by then is taken to have none."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """A gradient that waits for its use.

    Attributes:
        param: Whose gradient.
        grad: The gradient.
        version: How often it had been written to.
        scale: What it is to be multiplied by when it is used.
        before: What it is multiplied by now, a float32 scalar; None for nothing.
    """

    param: weakref.ref[Tensor]
    grad: weakref.ref[Tensor]
    version: int
    scale: LossScale
    before: Tensor | None

    def untouched(self) -> Tensor | None:
        """Return the parameter if nobody has written to its gradient since, else None."""
        param = self.param()
        grad = None if param is None else param.grad
        if grad is None or _version(grad) != self.version:
            return None
        return param if self.version == _VIEW or self.grad() is grad else None


_VIEW = -1


def _version(grad: Tensor) -> int:
    # Views, of a bucket or of a flat buffer, share the count of it; and after the first backward
    # pass DistributedDataParallel moves them to other buckets.
    return _VIEW if grad._is_view() else grad._version


class Unused:
    """Finds the gradients that no step has used, and lets them follow. Sync: none.

    Attributes:
        is_searching: Whether the graphs of losses are searched.
        waiting: The gradients that wait, by the id of their parameters.
        has_compiled_losses: Whether losses were scaled in compiled code, where nobody sees which
            backward passes are theirs.

    Args:
        journal: Knows all optimizers that have stepped.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.is_searching = True
        self._num_losses = 0
        # Parameters of losses, by id, that no known optimizer has.
        self._loose: dict[int, weakref.ref[Tensor]] = {}
        self._num_updates = 0
        self.waiting: dict[int, Waiting] = {}
        self.has_compiled_losses = False
        self._running: LossScale | None = None  # the scale of the loss whose backward pass runs
        self._hooks: list[RemovableHandle] = []

    def see_loss(self, scaled: Any, scale: LossScale) -> None:
        """Look at a loss that was multiplied by a scale, while that is of interest."""
        if self.is_searching:
            self._search(scaled)
        if self.waiting:
            self._note_loss(scaled, scale)

    def _search(self, scaled: Any) -> None:
        """Find the parameters that a backward pass from ``scaled`` gives gradients to."""
        self._num_losses += 1
        self.is_searching = self._num_losses < NUM_LOSSES
        for leaf in leaves_of(tensors_in(scaled)):
            if isinstance(leaf, torch.nn.Parameter):
                self._loose[id(leaf)] = weakref.ref(leaf)

    def before_change(self, iteration: Iteration, scales: Scales) -> dict[int, Waiting]:
        """Return the gradients that are to wait if a scale changes now, by the id of the parameter.

        Args:
            iteration: Knows which gradients have been unscaled.
            scales: The scales of all losses.
        """
        steps, num_losses = iteration.steps.values(), iteration.num_losses
        is_plain = not (self._loose or self.waiting or iteration.blocks)
        if is_plain and len(steps) == len(self._journal.memories):
            for step in steps:
                if step.stage is not Stage.STEPPED or step.num_losses != num_losses:
                    break
            else:
                return {}
        taken = _ids(step for step in steps if step.stage is Stage.STEPPED)
        in_blocks = iteration.scales_of_blocks()
        names = list(iteration.losses) or [None]
        of_iteration = scales.get(names[0]) if len(names) == 1 else None
        before: dict[LossScale, Tensor] = {}
        found: dict[int, Waiting] = {}
        for param in self._candidates(iteration):
            grad, waiting = param.grad, self.waiting.get(id(param))
            if waiting is not None and waiting.untouched() is param:
                found[id(param)] = waiting
                continue
            divided_by = in_blocks.get(id(param)) or iteration.scale_of(param)
            scale = divided_by or of_iteration
            is_used = divided_by is not None and id(param) in taken
            if grad is None or scale is None or scale.live is None or is_used:
                continue
            if divided_by is None and scale not in before:
                before[scale] = scale.tensor.clone()
            refs = weakref.ref(param), weakref.ref(grad)
            by = None if divided_by is not None else before[scale]
            found[id(param)] = Waiting(*refs, _version(grad), scale, by)
        return found

    def wait(self, found: dict[int, Waiting], *, iteration_ends: bool = True) -> None:
        """Let gradients wait whose scale has changed.

        Args:
            found: What :meth:`before_change` has returned.
            iteration_ends: Which gradients were unscaled will be forgotten: remember it.
        """
        if not (found or self.waiting or self._hooks or self._running):
            return
        self.waiting = {
            key: one
            for key, one in found.items()
            if iteration_ends or one.before is not None or key in self.waiting
        }
        self._end_backward()  # one that raised does not say so
        self._unhook()
        note = partial(_note_backward, weakref.ref(self))
        unserializable_hook(note)  # type: ignore[no-untyped-call]
        for one in self.waiting.values():
            param = one.param()
            if param is not None and param.requires_grad:
                hook = param.register_hook(note)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note_loss(self, scaled: Any, scale: LossScale) -> None:
        """Notice the backward pass of a loss that was multiplied by a scale."""

        def note(_: Tensor) -> None:
            self._running = scale
            after_backward(self._end_backward)

        for loss in tensors_in(scaled):
            if loss.requires_grad:
                loss.register_hook(note)  # type: ignore[no-untyped-call]

    def note_backward(self) -> None:
        """Use the gradients of a scale that wait if its loss is about to add to one of them."""
        if self.has_compiled_losses:
            self.use()
        elif self._running is not None:
            self._use([key for key, one in self.waiting.items() if one.scale is self._running])
        self._running = None  # all of them at once: views of one buffer, few kernels

    def _end_backward(self) -> None:
        self._running = None

    def use(self, params: Iterable[Tensor] | None = None) -> None:
        """Multiply gradients that wait, of these or all, by what their scales have changed by.

        On the CPU only if they have changed; elsewhere that is not known here: 2 G. Sync: none.
        """
        if self.waiting:
            self._use([*self.waiting] if params is None else [id(param) for param in params])

    @torch.no_grad()
    def _use(self, keys: list[int]) -> None:
        untouched = {key: one for key, one in self.waiting.items() if one.untouched() is not None}
        groups: dict[tuple[LossScale, int], list[Waiting]] = defaultdict(list)
        for one in [untouched.pop(key) for key in keys if key in untouched]:
            groups[one.scale, id(one.before)].append(one)
        self.waiting = untouched
        if not self.waiting:
            self._unhook()
        for (scale, _), ones in groups.items():
            before, now = ones[0].before, scale.tensor
            found = [param for one in ones if (param := one.param()) is not None]
            if before is None:
                passes.multiply_(collect_local(found), now)
            elif before.device.type != "cpu" or not torch.equal(before, now):
                passes.multiply_(collect_local(found), ratio(now, before))

    def _candidates(self, iteration: Iteration) -> list[Tensor]:
        """Return parameters with gradients, of which a step may not have used some."""
        done: list[Step] = []
        waiting: list[Iterable[Tensor]] = []
        for step in iteration.steps.values():
            # Nothing new can have come to those that have stepped since the last loss.
            if step.stage is Stage.STEPPED and step.num_losses == iteration.num_losses:
                done.append(step)
            else:
                waiting.append(step.parameters())
        waiting += [parameters(blocks.optimizer) for blocks in iteration.blocks.values()]
        seen = iteration.steps.keys() | iteration.blocks.keys()
        for optimizer, memory in self._journal.memories.items():
            outcome = memory.outcome
            if id(optimizer) not in seen and not (outcome and outcome.has_its_gradients()):
                waiting.append(parameters(optimizer))
        self._prune()
        params = [param for each in waiting for param in each]
        params += [param for ref in self._loose.values() if (param := ref()) is not None]
        left_out = _ids(done)
        found = {id(p): p for p in params if p.grad is not None and id(p) not in left_out}
        return list(found.values())

    def _prune(self) -> None:
        """Forget the parameters of optimizers that have stepped, and those that waited long."""
        self._num_updates += 1
        if self._loose:
            known = {id(p) for each in self._journal.memories for p in parameters(each)}
            self._loose = {
                key: ref
                for key, ref in self._loose.items()
                if ref() is not None and key not in known and self._num_updates < NUM_UPDATES
            }


def _ids(steps: Iterable[Step]) -> set[int]:
    return {id(param) for step in steps for param in step.parameters()}


@keep_out_of_graphs
def _note_backward(unused: weakref.ref[Unused], _: Tensor) -> None:
    found = unused()
    if found is not None:
        found.note_backward()
