"""Gradients that no step has used when a scale changes: they follow it when they are used.

Whoever divides them later divides by the scale of that time. An optimizer that accumulates over the
updates of another one holds such gradients, and so does one that steps after ``update(new_scale)``.

They are left alone until the scaler itself uses them, or a backward pass of a scaled loss adds to
them: until then they may be somebody's who has divided them by hand, or never scaled them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from halfstep._common.nested import tensors_in
from halfstep._pytorch.autograd import after_backward, is_view, leaves_of
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.gradients import collect_local, parameters
from halfstep._scaler.iteration import Iteration, Journal, Stage, Step
from halfstep._scaler.loss_scale import LossScale, Scales
from halfstep._scaler.scalars import ratio

NUM_LOSSES = 16
"""The graphs of this many losses are searched for parameters, a few milliseconds each. Optimizers
that come later are known from their first step on."""

NUM_UPDATES = 100
"""A parameter that no optimizer has stepped with by then is taken to have none."""

_VIEW = -1


@dataclass(frozen=True, eq=False)
class WaitingGradient:
    """A gradient that waits for its use.

    Attributes:
        version: How often it had been written to, or that it is a view.
        scale: What it is to be multiplied by when it is used.
        before: What it is multiplied by now, a float32 scalar; None if it has been unscaled.
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


def _version(grad: Tensor) -> int:
    # Views, of a bucket or of a flat buffer, share the count of it; and after the first backward
    # pass DistributedDataParallel moves them to other buckets.
    return _VIEW if is_view(grad) else grad._version


class Unused:
    """Finds the gradients that no step has used, and lets them follow. Sync: none."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal  # knows all optimizers that have stepped
        self.is_searching = True  # the graphs of losses
        self._num_losses = 0
        # Parameters of losses, by id, that no known optimizer has.
        self._loose: dict[int, weakref.ref[Tensor]] = {}
        self._num_updates = 0
        self.waiting: dict[int, WaitingGradient] = {}  # by the id of the parameter
        # Whether losses were scaled where nobody sees which backward passes are theirs.
        self.has_compiled_losses = False
        self._running: LossScale | None = None  # the scale of the loss whose backward pass runs
        self._hooks: list[RemovableHandle] = []

    def see_loss(self, scaled: Any, scale: LossScale) -> None:
        """Look at a loss that was multiplied by a scale, while that is of interest."""
        losses = list(tensors_in([scaled]))
        if self.is_searching:
            self._num_losses += 1
            self.is_searching = self._num_losses < NUM_LOSSES
            leaves = leaves_of(losses)
            found = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
            self._loose |= {id(leaf): weakref.ref(leaf) for leaf in found}
        if self.waiting:
            self._notice_backward_of(losses, scale)

    def _notice_backward_of(self, losses: list[Tensor], scale: LossScale) -> None:
        def begin(_: Tensor) -> None:
            self._running = scale
            after_backward(self._end_backward)

        for loss in losses:
            if loss.requires_grad:
                loss.register_hook(begin)  # type: ignore[no-untyped-call]

    def _end_backward(self) -> None:
        self._running = None

    def before_change(self, iteration: Iteration, scales: Scales) -> dict[int, WaitingGradient]:
        """Return the gradients that are to wait if a scale changes now, by parameter's id."""
        steps = iteration.steps.values()
        stepped: list[Step] = []
        done: list[Step] = []  # those whose gradients nothing new can have come to since
        for step in steps:
            if step.stage is Stage.STEPPED:
                stepped.append(step)
                if step.num_losses == iteration.num_losses:
                    done.append(step)
        is_usual = not (self._loose or self.waiting or iteration.blocks)
        if is_usual and len(done) == len(steps) == len(self._journal.memories):
            return {}
        self._prune()
        ids_done = {id(param) for step in done for param in step.parameters()}
        # A step has used what was unscaled before it or by it, and not what was unscaled later.
        used = {
            (id(param), check)
            for step in stepped
            for param in step.parameters()
            for check in step.checks
        }
        in_blocks = iteration.scales_of_blocks()
        names = list(iteration.losses) or [None]
        of_losses = scales.get(names[0]) if len(names) == 1 else None
        before: dict[LossScale, Tensor] = {}
        found: dict[int, WaitingGradient] = {}
        for param in self._candidates(iteration):
            key, grad = id(param), param.grad
            if grad is None or key in ids_done or key in found:
                continue
            waiting = self.waiting.get(key)
            if waiting is not None and waiting.untouched() is param:
                found[key] = waiting
                continue
            check = iteration.check_of(param)
            divided_by = in_blocks.get(key) or (None if check is None else check.scale)
            scale = divided_by or of_losses
            if scale is None or scale.live is None or (key, check) in used:
                continue
            if divided_by is None and scale not in before:
                before[scale] = scale.tensor.clone()
            multiplied_by = before[scale] if divided_by is None else None
            refs = weakref.ref(param), weakref.ref(grad)
            found[key] = WaitingGradient(*refs, _version(grad), scale, multiplied_by)
        return found

    def _candidates(self, iteration: Iteration) -> Iterator[Tensor]:
        """Yield the parameters whose gradients a step may not have used, some more than once."""
        for step in iteration.steps.values():
            yield from step.parameters()
        for blocks in iteration.blocks.values():
            yield from parameters(blocks.optimizer)
        seen = iteration.steps.keys() | iteration.blocks.keys()
        for optimizer, memory in self._journal.memories.items():
            outcome = memory.outcome
            if id(optimizer) not in seen and not (outcome and outcome.has_its_gradients()):
                yield from parameters(optimizer)
        for ref in self._loose.values():
            if (param := ref()) is not None:
                yield param

    def _prune(self) -> None:
        """Forget the parameters of optimizers that have stepped, and those that waited long."""
        self._num_updates += 1
        if self._num_updates >= NUM_UPDATES:
            self._loose = {}
        if self._loose:
            known = {id(p) for each in self._journal.memories for p in parameters(each)}
            alive = {key: ref for key, ref in self._loose.items() if ref() is not None}
            self._loose = {key: ref for key, ref in alive.items() if key not in known}

    def wait(self, found: dict[int, WaitingGradient], *, iteration_ends: bool = True) -> None:
        """Let the gradients wait that :meth:`before_change` has found: their scale has changed.

        ``iteration_ends``: which gradients were unscaled will be forgotten, so remember it.
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
        ref = weakref.ref(self)

        @unserializable_hook  # type: ignore[untyped-decorator]
        @keep_out_of_graphs
        def note(_: Tensor) -> None:
            unused = ref()
            if unused is not None:
                unused.before_adding()

        for one in self.waiting.values():
            param = one.param()
            if param is not None and param.requires_grad:
                self._hooks.append(param.register_hook(note))  # type: ignore[no-untyped-call]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def before_adding(self) -> None:
        """Use the gradients of a scale that wait if its loss is about to add to one of them."""
        if self.has_compiled_losses:
            self._use(self.waiting)
        elif self._running is not None:
            # All of them at once: views of one buffer, few kernels.
            self._use(key for key, one in self.waiting.items() if one.scale is self._running)
        self._end_backward()

    def use(self, params: Iterable[Tensor] | None = None) -> None:
        """Multiply gradients that wait, of these or all, by what their scales have changed by.

        On the CPU only if they have changed; elsewhere that is not known here: 2 G. Sync: none.
        """
        if self.waiting:
            self._use(self.waiting if params is None else map(id, params))

    @torch.no_grad()
    def _use(self, keys: Iterable[int]) -> None:
        wanted = set(keys)
        ready: dict[tuple[LossScale, Tensor | None], list[Tensor]] = defaultdict(list)
        waiting: dict[int, WaitingGradient] = {}
        for key, one in self.waiting.items():
            param = one.untouched()
            if param is None:
                continue
            if key in wanted:
                ready[one.scale, one.before].append(param)
            else:
                waiting[key] = one
        self.waiting = waiting
        if not waiting:
            self._unhook()
        for (scale, before), params in ready.items():
            now = scale.tensor
            if before is None:
                collect_local(params).multiply_(now)
            elif before.device.type != "cpu" or not torch.equal(before, now):
                collect_local(params).multiply_(ratio(now, before))
